"""A step that stays on the device is the host's: texts, trees and acceptance lengths, node by node."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from methods.drafters.test_blocks import block_of, dspark_of
from methods.drafters.test_eagle3 import KNOWN, tiny_head3
from methods.drafters.test_parallel_spec import SOME, head_of
from tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    VOCAB,
    build,
    drawn,
    padded_to,
    perturbed,
    prompt,
    random_tree,
    tiny,
    tiny_drafter,
    tiny_head,
)

from opt_tree import Buckets, Recorder, Sampling, Stop, generate_batch
from opt_tree.backends.device_decoder import DEVICE, DeviceDecoder
from opt_tree.backends.device_step import DeviceStep, StepStart
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.generation import Generation
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.recent import Recent
from opt_tree.methods.drafters.heads.blocks import BlockDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.drafters.heads.one_pass import MedusaDrafter, MedusaHeads
from opt_tree.methods.drafters.heads.parallel_spec import ParallelSpecDrafter
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.static import Static
from opt_tree.methods.policies.talon import Talon
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.policy import OptTree
from opt_tree.tools.on_device import on_device

OPT = OptTree(12, 0.1, 5)
POLICIES = {
    "opt": OPT,
    "opt to the end": OptTree(20, 0.0, 4),
    "eagle2": Eagle2(3, 3, 9),
    "ddd": DynamicDepth(3, 4, 9, math.log(0.2), (1, 2, 3)),
    "list": Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
}
DRAWN = Sampling(0.8, top_p=0.9)
TEXT = prompt(9, seed=4) * 3
NEW = 20


def _trimmed(lm: CausalLM, target: CausalLM) -> TrimmedDrafter:
    return TrimmedDrafter(CausalLM(copy.deepcopy(lm.model)), torch.arange(1, VOCAB, 2), target.vocab)


DRAFTERS: dict[str, Callable[..., Any]] = {
    "lm": lambda lm, target: CausalLMDrafter(lm, target.vocab),
    "recent": lambda lm, target: Recent(CausalLMDrafter(lm, target.vocab).calibrated(0.8), 6),
    "lm, sharpened": lambda lm, target: CausalLMDrafter(lm, target.vocab).calibrated(0.7),
    "lm, trimmed": _trimmed,
    "eagle": lambda lm, target: EagleDrafter(tiny_head(target.model), target),
    "eagle, fewer tokens": lambda lm, target: EagleDrafter(tiny_head(target.model), target, tokens=KNOWN),
    "eagle3": lambda lm, target: Eagle3Drafter(tiny_head3(target), target, tokens=KNOWN, layers=(0, 1, 1)),
}


def _parallel(tokens: Any = None) -> Callable[..., Any]:
    return lambda lm, target: ParallelSpecDrafter(head_of(target).to(target.dtype), target, tokens)


def _block(make: Callable[..., BlockDrafter], **how: Any) -> Callable[..., Any]:
    def made(lm: CausalLM, target: CausalLM) -> BlockDrafter:
        block = make(target, **how).block
        block.model.to(target.dtype)
        if block.law is not None:
            block.law.to(target.dtype)
        return BlockDrafter(block, target)

    return made


def _medusa(lm: CausalLM, target: CausalLM) -> MedusaDrafter:
    return MedusaDrafter(drawn(MedusaHeads(target.hidden, target.vocab, 4)).to(target.dtype), target)


ONE_PASS: dict[str, Callable[..., Any]] = {
    "medusa": _medusa,
    "parallelspec": _parallel(),
    "parallelspec, fewer tokens": _parallel(SOME),
    "dflash": _block(block_of),
    "dspark": _block(dspark_of),
    "dspark, rnn": _block(dspark_of, markov_head_type="rnn", tokens=KNOWN),
    "dspark, unsure": _block(dspark_of, least=0.5),
}
"""By what their laws know: the depth, the parent, the path; and a head that refuses parents."""


@functools.cache
def network(architecture: str, dtype: torch.dtype, drafts: bool = False) -> Any:
    return copy.deepcopy(tiny_drafter(architecture) if drafts else tiny(architecture)).to(dtype)


def _find_room(step: DeviceStep, shape: Any) -> bool:
    return all(keys <= lm.cache.capacity for lm, keys in zip(step.models, shape.keys, strict=False))


@pytest.fixture(autouse=True)
def steps_are_launched_ahead(monkeypatch):
    """Wherever they can be, as captured ones are: the first of a text and the last ones never."""
    monkeypatch.setattr(DeviceStep, "pays", _find_room)


def decoder_of(
    drafter: str = "lm",
    policy: Any = OPT,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
) -> Decoder:
    target, lm = CausalLM(network(architecture, dtype)), CausalLM(network(architecture, dtype, True))
    return Decoder(target, (DRAFTERS | ONE_PASS)[drafter](lm, target), policy)


def same(found: Generation, host: Generation, close: float = 1e-9) -> None:
    """Raise AssertionError where a text, a tree or a verdict is another one."""
    assert (found.tokens, found.finish_reason) == (host.tokens, host.finish_reason)
    assert found.accept_lengths == host.accept_lengths and found.reused == host.reused
    for mine, theirs in zip(found.steps, host.steps, strict=True):
        for part in ("tokens", "parents", "draft_rows"):
            assert getattr(mine.tree, part).tolist() == getattr(theirs.tree, part).tolist(), part
        assert mine.tree.path_log_probs == pytest.approx(theirs.tree.path_log_probs, abs=close)
        assert (mine.path, mine.tokens, mine.policy) == (theirs.path, theirs.tokens, theirs.policy)


def compare(decoder: Decoder, text: list[int] = TEXT, new: int = NEW, **how: Any) -> tuple[Generation, DeviceDecoder]:
    """The answer of both kinds of steps, which are to be the same; most are to be taken on the device, and launched
    ahead where the end is far.
    """
    device = on_device(decoder)
    found = device.generate(text, new, **how)
    close = 1e-3 if decoder.target.dtype == torch.float32 else 1e-9
    same(found, decoder.generate(text, new, **how), close)
    assert device.taken[DEVICE] >= len(found.steps) - 1 > 0 and device.taken.total() == len(found.steps)
    ends = new - 2 * min(5, decoder.policy.max_depth) - 2  # behind so many tokens layers may be fewer
    known = list(itertools.accumulate(found.accept_lengths[:-1], initial=0))
    assert device.ahead >= sum(length < ends for length in known) // 2
    return found, device


@pytest.mark.quick("opt to the end-lm, sharpened", "eagle2-lm", "ddd-eagle, fewer tokens")
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_texts_and_trees_are_those_of_the_host(drafter, policy):
    """Every two of drafter, policy, dtype and sampling meet."""
    place = sorted(DRAFTERS).index(drafter) + sorted(POLICIES).index(policy)
    dtype, drawn = (torch.float64, torch.float32)[place % 2], place // 2 % 2
    decoder = decoder_of(drafter, POLICIES[policy], dtype=dtype)
    found, _ = compare(decoder, sampling=DRAWN if drawn else Sampling(), seed=3)
    assert drafter != "lm" or max(found.accept_lengths) > 2, "a path of several nodes"


@pytest.mark.quick("medusa", "dspark, rnn")
@pytest.mark.parametrize("drafter", sorted(ONE_PASS))
def test_heads_of_one_pass(drafter):
    """Trees deeper than the head drafts, too: behind its last depth nothing is known."""
    for place, policy in enumerate((OptTree(20, 0.0, 7), POLICIES["list"], POLICIES["eagle2"])):
        dtype, how = (torch.float64, torch.float32)[place % 2], DRAWN if place else Sampling()
        found, _ = compare(decoder_of(drafter, policy, dtype=dtype), new=12, sampling=how, seed=3)
        assert place or {len(step.tree) for step in found.steps} != {1}


@pytest.mark.quick("0.3-lm", "0.9-eagle")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "eagle3"])
@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.9])
def test_a_stop_saves_forwards(drafter, threshold, monkeypatch):
    """A step drafts one layer more than the host's, and no more than there may be; so whether launched ahead or not."""
    policy, new = OptTree(12, threshold, 6), 36
    for sampling, ahead in ((Sampling(), True), (DRAWN, False)):
        monkeypatch.setattr(DeviceStep, "pays", _find_room if ahead else lambda step, shape: False)
        decoder = decoder_of(drafter, policy)
        device = on_device(decoder)
        work = device.drafter.work.forwards
        found = device.generate(TEXT, new, sampling, seed=3)
        work = device.drafter.work.forwards - work
        host = decoder.generate(TEXT, new, sampling, seed=3)
        same(found, host)
        layers = [step.draft_forwards for step in found.steps]
        assert work == sum(layers) and bool(device.ahead) == ahead
        layers[0] -= 1  # the prompt's
        ends = itertools.accumulate(found.accept_lengths, initial=2 * policy.max_depth)
        far = sum(1 for end in ends if end < new)
        known = [min(step.draft_forwards + 1, policy.max_depth) for step in host.steps]
        assert layers[:far] == known[:far] and len(layers) > far > 3
        assert threshold < 0.1 or min(known[:far]) < policy.max_depth


def test_where_no_stop_saves_a_forward_nothing_is_looked_at():
    """A policy that goes on to the end, layers that are no forwards, trees of two layers."""
    looks = {
        (drafter, name): on_device(decoder_of(drafter, policy))._tensor_step().looks(policy.max_depth)
        for drafter, name, policy in [
            *(("lm", name, policy) for name, policy in POLICIES.items()),
            ("eagle", "opt", OptTree(12, 0.1, 2)),
            ("medusa", "opt", OPT),
            ("dspark", "opt", OPT),
        ]
    }
    assert {key for key, value in looks.items() if value} == {("lm", "opt"), ("lm", "ddd")}


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_architectures(architecture):
    """Windows and chunks of 12 tokens, which the text outgrows; learned positions; experts."""
    decoder = decoder_of(architecture=architecture)
    found = on_device(decoder).generate(TEXT, NEW)
    same(found, decoder.generate(TEXT, NEW), 1e-4)


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("architecture", ["qwen3-window", "gpt2", "gemma3", "mistral"])
def test_heads_of_other_architectures(architecture):
    compare(decoder_of("eagle", architecture=architecture, dtype=torch.float64), sampling=DRAWN)


@pytest.mark.quick("lm-1")
@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("drafter", ["lm", "eagle"])
def test_prompts_of_any_length(drafter, length):
    compare(decoder_of(drafter), prompt(length, seed=length))


@pytest.mark.parametrize("drafter", ["lm", "eagle"])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_answers_of_any_length(drafter, new):
    """The last trees have fewer layers; a last token without room for one is the host's step."""
    decoder = decoder_of(drafter)
    device = on_device(decoder)
    same(device.generate(TEXT, new), decoder.generate(TEXT, new))
    assert device.taken.keys() <= {DEVICE, "no room to draft"}


@pytest.mark.quick("dspark-llama")
@pytest.mark.parametrize(
    "drafter, architecture",
    [*itertools.product(["lm", "eagle"], ["llama", "gpt2", "opt"]), ("parallelspec", "llama"), ("dspark", "llama")],
)
def test_the_end_of_the_context(drafter, architecture):
    """Where positions are learned, none behind the last one is asked for."""
    decoder = decoder_of(drafter, architecture=architecture)
    text = prompt(CONTEXT - 12, seed=1)
    found = on_device(decoder).generate(text, 100)
    assert found.finish_reason == "context"
    same(found, decoder.generate(text, 100))


@pytest.mark.quick("lm")
@pytest.mark.parametrize("drafter", ["lm", "eagle"])
def test_the_cache_grows_in_the_middle_of_a_text(drafter):
    """From 256 keys to 512: the storage moves."""
    config = ARCHITECTURES["llama"]()
    config.max_position_embeddings = 1024
    model = build(config)
    target, small = CausalLM(model), CausalLM(perturbed(model, 0.1))
    made = CausalLMDrafter(small, VOCAB) if drafter == "lm" else EagleDrafter(tiny_head(model), target)
    _, device = compare(Decoder(target, made, OPT), prompt(232), 20)
    assert device.target.cache.storage_version > 1


@pytest.mark.quick("greedy-lm")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "eagle3", "dspark"])
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_text_that_ends_at_a_token(drafter, sampling):
    """Also where the end is a node of the path, and where it is drafted and not reached."""
    decoder = decoder_of(drafter, OptTree(20, 0.0, 4))
    whole = decoder.generate(TEXT, NEW, sampling, seed=5)
    ends = {whole.tokens[12], *whole.steps[0].tree.tokens[1:4].tolist()} - {*whole.tokens[:6]}
    for stop in (Stop(frozenset(ends)), Stop(frozenset({whole.tokens[-1]})), Stop(())):
        device = on_device(decoder)
        same(device.generate(TEXT, NEW, sampling, stop, seed=5), decoder.generate(TEXT, NEW, sampling, stop, seed=5))


@pytest.mark.quick("lm")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "parallelspec", "medusa"])
def test_a_conversation_goes_on_from_its_cache(drafter):
    """Both ways take turns on the same models: each leaves them as the other would, a step on its way behind it."""
    text = {}
    for order in ("host", "device", "device, host", "host, device"):
        host = decoder_of(drafter)
        made = {"host": host, "device": on_device(host)}
        first, *_, second = [*order.split(", "), *order.split(", ")][:2]
        begun = made[first].generate(TEXT, 40, stop=lambda tokens: "enough" if len(tokens) == 10 else None)
        assert first == "host" or made["device"]._coming
        again = made[second].generate([*TEXT, *begun.tokens, *prompt(6, seed=8)], 10, reuse=True)
        assert again.reused > len(TEXT)
        text[order] = begun.tokens, again.tokens, again.reused, again.accept_lengths
    assert len({str(one) for one in text.values()}) == 1


@pytest.mark.quick("lm")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "eagle3", "parallelspec", "dflash"])
def test_steps_of_both_kinds_in_one_text(drafter):
    """A step of the host behind one of the device finds what it needs, and the other way round."""
    decoder = decoder_of(drafter)
    device, turns = on_device(decoder), itertools.count()
    known = device._reason
    device._reason = lambda run: known(run) or ("its turn" if next(turns) % 3 == 1 else None)  # type: ignore[method-assign]
    same(device.generate(TEXT, NEW), decoder.generate(TEXT, NEW))
    assert min(device.taken[DEVICE], device.taken["its turn"]) > 2


@pytest.mark.quick("lm")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "parallelspec"])
def test_forwards_that_are_padded(drafter):
    """Padding rows are written where nobody looks, and see nothing of the text."""
    for buckets in (Buckets((1, 8, 32), (64, 512)), Buckets((3, 5), (300,))):
        compare(padded_to(buckets, decoder_of(drafter)), new=12, sampling=DRAWN)


@pytest.mark.slow
def test_a_drafter_that_knows_fewer_tokens_than_the_target():
    """What only the target knows is read as token 0, and the root of the tree is the token itself."""
    config = ARCHITECTURES["llama"]()
    config.vocab_size = VOCAB - 20
    wide = tiny("llama")
    small = build(config)
    with torch.no_grad():
        for name, weight in small.named_parameters():
            weight.copy_(dict(wide.named_parameters())[name][: weight.shape[0]])
    target = CausalLM(network("llama", torch.float64))
    found, _ = compare(Decoder(target, CausalLMDrafter(CausalLM(small), VOCAB), OPT), new=40)
    assert max(found.tokens) >= VOCAB - 20


@pytest.mark.slow
def test_a_drafter_that_knows_more_tokens_than_the_target():
    config = ARCHITECTURES["llama"]()
    config.vocab_size = VOCAB + 9
    target = CausalLM(network("llama", torch.float64))
    compare(Decoder(target, CausalLMDrafter(CausalLM(build(config)), VOCAB), OPT))


@pytest.mark.slow
def test_log_probabilities_are_told_too():
    decoder = decoder_of()
    for sampling in (Sampling(), DRAWN):
        found = on_device(decoder).generate(TEXT, NEW, sampling, recorder=Recorder(3))
        host = decoder.generate(TEXT, NEW, sampling, recorder=Recorder(3))
        assert found.log_probs == pytest.approx(host.log_probs, abs=1e-9)
        assert [one.keys() for one in found.top_log_probs or []] == [one.keys() for one in host.top_log_probs or []]


@pytest.mark.slow
def test_an_outcome_is_the_hosts():
    """What a drafter learns from: tree, path, tokens, features and logits."""
    seen: dict[str, list[Any]] = {"host": [], "device": []}
    for way, kept in seen.items():
        decoder = decoder_of("eagle")
        accept = decoder.drafter.accept

        def note(outcome: Any, kept: list[Any] = kept, accept: Any = accept) -> None:
            kept.append((outcome.path, outcome.tokens, outcome.features[-1].clone(), outcome.logits.clone()))
            accept(outcome)

        decoder.drafter.accept = note
        (on_device(decoder) if way == "device" else decoder).generate(TEXT, NEW)
    for mine, theirs in zip(seen["device"], seen["host"], strict=True):
        assert mine[:2] == theirs[:2]
        for one, other in zip(mine[2:], theirs[2:], strict=True):
            assert one.shape == other.shape and (one - other).abs().max() < 1e-9


def test_both_caches_hold_what_a_prefill_leaves():
    decoder = decoder_of()
    device = on_device(decoder)
    answer = device.generate(TEXT, NEW)
    context = [*TEXT, *answer.tokens]
    for lm in device.models:
        assert lm.length >= len(TEXT) and lm._tokens == context[: lm.length]
        fresh = CausalLM(copy.deepcopy(lm.model))
        fresh.append(context[: lm.length])
        for mine, theirs in zip(lm.cache.views, fresh.cache.views, strict=True):
            assert (mine[:, :, : lm.length] - theirs[:, :, : lm.length]).abs().max() < 1e-9


@pytest.mark.quick("lm", "dspark")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "medusa", "dspark"])
def test_whoever_leaves_a_text_leaves_nothing_of_a_step_on_its_way(drafter):
    decoder = decoder_of(drafter)
    device = on_device(decoder)
    for begun in (0, 2):
        steps = device.steps(TEXT, 40)
        left = list(itertools.islice(steps, begun + 1))
        assert device._coming and all(
            lm.length < len(TEXT) + sum(len(one.tokens) for one in left) for lm in device.models
        )
        same(device.generate(prompt(14, seed=begun), 8), decoder.generate(prompt(14, seed=begun), 8))


@pytest.mark.parametrize("change", ["room", "scale", "another drafter", "a target's forward", "a drafter's forward"])
def test_a_step_on_its_way_is_dropped_when_another_one_is_to_be_taken(change):
    """Between two steps the caller may do anything."""
    # All of a step is on its way, or two layers.
    policy, steps = POLICIES["opt to the end"] if "target" in change else OPT, []
    device, host = on_device(decoder_of(policy=policy)), decoder_of(policy=policy)
    for one in (device, host):
        taken = one.steps(TEXT, 30)
        steps.append(list(itertools.islice(taken, 3)))
        if change == "room":
            one.target.cache.reserve(4 * one.target.cache.capacity)
        elif change.endswith("forward"):
            lm = one.target if "target" in change else one.drafter.lm
            lm.score(random_tree(8, seed=1, root=4))
        elif change == "scale":
            one.drafter.scale = 0.5
            one.drafter.drafted.scale.fill_(0.5)
        else:
            one.drafter = copy.copy(one.drafter)
        ahead = device.ahead
        steps[-1] += itertools.islice(taken, 1)
        assert one is host or (ahead and device.ahead == ahead)
        steps[-1] += itertools.islice(taken, 2)
    for mine, theirs in zip(*steps, strict=True):
        assert mine.tree.tokens.tolist() == theirs.tree.tokens.tolist() and mine.tokens == theirs.tokens
        assert mine.expected_accepted == pytest.approx(theirs.expected_accepted)


@pytest.mark.quick("lm", "dspark")
@pytest.mark.parametrize("drafter", ["lm", "eagle", "parallelspec", "dspark"])
def test_a_step_that_nobody_takes_is_not_counted(drafter, monkeypatch):
    """What steps and models have done is what they do where none is launched ahead."""
    seen = []
    for ahead in (True, False):
        monkeypatch.setattr(DeviceStep, "pays", _find_room if ahead else lambda step, shape: False)
        device = on_device(decoder_of(drafter))
        found = device.generate(TEXT, 40, stop=lambda tokens: "enough" if len(tokens) > 9 else None)
        assert bool(device.ahead) == ahead
        work = [one.work[:2] for one in (device.target, device.drafter)]
        seen.append([work, *((step.draft_forwards, step.draft_tokens) for step in found.steps)])
    assert seen[0] == seen[1]


def test_logits_that_are_no_numbers_are_refused():
    decoder = decoder_of()
    with torch.no_grad():
        broken = CausalLM(copy.deepcopy(decoder.target.model))
        broken.model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        on_device(Decoder(broken, decoder.drafter, OPT)).generate(TEXT, 4)


@pytest.mark.slow
def test_what_is_not_carried_takes_the_hosts_step_and_says_so():
    target, lm = CausalLM(network("llama", torch.float64)), CausalLM(network("llama", torch.float64, True))
    small = CausalLMDrafter(lm, VOCAB)
    for made, why in (
        (Decoder(target, TokenRecycling(VOCAB, keep=False), OPT), "TokenRecycling drafts on the host"),
        (Decoder(target, small, Talon(0.03, 9)), "Talon looks at its trees on the host"),
        (Decoder(target, None, Static.empty()), "nobody drafts on the host"),
        (Decoder(ChainLM(tiny("llama")), small, OPT), "not one model with a cache"),
    ):
        device = on_device(made)
        assert why in repr(device) and device.why and why in device.why
        same(device.generate(TEXT, 8), made.generate(TEXT, 8))
        assert DEVICE not in device.taken and device.taken[device.why] > 0
    target.key_limit = 100
    assert "is causal for 100 keys" in repr(on_device(Decoder(target, small, OPT)))
    target.key_limit = CausalLM.key_limit
    assert f"steps: on {target.device}" in repr(on_device(Decoder(target, small, OPT)))


@pytest.mark.slow
def test_processors_take_the_hosts_step():
    decoder = decoder_of()
    device = on_device(decoder)

    def no_three(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([3]), -math.inf)

    sampling = Sampling(processors=(no_three,))
    same(device.generate(TEXT, 8, sampling), decoder.generate(TEXT, 8, sampling))
    assert DEVICE not in device.taken
    compare(decoder)


@pytest.mark.slow
def test_prompts_side_by_side_take_the_hosts_steps():
    decoder = decoder_of()
    device = on_device(decoder)
    prompts = [TEXT, prompt(5), prompt(30, seed=2)]
    found = generate_batch(device, prompts, 10, width=2)
    for mine, ids in zip(found, prompts, strict=True):
        assert mine.tokens == decoder.generate(ids, 10).tokens


def test_a_step_refuses_more_rows_than_its_shape_has():
    device = on_device(decoder_of())
    device.generate(TEXT, 4)
    step = device._tensor_step()
    forward = device.drafter.lm.text([1, 2, 3])
    with pytest.raises(ValueError, match="catches up with 1 to 2 rows of the drafter, got 3"):
        step.begin(StepStart(forward, 3, np.arange(0), 2, Sampling(), np.arange(0)))


def test_whole_numbers_may_be_written_as_fractions():
    decoder = decoder_of("eagle", OptTree(12, 0.1, 4.0))  # type: ignore[arg-type]
    compare(decoder, new=8)


def test_on_device_takes_a_decoder():
    with pytest.raises(TypeError, match="decoder"):
        on_device(np.zeros(3))  # type: ignore[arg-type]


def test_a_table_beside_a_model_that_is_shown_less_drafts_on_the_host():
    """The text on the device is cut to the model's keys, which are fewer than the text's tokens there."""
    decoder = decoder_of("recent")
    assert on_device(decoder).why is None
    copying = on_device(Decoder(decoder.target, Copying(decoder.drafter), OPT))
    assert copying.why == "Copying drafts on the host"
    assert copying.generate(TEXT, NEW).tokens == decoder.generate(TEXT, NEW).tokens
