"""Where a text ends, and where it cannot go on: no drafts below a stop token, no draw from nothing."""

import copy
import dataclasses
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, prompt, tiny, tiny_drafter, tiny_tokenizer
from transformers import LogitsProcessor

from opt_tree import Sampling, Stop, custom_generate, generate_batch, load_pair
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.policy import OptTree
from opt_tree.tools.presets import opt
from opt_tree.tree import Tree


def decoder_of(drafter: str = "lm", **how: Any) -> Decoder:
    lm = CausalLM(copy.deepcopy(tiny("llama")).float())
    drafts = CausalLMDrafter(CausalLM(tiny_drafter("llama")), lm.vocab) if drafter == "lm" else NGramDrafter()
    return opt(lm, drafts, OptTree(20, 0.0, 5), **how)


@pytest.mark.quick("1.0-ngram")
@pytest.mark.parametrize("drafter", ["lm", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_below_a_stop_token(drafter, temperature):
    """The text is the same; E(A) is that of the tree that is left."""
    text = [*prompt(9), *prompt(9), *prompt(9)]
    sampling = Sampling(temperature)
    decoder = decoder_of(drafter)
    whole = decoder.generate(text, 40, sampling)
    first = {token: place for place, token in reversed([*enumerate(whole.tokens)])}
    inner: set[int] = set()
    emitted = 0
    for step in whole.steps:  # tokens with something below, which the text has not come to yet
        emitted += len(step.tokens)
        above = step.tree.parents[1:]
        inner |= {token for token in step.tree.tokens[above[above > 0]].tolist() if first.get(token, 99) >= emitted}
    ends = frozenset({max(inner, key=lambda token: first.get(token, 99))})
    length = next((place for place, token in enumerate(whole.tokens, 1) if token in ends), 40)
    found = decoder.generate(text, 40, sampling, Stop(ends))
    assert found.tokens == whole.tokens[:length]
    [rows] = [generate_batch(decoder, [text], 40, sampling, Stop(ends), width=2)]
    assert rows[0].tokens == found.tokens
    cut = 0
    for step, other in zip(found.steps, whole.steps, strict=False):
        parents = step.tree.parents[1:]
        assert not {*step.tree.tokens[parents[parents > 0]].tolist()} & ends
        assert step.expected_accepted <= other.expected_accepted + 1e-9
        cut += other.tree.nodes - step.tree.nodes
    assert cut > 0, "there was something to leave out"


def test_a_tree_without_what_lies_below_an_end():
    tree = Tree(
        np.array([7, 1, 7, 2, 3, 4, 5]),
        np.array([-1, 0, 0, 1, 2, 4, 3]),
        -np.arange(7.0),
        np.array([0, 1, 2, 3, 4, -1, -1]),
    )
    cut = tree.ending_at({7})
    assert cut.tokens.tolist() == [7, 1, 7, 2, 5] and cut.parents.tolist() == [-1, 0, 0, 1, 3]
    assert cut.draft_rows.tolist() == [0, 1, 2, 3, -1] and cut.path_log_probs.tolist() == [0, -1, -2, -3, -6]
    assert tree.ending_at(()) is tree and tree.ending_at({9}) is tree, "the root has been emitted before"


class Answers(LogitsProcessor):
    """Says the same of every token, once the text is so long."""

    def __init__(self, value: float, length: int = 0) -> None:
        self.value, self.length = value, length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.clone() if ids.shape[1] < self.length else torch.full_like(scores, self.value)


@pytest.mark.parametrize(
    ("value", "says"), [(-inf, "allows no token"), (nan, "answers NaN"), (inf, "answers infinity")]
)
@pytest.mark.parametrize("length", [0, 13])
def test_nothing_to_draw_from_is_refused_with_the_processors_name(value, says, length):
    sampling = Sampling(1.0, processors=(Answers(value, length),))
    with pytest.raises(ValueError, match=rf"no token can be drawn at row \d+ of a tree of \d+: .*Answers {says}"):
        decoder_of().generate(prompt(9), 20, sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_turn_nan_are_refused(temperature):
    decoder = decoder_of()
    decoder.generate(prompt(9), 4)
    with torch.no_grad():
        decoder.target.model.model.norm.weight.fill_(nan)
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        decoder.generate(prompt(9), 20, Sampling(temperature))


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_one_broken_row_of_the_output_layer_is_refused_where_tokens_are_drawn(temperature, value):
    """One logit that is no finite number makes every probability of the softmax NaN."""
    decoder = decoder_of()
    with torch.no_grad():
        decoder.target.model.lm_head.weight[3] = value
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        decoder.generate(prompt(9), 20, Sampling(temperature), stop=None)


@pytest.mark.parametrize("generate", [Decoder.generate, generate_batch], ids=["one", "several"])
def test_what_belongs_to_sampling_is_told_so(generate):
    decoder = decoder_of()
    given = prompt(9) if generate is Decoder.generate else [prompt(9)]
    with pytest.raises(TypeError, match=r"takes no temperature: pass sampling=Sampling\(temperature=0.7\)"):
        generate(decoder, given, temperature=0.7)
    with pytest.raises(TypeError, match=r"takes no top: .*help\(Decoder.generate\) lists all"):
        generate(decoder, given, top=3)


class TestTheTargetsOwnEnds:
    """Without a rule a generation stops where the model's own `generate` does."""

    @pytest.fixture(params=["tree", "paths"])
    def decoder(self, request) -> Decoder:
        model = copy.deepcopy(tiny("llama"))
        lm = CausalLM(model) if request.param == "tree" else ChainLM(model)
        return opt(lm, NGramDrafter(), OptTree(8, 0.0, 4))

    @pytest.fixture
    def text(self, decoder) -> list[int]:
        return decoder.generate(prompt(9), 30).tokens

    @pytest.mark.quick("tree")
    def test_generate_steps_and_batch(self, decoder, text):
        model, end = decoder.target.model, text[9]
        model.generation_config.eos_token_id = [end, VOCAB - 1]  # changed after it was wrapped, as plain generate sees
        length = text.index(end) + 1
        ids = torch.tensor([prompt(9)])
        expected = model.generate(ids, max_new_tokens=30, do_sample=False)[0, 9:].tolist()
        assert expected == text[:length] and length < 30
        for answer in (decoder.generate(prompt(9), 30), *generate_batch(decoder, [prompt(9)] * 2, 30)):
            assert (answer.tokens, answer.finish_reason) == (expected, "stop_token")
        written = [token for step in decoder.steps(prompt(9), 30) for token in step.tokens]
        assert written[:length] == expected and len(written) <= length + 1  # nothing is drafted below an end
        # None says never, everywhere.
        assert decoder.generate(prompt(9), 30, stop=None).tokens == text
        assert [one.tokens for one in generate_batch(decoder, [prompt(9)] * 2, 30, stop=[None, Stop()])] == [
            text,
            expected,
        ]
        assert [token for step in decoder.steps(prompt(9), 30, stop=None) for token in step.tokens][:30] == text

    @pytest.mark.quick("tree")
    def test_strings_alone_keep_the_ends_and_tokens_replace_them(self, decoder, text):
        decoder.target.model.generation_config.eos_token_id = text[9]
        length = text.index(text[9]) + 1
        tokenizer = tiny_tokenizer()
        never = Stop(strings=("no such text",), tokenizer=tokenizer)
        assert decoder.generate(prompt(9), 30, stop=never).tokens == text[:length]
        assert decoder.generate(prompt(9), 30, stop=Stop((), ("no such text",), tokenizer)).tokens == text
        other = next(token for token in text if token not in text[:length])
        assert decoder.generate(prompt(9), 30, stop=Stop({other})).tokens == text[: text.index(other) + 1]

    @pytest.mark.quick("tree")
    def test_custom_generate_has_the_criteria_of_transformers_and_no_more(self, decoder, text):
        model = decoder.target.model
        model.generation_config.eos_token_id = text[9]
        other = next(token for token in text if token not in text[: text.index(text[9]) + 1])
        given = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": other, "pad_token_id": 0}
        ids = torch.tensor([prompt(9)])
        found = model.generate(ids, **given, custom_generate=custom_generate(decoder))[0, 9:].tolist()
        assert found == model.generate(ids, **given)[0, 9:].tolist() == text[: text.index(other) + 1]


@pytest.mark.quick("CausalLM")
@pytest.mark.parametrize("scored_by", [CausalLM, ChainLM])
def test_a_pair_names_the_ends_of_its_tokenizer_too(scored_by):
    pair = load_pair("demo", "ngram", dtype="float32")
    if scored_by is ChainLM:
        pair = dataclasses.replace(pair, target=ChainLM(pair.target.model))
    assert pair.target.ends == pair.stop.tokens and pair.tokenizer.eos_token_id in pair.target.ends
    pair.target.model.generation_config.eos_token_id = None
    assert pair.tokenizer.eos_token_id in pair.target.ends
    decoder = Decoder(pair.target, pair.drafter, OptTree(8, 0.1))
    ids = pair.encode("Why is the sky blue?")
    answer = decoder.generate(ids, 120)
    assert answer.finish_reason == "stop_token" and answer.tokens == decoder.generate(ids, 120, stop=pair.stop).tokens
