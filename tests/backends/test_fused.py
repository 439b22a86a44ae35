"""Compiled decoder layers: as the layers themselves, for the thread that asks, however many there are.

By torch.compile without its code generator, which is for a GPU: `pytest -m gpu` tries that in captured graphs.
"""

import threading
from collections.abc import Sequence

import pytest
import torch
from tiny_models import ARCHITECTURES, build, padded_to, prompt, random_tree
from torch._dynamo.utils import counters

from opt_tree.backends.cuda_graphs import Captured
from opt_tree.backends.fused import FusedLayers, can_fuse
from opt_tree.backends.snapshot import Snapshot
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.compiling import compile_forwards

SEVERAL = (20, 4), (30, 9)
PIECES = 5
"""Of a Llama layer: before the cache, before attention and behind it, each as often as Dynamo looks at it."""


def rows_of(lm: CausalLM, sizes: Sequence[tuple[int, int]] = ((9, 1), (20, 4), (30, 9))) -> list[torch.Tensor]:
    found = []
    for length, rows in sizes:
        lm.reset()
        lm.append(prompt(length))
        found.append(lm.score(random_tree(rows, seed=rows, root=1)).logits.clone())
    return found


@pytest.mark.slow
def test_layers_of_any_number_are_compiled_as_one_and_compute_the_same() -> None:
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 6
    lm = padded_to(Buckets((1, 4, 16), (64,)), CausalLM(build(config)))
    expected = rows_of(lm, SEVERAL)
    engine = lm.backend = Captured(lm.eager, (1, 4, 16))
    engine.fuses, engine._fused = True, FusedLayers(lm.model, backend="eager")
    counters.clear()
    torch._dynamo.reset()
    for found, one in zip(rows_of(lm, SEVERAL), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-5, rtol=1e-5)
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= PIECES + 1, "for any number of rows but one"
    rows_of(lm, SEVERAL)
    assert counters["stats"]["unique_graphs"] == made
    assert not any("forward" in layer.__dict__ for layer in lm.model.model.layers)


def test_other_threads_run_the_layers_themselves() -> None:
    model, calls = build(ARCHITECTURES["llama"]()), list[int]()
    fused = FusedLayers(model, backend="eager")
    fused._compiled = {own: _counting(own, calls) for own in fused._compiled}
    inputs = torch.tensor([prompt(5)])

    def run() -> None:
        with torch.no_grad():
            model(inputs)

    before = Snapshot(model)
    with fused.standing_in():
        other = threading.Thread(target=run)
        other.start()
        other.join()
        assert not calls and before.change() is None, "to whoever looks meanwhile the model is what it was"
        run()
    assert len(calls) == len(model.model.layers)
    run()
    assert len(calls) == len(model.model.layers)


def _counting(own, calls):
    def call(layer, *args, **more):
        calls.append(1)
        return own(layer, *args, **more)

    return call


def test_a_layer_that_somebody_replaced_is_called_as_it_is() -> None:
    model, calls = build(ARCHITECTURES["llama"]()), list[int]()
    layer = model.model.layers[0]
    layer.forward = _counting(layer.forward, calls)
    with FusedLayers(model, backend="eager").standing_in(), torch.no_grad():
        model(torch.tensor([prompt(5)]))
    assert calls and "forward" in layer.__dict__


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_on_a_gpu_captured_forwards_have_them(architecture: str) -> None:
    assert can_fuse()
    lm = CausalLM(build(ARCHITECTURES[architecture](), dtype=torch.float32).cuda())
    expected = rows_of(lm)
    assert compile_forwards(lm, buckets=Buckets((1, 4, 16), (64,))) and lm.backend.fuses
    for found, one in zip(rows_of(lm), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-4, rtol=1e-4)
    made = counters["stats"]["unique_graphs"]
    rows_of(lm)
    assert counters["stats"]["unique_graphs"] == made, "nothing is compiled twice"


@pytest.mark.gpu
def test_on_a_gpu_what_does_not_compile_is_captured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(build(ARCHITECTURES["llama"](), dtype=torch.float32).cuda())
    expected = rows_of(lm)[0]

    def broken(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("opt_tree.backends.cuda_graphs.FusedLayers", broken)
    with pytest.warns(UserWarning, match="its layers are not compiled: .*no compiler"):
        assert compile_forwards(lm, buckets=Buckets((1, 4), (64,)))
    assert not lm.backend.fuses
    torch.testing.assert_close(rows_of(lm)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_canonical_target_has_them() -> None:
    lm = CausalLM(build(ARCHITECTURES["llama"](), dtype=torch.bfloat16).cuda())
    make_canonical(lm)
    assert compile_forwards(lm) and lm.canonical and lm.backend.fuses
