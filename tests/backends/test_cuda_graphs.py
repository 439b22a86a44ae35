"""The captured backend on a CPU: the same buffers and shapes, called instead of replayed.

What a CPU cannot show is the capture itself; tests/pretend and, on a GPU, `pytest -m gpu` do.
"""

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, TOLERANCE, build, prompt, random_tree, tiny, tiny_drafter, tiny_head
from torch import Tensor

from opt_tree.backends.body import Body
from opt_tree.backends.compiled import CompileError
from opt_tree.backends.cuda_graphs import Captured, _Buffers, warm_up
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter, OfModel
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.policy import OptTree

BUCKETS = Buckets(rows=(1, 4, 16), keys=(32, 64))


def captured(model: torch.nn.Module, probe: bool = True) -> CausalLM:
    return by_graphs(CausalLM(model, probe=probe))


def by_graphs(lm: CausalLM) -> CausalLM:
    lm.buckets = BUCKETS
    lm.backend = Captured(lm.eager, BUCKETS.rows)
    return lm


def scored(lm: CausalLM, context: list[int], rows: int) -> Tensor:
    lm.reset()
    lm.append(context)
    return lm.score(random_tree(rows, seed=rows, root=1)).logits.clone()


@pytest.mark.quick("llama")
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt"])
def test_every_shape_computes_what_eager_forwards_do(architecture):
    """Buckets that are one short, full and one over; then all again, over buffers full of an earlier forward."""
    exact, lm = CausalLM(tiny(architecture)), captured(tiny(architecture))
    for _ in range(2):
        for length, rows in [(1, 1), (15, 1), (16, 16), (17, 16), (31, 2), (60, 4), (60, 5), (9, 3), (90, 15)]:
            difference = scored(lm, prompt(length), rows) - scored(exact, prompt(length), rows)
            assert difference.abs().max() <= TOLERANCE[architecture], (length, rows)
    assert len(lm.backend._calls) >= 5


def test_growth_drops_what_holds_addresses():
    config = ARCHITECTURES["llama"]()
    config.max_position_embeddings = 900
    exact, lm = CausalLM(build(config)), captured(build(config))
    scored(lm, prompt(20), 4)
    before, calls = lm.cache.storage_version, dict(lm.backend._calls)
    assert (scored(lm, prompt(600), 4) - scored(exact, prompt(600), 4)).abs().max() < 1e-9
    assert lm.cache.storage_version > before
    assert (scored(lm, prompt(20), 4) - scored(exact, prompt(20), 4)).abs().max() < 1e-9
    assert not {id(call) for call in calls.values()} & {id(call) for call in lm.backend._calls.values()}


@pytest.mark.quick("draft-OptTree(nodes=9, threshold=0.0, max_depth=4)")
@pytest.mark.parametrize("policy", [OptTree(9, 0.0, 4), Eagle2(3, 3, 9), OptTree(20, 0.0, 4)], ids=str)
@pytest.mark.parametrize("kind", ["draft", "head", "trimmed head", "copying"])
def test_the_best_tokens_are_picked_in_the_forward(kind, policy, monkeypatch):
    """Whoever wants no more of them reads no whole rows, and has the tree and the values that whole rows give."""
    monkeypatch.setattr("opt_tree.backends.body.BEST", 16)  # of the tiny model's 61 tokens
    model, found, wide = build(ARCHITECTURES["llama"]()), [], []
    whole = OfModel._whole_of
    for graphs in (False, True):
        target = CausalLM(model)
        if kind in ("draft", "copying"):
            drafter: CausalLMDrafter | EagleDrafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), target.vocab)
        else:
            known = None if kind == "head" else torch.arange(1, target.vocab, 2)
            drafter = EagleDrafter(tiny_head(model), target, tokens=known)
        drafter.calibrated(0.7)
        if graphs:
            by_graphs(drafter.lm)
            monkeypatch.setattr(OfModel, "_whole_of", lambda self, logits: wide.append(1) or whole(self, logits))
        asked = Copying(drafter) if kind == "copying" else drafter
        found.append(Decoder(target, asked, policy).generate(prompt(9), 16))
    for one, other in zip(found[0].steps, found[1].steps, strict=True):
        assert one.tree.tokens.tolist() == other.tree.tokens.tolist()
        assert one.tree.path_log_probs == pytest.approx(other.tree.path_log_probs, abs=1e-12)
    wanted = policy.children.total or policy.children.per_node
    assert bool(wide) == (wanted > 16 or kind == "copying")


@pytest.mark.slow
def test_children_are_drawn_from_whole_distributions():
    """Also where a calibration sharpens greedy texts: the scale is the text's."""
    target, texts = CausalLM(tiny("llama")), []
    for graphs in (False, True):
        drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), target.vocab).calibrated(0.7)
        if graphs:
            by_graphs(drafter.lm)
        decoder = Decoder(target, drafter, OptTree(9, 0.0, 4))
        drawn = Decoder(target, drafter, Sampled.chains(2, 3))
        both = (0, decoder), (1, drawn), (1, decoder)
        texts.append([each.generate(prompt(9), 20, Sampling(t), seed=1) for t, each in both])
    for one, other in zip(*texts, strict=True):
        assert one.tokens == other.tokens and one.accept_lengths == other.accept_lengths
        for mine, theirs in zip(one.steps, other.steps, strict=True):
            assert mine.tree.path_log_probs == pytest.approx(theirs.tree.path_log_probs, abs=1e-12)


@pytest.mark.slow
def test_a_model_that_another_drafter_took_says_what_that_one_drafts():
    """And the first one goes on from whole rows."""
    target, drawn = CausalLM(tiny("llama")), []
    for graphs in (False, True):
        lm = CausalLM(tiny_drafter("llama"))
        if graphs:
            by_graphs(lm)
        first = CausalLMDrafter(lm, target.vocab)
        texts = [Decoder(target, first, OptTree(9, 0.0, 4)).generate(prompt(9), 20)]
        second = CausalLMDrafter(lm, target.vocab - 40)
        texts += [Decoder(target, each, OptTree(9, 0.0, 4)).generate(prompt(9), 20) for each in (second, first)]
        drawn.append([step.tree.tokens.tolist() for text in texts for step in text.steps])
    assert drawn[0] == drawn[1]


def test_a_warm_up_outside_inference_mode_leaves_the_cache_alone():
    lm, taken = captured(tiny("llama")), []
    run = lm.backend.forward
    lm.backend.forward = lambda inputs, cache: taken.append(inputs) or run(inputs, cache)  # type: ignore[method-assign]
    scored(lm, prompt(20), 4)
    before = [view.clone() for view in lm.cache.views]
    with torch.no_grad():
        warm_up(Body(lm.model, ()), _Buffers(taken[-1]).inputs(lm.cache.views))
    assert all(torch.equal(one, other) for one, other in zip(before, lm.cache.views, strict=True))


def test_a_copy_makes_its_own_and_a_watched_layer_begins_anew():
    lm = captured(tiny("llama"))
    expected = scored(lm, prompt(20), 4)
    again = copy.deepcopy(lm)
    assert not again.backend._calls and torch.equal(scored(again, prompt(20), 4), expected)
    lm.watch((0,))
    lm.cache.reserve(40)
    assert lm.append([1]).features.keys() == {0} and lm.backend.layers == (0,)
    assert len(lm.backend._calls) == 1, "what was captured before lacks the layer"


def test_a_model_that_is_moved_by_hooks_is_refused():
    model = build(ARCHITECTURES["llama"]())
    model.model.layers[0]._hf_hook = object()
    with pytest.raises(CompileError, match="moved by hooks"):
        Captured(CausalLM(model).eager, (1,))
