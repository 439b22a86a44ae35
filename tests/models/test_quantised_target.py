"""A target with quantised weights is a target like any other: canonical, its trees exact, its heads along with it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build, prompt, tiny
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from evaluation.run.models import load
from evaluation.run.options import Models
from opt_tree import CausalLMDrafter, Decoder, OptTree, load_pair
from opt_tree.backends import compiled as aot
from opt_tree.backends.quantised import QuantisedLinear, quantise
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.models import checkpoints
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm
from opt_tree.models.compiling import compile_forwards
from opt_tree.tools.presets import plain

NEW = 32
INFLATE = Path(__file__).parents[2] / "experiments" / "inflate.py"
QUESTION = "Why is the sky blue?"

pytestmark = pytest.mark.usefixtures("kernel", "quantised_kernel")


def model(weights: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model wide enough for each of its layers to be quantised."""
    wide = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | changes
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    made = build(LlamaConfig(**wide, **heads, initializer_range=0.3, eos_token_id=None), 5).to(dtype)
    quantise(made, weights)
    return made


@pytest.mark.quick("int8-lm:demo", "int4-lm:demo")
@pytest.mark.parametrize(
    ("weights", "spec"),
    [("int8", "lm:demo"), ("int8", "eagle:demo"), ("int8", "store:demo"), ("int8", "exit:demo"), ("int4", "lm:demo")],
)
def test_a_trees_text_is_plain_decodings(weights: str, spec: str) -> None:
    """In bfloat16 activations, with every kind of drafter: models of their own, heads, tables, the target's layers."""
    pair = load_pair("demo", spec, weights=weights, dtype="bfloat16")
    assert pair.target.canonical and weights in pair.target.size
    asked = pair.encode(QUESTION)
    expected = plain(pair.target).generate(asked, NEW).tokens
    found = Decoder(pair.target, pair.drafter, OptTree(nodes=12, threshold=0.1)).generate(asked, NEW)
    assert found.tokens == expected and found.mean_acceptance_length > 1.2


@pytest.mark.slow
def test_a_quantised_text_is_not_the_other_one() -> None:
    """Else nothing was quantised."""
    logits = {}
    for weights in (None, "int8", "int4"):
        pair = load_pair("demo", "ngram", weights=weights, dtype="float32")
        logits[weights] = pair.target.append(pair.encode(QUESTION)).logits.clone()
    off = [float((logits[weights] - logits[None]).norm() / logits[None].norm()) for weights in ("int8", "int4")]
    assert 0 < off[0] < 0.05 and off[0] < off[1] < 0.5


def test_a_file_in_bfloat16_is_quantised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of float32, which would be in memory as a whole; with the numbers that it would have given."""
    made = build(LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2), 5)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded, load_whole = [], checkpoints._load_whole

    def noted(*given: Any, dtype: torch.dtype, **more: Any) -> Any:
        loaded.append(dtype)
        return load_whole(*given, dtype=dtype, **more)

    monkeypatch.setattr(checkpoints, "_load_whole", noted)
    found: Any = load_causal_lm(str(tmp_path), torch.float32, weights="int4")
    assert loaded == [torch.bfloat16]
    wide = load_whole(AutoModelForCausalLM, str(tmp_path), dtype=torch.float32)
    quantise(wide, "int4")
    assert found.dtype == found.model.config.dtype == torch.float32 == found.model.lm_head.dtype
    for (name, one), (same, other) in zip(found.model.state_dict().items(), wide.state_dict().items(), strict=True):
        assert name == same and one.dtype == other.dtype and torch.equal(one, other)
    asked = prompt(20)
    assert torch.equal(found.append(asked).logits, CausalLM(wide).append(asked).logits)

    def rounded(*given: Any, dtype: torch.dtype, **more: Any) -> Any:
        model = noted(*given, dtype=dtype, **more)
        model.register_buffer("scale", torch.tensor(8.1, dtype=dtype))
        return model

    loaded.clear()
    monkeypatch.setattr(checkpoints, "_load_whole", rounded)
    assert load_causal_lm(str(tmp_path), torch.float32, weights="int4").dtype == torch.float32
    scalar = torch.tensor(1.5, dtype=torch.bfloat16)
    assert checkpoints._widened(scalar).equal(torch.tensor(1.5)), "also of one number"
    assert loaded == [torch.bfloat16, torch.float32], "what is computed from the dtype is computed in float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_canonical(dtype: torch.dtype) -> None:
    lm = CausalLM(model("int8", dtype))
    make_canonical(lm)
    assert lm.canonical


def test_its_size_counts_each_weight_once() -> None:
    plainly = CausalLM(copy.deepcopy(tiny("llama")).float()).size
    assert plainly.endswith("float32")
    for tied in (False, True):
        made = model("int8", tie_word_embeddings=tied)
        count = sum(weight.numel() for weight in made.parameters())
        count += sum(layer.numbers for layer in made.modules() if isinstance(layer, QuantisedLinear))
        own = build(made.config, 5)
        assert count == sum(weight.numel() for weight in own.parameters())
        assert CausalLM(made).size.endswith("bfloat16, int8")


@pytest.mark.slow
def test_a_head_is_quantised_with_its_target() -> None:
    head: Any = load_pair("demo", "eagle:demo", weights="int4", dtype="bfloat16").drafter
    layers = {type(layer) for layer in head.models[0].model.modules()}
    assert QuantisedLinear in layers and nn.Linear not in layers
    other: Any = load_pair("demo", "eagle:demo", dtype="bfloat16").drafter
    assert QuantisedLinear not in {type(layer) for layer in other.models[0].model.modules()}


def test_a_quantised_draft_model_is_trimmed() -> None:
    lm = CausalLM(model("int8"))
    expected = lm.append([1, 2, 3]).logits[:, [2, 5, 90]].clone()
    drafter = TrimmedDrafter(CausalLM(lm.model), torch.tensor([2, 5, 90]))
    assert torch.equal(drafter.lm.append([1, 2, 3]).logits, expected)


def test_a_weight_that_is_changed_is_noticed() -> None:
    lm = CausalLM(model("int8"))
    before = lm.append(prompt(5)).logits.clone()
    lm.reset()
    lm.model.model.layers[0].mlp.up_proj.packed[:, :, 5] += 3
    assert not lm.begin()
    assert not torch.equal(lm.append(prompt(5)).logits, before)


@pytest.mark.slow
def test_its_package_takes_the_weights_from_the_model(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there once; those of a model in which other layers are left are in its package."""
    given: list[dict[str, torch.Tensor]] = []
    good = aot._load
    monkeypatch.setattr(aot, "_load", lambda file, shared: given.append(shared) or good(file, shared))
    lm = CausalLM(model("int8", num_hidden_layers=1))
    make_canonical(lm)
    text = Decoder(lm, CausalLMDrafter(CausalLM(lm.model)), OptTree(nodes=6)).generate(prompt(9), NEW).tokens
    assert compile_forwards(lm) and len(fake) == 1
    shared = given[-1]["model.model.layers.0.mlp.up_proj.packed"]
    assert shared.data_ptr() == lm.model.model.layers[0].mlp.up_proj.packed.data_ptr()
    assert Decoder(lm, CausalLMDrafter(CausalLM(lm.model)), OptTree(nodes=6)).generate(prompt(9), NEW).tokens == text
    mixed = model("int8", num_hidden_layers=1)
    mixed.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False).bfloat16().requires_grad_(False)
    assert compile_forwards(CausalLM(mixed)) and not given[-1]


def test_what_cannot_be_quantised_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="weights are quantised to int8 or int4, got 'int3'"):
        load_pair("demo", weights="int3")
    with pytest.raises(CheckpointError, match=r"cannot quantise .*: .* these are float16"):
        load_pair("demo", "ngram", weights="int8", dtype="float16")


@pytest.mark.slow
def test_commands_quantise_a_target_that_was_inflated_first() -> None:
    for more in ({}, {"through": f"{INFLATE}:inflate_pair:384x14"}):
        pair = load(Models(drafter="ngram", weights="int8", dtype="bfloat16", **more), "cpu")
        assert pair.target.size.endswith("bfloat16, int8") and pair.target.canonical
