"""The captured engine on a CPU: the same buffers and shapes, called instead of replayed.

What a CPU cannot show is the capture itself; tests/pretend and, on a GPU, `pytest -m gpu` do.
"""

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, TOLERANCE, build, prompt, random_tree, tiny, tiny_drafter, tiny_head
from torch import Tensor

from opt_tree.decoding.decoder import Decoder
from opt_tree.drafters import CausalLMDrafter, EagleDrafter
from opt_tree.engines import Captured, CompileError
from opt_tree.engines.body import Body
from opt_tree.engines.cuda_graphs import _Buffers, warm_up
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.policies import Eagle2, OptTree

BUCKETS = Buckets(rows=(1, 4, 16), keys=(32, 64))


def captured(model: torch.nn.Module, probe: bool = True) -> CausalLM:
    lm = CausalLM(model, BUCKETS, probe=probe)
    return by_graphs(lm)


def by_graphs(lm: CausalLM) -> CausalLM:
    lm.buckets = BUCKETS
    lm.engine = Captured(lm.eager, BUCKETS.rows)
    return lm


def scored(lm: CausalLM, context: list[int], rows: int) -> Tensor:
    lm.reset()
    lm.append(context)
    return lm.score(random_tree(rows, seed=rows, root=1)).logits.clone()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt"])
def test_every_shape_computes_what_eager_forwards_do(architecture):
    """Buckets that are one short, full and one over; then all again, over buffers full of an earlier forward."""
    exact, lm = CausalLM(tiny(architecture)), captured(tiny(architecture))
    for _ in range(2):
        for length, rows in [(1, 1), (15, 1), (16, 16), (17, 16), (31, 2), (60, 4), (60, 5), (9, 3), (90, 15)]:
            difference = scored(lm, prompt(length), rows) - scored(exact, prompt(length), rows)
            assert difference.abs().max() <= TOLERANCE[architecture], (length, rows)
    assert len(lm.engine._calls) >= 5


def test_growth_drops_what_holds_addresses():
    config = ARCHITECTURES["llama"]()
    config.max_position_embeddings = 900
    exact, lm = CausalLM(build(config)), captured(build(config))
    scored(lm, prompt(20), 4)
    before, calls = lm.cache.storage_version, dict(lm.engine._calls)
    assert (scored(lm, prompt(600), 4) - scored(exact, prompt(600), 4)).abs().max() < 1e-9
    assert lm.cache.storage_version > before
    assert (scored(lm, prompt(20), 4) - scored(exact, prompt(20), 4)).abs().max() < 1e-9
    assert not {id(call) for call in calls.values()} & {id(call) for call in lm.engine._calls.values()}


@pytest.mark.parametrize("policy", [OptTree(9, 0.0, 4), Eagle2(3, 3, 9)], ids=["of a layer", "of a node"])
@pytest.mark.parametrize("kind", ["draft", "head", "trimmed head"])
def test_children_are_picked_in_the_forward(kind, policy, monkeypatch):
    """All of them, with the values that the host finds; one graph for many budgets."""
    model, found = build(ARCHITECTURES["llama"]()), []
    for graphs in (False, True):
        target = CausalLM(model)
        if kind == "draft":
            drafter: CausalLMDrafter | EagleDrafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), target.vocab)
        else:
            known = None if kind == "head" else torch.arange(1, target.vocab, 2)
            drafter = EagleDrafter(tiny_head(model), target, tokens=known)
        if graphs:
            by_graphs(drafter.lm)
            for name in ("_survivors", "send"):  # what whoever picks elsewhere needs
                monkeypatch.setattr(f"opt_tree.core.children.top_k.{name}", None)
        found.append(Decoder(target, drafter, policy).generate(prompt(9), 30))
    for one, other in zip(found[0].steps, found[1].steps, strict=True):
        assert one.tree.tokens.tolist() == other.tree.tokens.tolist()
        assert one.tree.path_log_probs == pytest.approx(other.tree.path_log_probs, abs=1e-12)
    assert {children for *_, children in drafter.lm.engine._calls} == {policy.children.rounded}


def test_a_warm_up_outside_inference_mode_leaves_the_cache_alone():
    lm, taken = captured(tiny("llama")), []
    run = lm.engine.forward
    lm.engine.forward = lambda inputs, cache: taken.append(inputs) or run(inputs, cache)  # type: ignore[method-assign]
    scored(lm, prompt(20), 4)
    before = [view.clone() for view in lm.cache.views]
    with torch.no_grad():
        warm_up(Body(lm.model, ()), _Buffers(taken[-1]).inputs(lm.cache.views))
    assert all(torch.equal(one, other) for one, other in zip(before, lm.cache.views, strict=True))


def test_a_copy_makes_its_own_and_a_watched_layer_begins_anew():
    lm = captured(tiny("llama"))
    expected = scored(lm, prompt(20), 4)
    again = copy.deepcopy(lm)
    assert not again.engine._calls and torch.equal(scored(again, prompt(20), 4), expected)
    lm.watch((0,))
    lm.cache.reserve(40)
    assert lm.append([1]).features.keys() == {0} and lm.engine.layers == (0,)
    assert len(lm.engine._calls) == 1, "what was captured before lacks the layer"


def test_a_model_that_is_moved_by_hooks_is_refused():
    model = build(ARCHITECTURES["llama"]())
    model.model.layers[0]._hf_hook = object()
    with pytest.raises(CompileError, match="moved by hooks"):
        Captured(CausalLM(model).eager, (1,))
