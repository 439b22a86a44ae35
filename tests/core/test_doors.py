"""What is refused where it is given, each with a line that says what was expected; and how things name themselves."""

from typing import Any

import pytest
import torch
from networks import PROMPTS, VOCAB, drafter_of, network

from opt_tree.backend import Backend, Meter
from opt_tree.cache import KVCache
from opt_tree.children import TopK
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.errors import UnsupportedModelError, counted, one_line, require
from opt_tree.model import Model
from opt_tree.policy import MOST_NODES, OptTree, TreePolicy
from opt_tree.sampling import Random, Temperature
from opt_tree.target import Work
from opt_tree.verify import greedy, match

PROMPT = PROMPTS[1]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = network("llama")
    return Decoder(Model(model), drafter_of(model), OptTree(4), greedy)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"input_ids": [1]}, TypeError, r'prompt must be token ids, got a dict: pass its \["input_ids"\]'),
        (5, TypeError, "prompt must be a list, got 5"),
        ([[1], [2]], ValueError, "a batch of 2 prompts"),
        (torch.tensor([[1], [2]]), ValueError, "a batch of 2 prompts"),
        ([], ValueError, "the prompt is empty"),
        ([[]], ValueError, "the prompt is empty"),
        ("text", ValueError, "the prompt must be token ids; run the tokenizer on text first"),
        ([1, 2.5], ValueError, "the prompt must be token ids"),
        ([1] * 256, ValueError, "the prompt has 256 tokens, which leaves no room in 256 of context$"),
        ([1, VOCAB, 3], ValueError, f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([1, -3, VOCAB], ValueError, f"token -3 is outside the vocabulary of {VOCAB}"),
    ],
    ids=str,
)
def test_prompts(decoder: Decoder, prompt: Any, error: type[Exception], message: str) -> None:
    for decode in (decoder.generate, decoder.steps):
        with pytest.raises(error, match=message):
            decode(prompt)


def test_the_longest_prompt_and_the_last_token_are_taken(decoder: Decoder) -> None:
    found = decoder.generate([VOCAB - 1, 0] * 127 + [0], 5, stop=None)
    assert len(found.prompt) == 255 and len(found.tokens) == 1 and found.finish_reason == "context"
    decoder.target.context_note = " (a note)"
    with pytest.raises(ValueError, match=r"256 of context \(a note\)"):
        decoder.generate([1] * 256)
    decoder.target.context_note = ""


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, ValueError, "max_new_tokens must be at least 1, got 2.5: whole tokens"),
        ({"max_new_tokens": float("inf")}, ValueError, "max_new_tokens must be at least 1, got inf"),
        ({"max_new_tokens": "8"}, TypeError, "max_new_tokens must be a number, got '8'"),
        ({"sampling": 0.7}, TypeError, r"sampling must be a Sampling, such as Sampling\(temperature=0.7\), got 0.7"),
        (
            {"sampling": Temperature(0.7)},
            ValueError,
            "verifier greedy judges at temperature 0 only, got temperature 0.7",
        ),
        ({"stop": 5}, TypeError, "stop must be a rule"),
        ({"reuse": 1}, TypeError, "reuse must be True or False, got 1"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number, got 1.5"),
        ({"top_p": 0.9}, TypeError, r"generate\(\) takes no top_p: pass sampling=Sampling\(top_p=0.9\)"),
    ],
    ids=str,
)
def test_requests(decoder: Decoder, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decoder.generate(PROMPT, **given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: OptTree(0), ValueError, "nodes must be at least 1, got 0"),
        (lambda: OptTree(2.5), ValueError, "nodes must be a whole number, got 2.5"),
        (lambda: OptTree(4, 0.0, 2.5), ValueError, "max_depth must be a whole number, got 2.5"),
        (lambda: OptTree(4, -0.1), ValueError, "threshold must be 0 or more, got -0.1"),
        (lambda: OptTree(4, float("nan")), ValueError, "threshold must be 0 or more, got nan"),
        (lambda: OptTree(4, 0.0, 0), ValueError, "max_depth must be at least 1, got 0"),
        (lambda: OptTree(MOST_NODES + 1), ValueError, "nodes must be at most 4096, got 4097"),
        (lambda: OptTree(4, 0.0, MOST_NODES + 1), ValueError, "max_depth must be at most 4096, got 4097"),
        (lambda: OptTree("4"), TypeError, "nodes must be a number, got '4'"),
        (lambda: TopK(), ValueError, "TopK takes either per_node or total"),
        (lambda: TopK(1, 1), ValueError, "TopK takes either per_node or total"),
        (lambda: TopK(0), ValueError, "TopK takes at least one token"),
        (lambda: TopK(total=-1), ValueError, "TopK takes at least one token"),
        (lambda: TopK(1.5), TypeError, "per_node must be a whole number or None, got 1.5"),
        (lambda: Temperature("1"), TypeError, "temperature must be a number, got '1'"),
        (lambda: Random("1"), TypeError, "seed must be a whole number, got '1'"),
        (lambda: CausalLMDrafter(5), TypeError, "lm must be of type Model, got 5"),
    ],
)
def test_settings(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_least_and_the_greatest_settings_are_taken() -> None:
    assert OptTree(MOST_NODES, 0, MOST_NODES).children == TopK(total=MOST_NODES)
    assert OptTree(1, 0.0, 1) == OptTree(1.0, 0, 1.0) and OptTree() == OptTree(60, 0.5, 10)
    assert TopK(1).budget is None and TopK(total=1).budget == 1 and not TopK(1).sampled
    assert Random(2**64 - 1).draw(torch.ones(1, 3), torch.zeros(1, dtype=torch.long).numpy()).shape == (1,)
    assert Random(-(2**63)).fresh.random() == Random(2**63).fresh.random() != Random(0).fresh.random()


class Nothing(TreePolicy):
    pass


class Other(TreePolicy):
    policies = (OptTree(4),)


class Drawn(TopK):
    sampled = True


class Drawing(OptTree):
    children = Drawn(total=4)


class NamingFew(CausalLMDrafter):
    names_few = True


class Unlikely(OptTree):
    """Chooses what grows no tree."""

    policies = (Nothing(),)


def test_policies_that_grow_nothing(decoder: Decoder) -> None:
    target, drafter = decoder.target, decoder.drafter
    with pytest.raises(TypeError, match="Nothing grows no tree: it has no children"):
        Decoder(target, drafter, Nothing())
    with pytest.raises(TypeError, match="Nothing grows no tree: it has no children"):
        Decoder(target, drafter, Unlikely())
    Decoder(target, drafter, Other())
    Other.policies = (5,)
    with pytest.raises(TypeError, match="5 is no TreePolicy"):
        Decoder(target, drafter, Other())
    chooser = Nothing()
    chooser.__dict__["policies"] = (OptTree(4),)
    Other.policies = (chooser,)
    with pytest.raises(TypeError, match="Nothing chooses among policies and grows no tree itself"):
        Decoder(target, drafter, Other())
    with pytest.raises(TypeError, match="lossy must be True or False, got 1"):
        Decoder(target, drafter, OptTree(4), lossy=1)
    few = NamingFew(drafter.lm)
    Decoder(target, few, OptTree(4)), Decoder(target, drafter, Drawing(4))
    with pytest.raises(TypeError, match=r"NamingFew names a few tokens .* Drawing draws its children \(Drawn\)"):
        Decoder(target, few, Drawing(4))
    assert few.calibrated(1) is few
    with pytest.raises(TypeError, match="NamingFew names a few tokens only: they cannot be calibrated"):
        few.calibrated(0.5)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_calibrations(decoder: Decoder, temperature: float) -> None:
    with pytest.raises(ValueError, match=f"the temperature of a calibration must be positive, got {temperature}"):
        decoder.drafter.calibrated(temperature)
    with pytest.raises(TypeError, match="temperature must be a number, got '1'"):
        decoder.drafter.calibrated("1")
    assert decoder.drafter.temperature == 1


def test_a_network_that_keeps_no_rows_is_refused() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.embedding = network("llama").config, torch.nn.Embedding(4, 4)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

        def forward(self, input_ids, **others):
            raise KeyError("no\n  cache " + "x" * 400)

    with pytest.raises(UnsupportedModelError, match=r"^Broken does not run with a key/value cache: Key") as told:
        Model(Broken())
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_errors_in_one_line() -> None:
    require(int, one=1, two=2), require((int, str), one="1")
    with pytest.raises(TypeError, match=r"^two must be of type int or a text, got 2\.5$"):
        require((int, str), one=1, two=2.5)
    assert one_line(ValueError("a\n  b")) == "ValueError: a b" and len(one_line(ValueError("x" * 999))) == 312
    assert [counted(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_parts_name_themselves(decoder: Decoder) -> None:
    count = sum(weight.numel() for weight in decoder.target.model.parameters())
    assert decoder.target.size == f"{count / 1e6:.1f} M parameters, float64"
    target = f"<Model LlamaForCausalLM: {decoder.target.size}, 256 tokens of context>"
    assert repr(decoder.target) == target
    assert repr(decoder) == f"<Decoder: {target}, <CausalLMDrafter>, {decoder.policy!r}, greedy>"
    assert decoder.drafter.describe() == f"draft model LlamaForCausalLM: {decoder.target.size}"
    decoder.drafter.name = "tiny"
    assert repr(decoder.drafter) == "<CausalLMDrafter tiny>"
    assert decoder.drafter.describe() == f"draft model tiny: {decoder.target.size}"
    decoder.drafter.name = ""
    assert decoder.drafter.settings == {"draft_dtype": "float64"}
    assert match.__name__ == "match" and Backend.name == "plain"


def test_work_is_counted_and_compared() -> None:
    one, other = Work(3, 20, 1.5), Work(1, 5, 0.5)
    assert one + other == Work(4, 25, 2.0) and one - other == Work(2, 15, 1.0) and Work() == Work(0, 0, 0.0)
    meter = Meter()
    begin = meter.now()
    assert meter.now() >= begin
    meter.add(7, 1.0, 3.5), meter.add(1, 1.0, 1.5)
    assert meter.work == Work(2, 8, 3.0)
    model = Model(network("llama"))
    model.append([1, 2, 3])
    model.work = Work()
    assert model.work == model.backend.meter.work == Work() and isinstance(model.cache, KVCache)
