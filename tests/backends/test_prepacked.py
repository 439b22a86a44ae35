"""Packed weights: what the layers compute, in their place inside a forward only, and never those of yesterday."""

import copy
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from asking import begin, root_of
from tiny_models import build, prompt, tiny
from torch import nn

from evaluation.run.models import load
from evaluation.run.options import Models
from opt_tree import load_pair
from opt_tree.backends import prepacked as packed
from opt_tree.backends.prepacked import PackedWeights
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.step_costs import _engine

needs_packing = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN"
)
pytestmark = needs_packing
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if packed._works(dtype)]
"""What this CPU multiplies packed: bfloat16 needs AVX-512 or avx_ne_convert."""

PROBED_EVERY_TIME = True  # a first forward packs


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed, "_LEAST", dict.fromkeys(packed._LEAST, 1))


@pytest.fixture
def lm() -> CausalLM:
    """One that no other test shares."""
    return CausalLM(build(tiny("llama").config, dtype=torch.float32))


def logits(lm: CausalLM) -> torch.Tensor:
    """Of a prompt, and of rows behind it."""
    lm.reset()
    whole = lm.append(prompt(9), all_logits=True).logits.clone()
    return torch.cat([whole, lm.extend(np.arange(5), np.full(5, 9), np.eye(5, dtype=bool)).logits.clone()])


def own(lm: CausalLM) -> torch.Tensor:
    """The same by a model that has the weights of now and packs nothing."""
    other = CausalLM(copy.deepcopy(lm.model))
    other.pack(False)
    assert not other.eager.packed
    return logits(other)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "opt"])  # the last two have biases
def test_packed_weights_give_the_same_logits(architecture, dtype):
    lm = CausalLM(copy.deepcopy(tiny(architecture)).to(dtype))
    assert lm.eager.packed and _engine(lm) == "packed"
    linears = sum(type(module) is nn.Linear for module in lm.model.modules())
    assert len(lm.eager.packed._linears) == linears > 4
    expected = own(lm)
    assert (logits(lm) - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.abs().max()


@pytest.mark.parametrize("dtype", PACKED)
def test_one_row_of_float32_takes_the_weights_as_they_are(dtype, monkeypatch):
    """Plain decoding is then as fast as without packing."""
    lm = CausalLM(copy.deepcopy(tiny("llama")).to(dtype))
    calls: list[int] = []
    linear = nn.functional.linear

    def counted(rows: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        calls.append(rows.shape[-2])
        return linear(rows, *more)

    monkeypatch.setattr(nn.functional, "linear", counted)
    lm.append(prompt(3), all_logits=True)
    assert not calls
    lm.append(prompt(1))
    assert calls == ([1] * len(lm.eager.packed._linears) if dtype == torch.float32 else [])


def test_layers_are_their_own_again_after_a_forward(lm, monkeypatch):
    """After one that failed, too; inside, they are not."""
    called = []

    def names() -> set[bool]:
        return {"forward" in module.__dict__ for module in lm.model.modules() if type(module) is nn.Linear}

    def seen(*args: object) -> None:
        called.append(names())
        if len(called) == 2:
            raise KeyError("a layer's")

    lm.model.model.norm.register_forward_hook(seen)
    lm.append(prompt(4))
    with pytest.raises(KeyError):
        lm.append(prompt(4))
    assert called == [{True}, {True}] and names() == {False}


def test_a_weight_that_changes_within_a_text_is_packed_at_once(lm):
    lm.append(prompt(9))
    rows = np.arange(5), np.full(5, 9), np.eye(5, dtype=bool)
    before = lm.extend(*rows).logits.clone()
    with torch.no_grad():
        lm.model.lm_head.weight.mul_(2)
    lm.cache.truncate(lm.length)
    assert torch.allclose(lm.extend(*rows).logits, 2 * before, atol=1e-5) and before.abs().max() > 0.01


def test_what_others_put_in_a_layers_place_stays(lm):
    """As accelerate's hooks and adapters do it, before and after the model is wrapped."""
    calls = []

    def users(self: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return nn.Linear.forward(self, rows)

    layer = lm.model.lm_head
    logits(lm)
    layer.forward = types.MethodType(users, layer)
    assert (logits(lm) - own(lm)).abs().max() < 1e-5
    assert calls and "forward" in layer.__dict__
    wrapped = CausalLM(lm.model)
    assert layer.__dict__ not in [linear.names for linear in wrapped.eager.packed._layers()]


def test_copies_are_shared_and_given_back(lm):
    """A head borrows the target's output layer, and another decoder may wrap the same model."""
    lm.pack(False)
    gc.collect()
    before = len(packed._copies)
    lm.pack()
    logits(lm)
    copies = len(packed._copies) - before
    assert copies == len(lm.eager.packed._linears)
    second = CausalLM(lm.model)
    logits(second)
    assert len(packed._copies) - before == copies
    second.pack(False)
    lm.pack(False)
    gc.collect()
    assert len(packed._copies) == before
    lm.pack()
    assert lm.eager.packed


def test_copies_of_a_model_pack_their_own_weights(lm):
    expected = logits(lm)
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert torch.equal(logits(twin), expected)
        with torch.no_grad():
            twin.model.lm_head.weight.mul_(2)
        assert torch.allclose(logits(twin), 2 * expected, atol=1e-5) and torch.equal(logits(lm), expected)
    lm.pack(False)
    assert not copy.deepcopy(lm).eager.packed


def test_what_cannot_be_packed_is_left(monkeypatch):
    """Wider weights, moved ones, those for which there is no room, and a CPU that does not know how."""
    assert not CausalLM(tiny("llama")).eager.packed  # float64
    assert not CausalLM(copy.deepcopy(tiny("gpt2")).float()).eager.packed._layers()[1:]  # the output layer alone is one
    model = copy.deepcopy(tiny("llama")).float()
    model.lm_head._hf_hook = object()
    assert not PackedWeights(model)
    del model.lm_head._hf_hook
    lm = CausalLM(model)
    with monkeypatch.context() as little:
        little.setattr(packed.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
        with pytest.warns(UserWarning, match=r"LlamaForCausalLM: its weights are not packed .* 0.0 GB are free"):
            assert not PackedWeights(copy.deepcopy(model))

    def unknown(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", unknown)
    assert not PackedWeights(copy.deepcopy(model))
    assert lm.eager.packed  # was found before


def test_a_model_is_packed_while_another_thread_is_in_a_forward(lm):
    logits(lm)
    with lm.eager.packed:
        second = PackedWeights(lm.model)
        assert len(second._layers()) == len(lm.eager.packed._linears) > 4


def during(lm: CausalLM, what: Callable[[], None]) -> None:
    """Do something in another thread while this one is in the middle of a forward."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    def start(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    handle = lm.model.model.layers[0].register_forward_hook(start)
    lm.append(prompt(9), all_logits=True)
    assert not errors, errors


def patched(lm: CausalLM) -> int:
    return sum("forward" in module.__dict__ for module in lm.model.modules())


def test_another_thread_trains_the_model_meanwhile(lm):
    """Its forwards and gradients are the layers' own."""
    ids = torch.tensor([prompt(12)])
    weights = list(lm.model.parameters())

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(lm.model(ids, labels=ids).loss, weights)

    expected, found = gradients(), []
    logits(lm)
    during(lm, lambda: found.extend(gradients()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and len(found) == len(weights)
    assert not patched(lm)


@pytest.mark.parametrize("wanted", [True, False])
def test_another_thread_packs_meanwhile(lm, wanted):
    """The forward under way goes on with what it began with, and gives that back."""
    expected = logits(lm)
    lm.reset()
    during(lm, lambda: lm.pack(wanted))
    assert not patched(lm)
    assert torch.equal(logits(lm), expected if wanted else own(lm)) and not patched(lm)


def test_another_thread_decodes_with_the_same_model_meanwhile(lm):
    """Both take packed weights, though one gives them back first: the bits are those of one thread alone."""
    second, expected, found = CausalLM(lm.model), logits(lm), []
    lm.reset()
    during(lm, lambda: found.append(logits(second)))
    assert torch.equal(found[0], expected) and torch.equal(logits(lm), expected) and not patched(lm)


def test_autocast_multiplies_in_its_own_dtype(lm):
    """As transformers' forward does under it; packed weights are of another dtype."""
    expected, ids = logits(lm)[:9], torch.tensor([prompt(9)])
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = logits(lm)[:9], lm.model(ids).logits[0]
        with pytest.raises(RuntimeError, match="is canonical, which autocast undoes"):
            lm.eager.packed.canonical = True
            logits(lm)
    lm.eager.packed.canonical = False
    assert (found - theirs).abs().max() < 0.02 * theirs.abs().max() and not torch.equal(found, expected)
    assert torch.equal(logits(lm)[:9], expected)


def test_weights_made_in_inference_mode_are_packed_as_well(lm):
    """Nobody counts what changes in them; the samples do."""
    with torch.inference_mode():
        model = copy.deepcopy(lm.model)
    made = CausalLM(model)
    assert torch.equal(logits(made), logits(lm))
    with torch.inference_mode():
        model.lm_head.weight.mul_(2)
    assert torch.allclose(logits(made), 2 * logits(lm), atol=1e-5)


def test_a_trimmed_output_layer_is_packed_in_the_place_of_the_whole_one(lm):
    lm.reset()
    logits(lm)
    whole = weakref.ref(lm.model.lm_head.weight)
    drafter = TrimmedDrafter(lm, torch.arange(8))
    begin(drafter, prompt(5), None)
    root_of(drafter, prompt(5))
    gc.collect()
    assert whole() is None
    assert lm.model.lm_head.__dict__ in [linear.names for linear in lm.eager.packed._linears]


@pytest.mark.slow
def test_unpacked_is_refused_beside_compile():
    """Compiled forwards have packed weights of their own."""
    with pytest.raises(ValueError, match="--unpacked is for eager forwards"):
        Models(unpacked=True, compile=True)
    pair = load(Models(unpacked=True, dtype="float32"), "cpu")
    assert not pair.target.eager.packed


@pytest.mark.slow
def test_a_pair_is_packed_as_a_whole():
    """The target, a draft model or a head with the target's output layer, and the halves of an early exit."""
    pair = load_pair("demo", eagle="demo", dtype="float32")
    models = [pair.target, *pair.drafter.models]
    assert all(lm.eager.packed for lm in models) and len(models) == 2
    pair.pack(False)
    assert not any(lm.eager.packed for lm in models)
    split = load_pair("demo", "exit:demo", dtype="float32")
    assert split.target.eager.packed
