"""Policies along a stored text take the steps that they decode it in; so are the trees beside a generation theirs."""

import numpy as np
import pytest
import torch
from methods.drafters.every_kind import MAKERS, target_model
from tiny_models import VOCAB, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import Decoder, Generation, OptTree, Sampling
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.controllers.predicted import LengthPredictor, PredictedLength
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.along import along
from opt_tree.tools.beside import generate_beside
from opt_tree.tools.stop_strings import Stop
from opt_tree.tools.stored_text import StoredText

PROMPT = prompt(12)
RUN = OptTree(nodes=6, threshold=0.1, max_depth=4)
POLICIES = {
    "small": RUN,
    "large": OptTree(nodes=20, threshold=0.0, max_depth=6),
    "eagle2": Eagle2(nodes=8),
    "deeper": DynamicDepth(depth=5, nodes=9),
    "chain": Static.chain(5),
    "binary": Static.kary(2, 3),
    "plain": Static.empty(),
}
KINDS = sorted(MAKERS.keys() - {"recycling"})


def plain(target: CausalLM, length: int, **options) -> Generation:
    return Decoder(target, None, Static.empty()).generate(PROMPT, length, **options)


@pytest.mark.quick("store")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_along_a_text_are_those_of_decoding(kind: str) -> None:
    """Lengths, trees and draft forwards, for every kind of drafter that learns nothing from a tree.

    A draft model decodes with every policy; another kind with the large tree and another, in turn.
    """
    target = CausalLM(target_model())
    text = plain(target, 24, stop=None)
    drafter = MAKERS[kind](target)
    found = along(drafter, StoredText(PROMPT, text.tokens, 24), POLICIES, target)
    turn, others = KINDS.index(kind), [name for name in POLICIES if name != "large"]
    chosen = POLICIES if kind == "lm" else ("large", others[turn % len(others)])
    for name in chosen:
        real = Decoder(target, drafter, POLICIES[name]).generate(PROMPT, 24, stop=None)
        ours = found[name]
        assert ours.tokens == real.tokens == text.tokens
        assert ours.accept_lengths == real.accept_lengths, name
        for mine, own in zip(ours.steps, real.steps, strict=True):
            assert mine.tree.tokens.tolist() == own.tree.tokens.tolist()
            np.testing.assert_allclose(mine.tree.path_log_probs, own.tree.path_log_probs, atol=1e-9)
            assert mine.draft_forwards == own.draft_forwards or kind == "rasd"  # where a node of others needs the model


@pytest.mark.slow
def test_a_stop_token_ends_the_text_and_nothing_is_drafted_below_it() -> None:
    target, drafter = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    stop = Stop(tokens=[plain(target, 24, stop=None).tokens[13]])
    text = plain(target, 24, stop=stop)
    assert len(text.tokens) < 24
    found = along(drafter, StoredText(PROMPT, text.tokens, 24, frozenset(stop.tokens)), POLICIES)
    for name, policy in POLICIES.items():
        real = Decoder(target, drafter, policy).generate(PROMPT, 24, stop=stop)
        assert found[name].accept_lengths == real.accept_lengths
        assert [step.tree.nodes for step in found[name].steps] == [step.tree.nodes for step in real.steps]


@pytest.mark.slow
def test_a_drawn_text_is_decoded_in_the_same_steps_with_its_seed() -> None:
    target, drafter = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    warm = Sampling(temperature=1.0)
    text = plain(target, 24, stop=None, sampling=warm, seed=5)
    found = along(drafter, StoredText(PROMPT, text.tokens, 24), POLICIES)
    for name, policy in POLICIES.items():
        real = Decoder(target, drafter, policy).generate(PROMPT, 24, warm, stop=None, seed=5)
        assert (found[name].tokens, found[name].accept_lengths) == (real.tokens, real.accept_lengths)


def test_one_token_changed_ends_a_step_before_it() -> None:
    """The text decides what is accepted, not the target."""
    drafter = CausalLMDrafter(CausalLM(tiny("llama")))  # the target drafts for itself
    tokens = plain(CausalLM(tiny("llama")), 20, stop=None).tokens
    changed = [*tokens[:7], (tokens[7] + 1) % VOCAB, *tokens[8:]]
    lengths = along(drafter, StoredText(PROMPT, changed, 20), {"chain": Static.chain(5)})["chain"].accept_lengths
    assert lengths[:2] == [6, 2] and sum(lengths) == 20


@pytest.mark.slow
def test_a_node_is_drafted_once_whoever_asks() -> None:
    target, drafter = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    text = StoredText(PROMPT, plain(target, 24, stop=None).tokens, 24)

    def rows(policies: dict) -> int:
        before = drafter.work.tokens
        along(drafter, text, policies)
        return drafter.work.tokens - before

    once = rows({"one": RUN})
    assert rows({"one": RUN, "two": RUN, "three": RUN}) == once
    assert rows(POLICIES) < sum(rows({name: policy}) for name, policy in POLICIES.items())


@pytest.mark.parametrize("kind", [BetaLength, CalibratedLength])
def test_a_controller_learns_from_text_to_text(kind: type[BetaLength | CalibratedLength]) -> None:
    """The same draws, the same trees."""
    target, drafter = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    text = StoredText(PROMPT, plain(target, 24, stop=None).tokens, 24)
    walked, decoded = kind(4, seed=3), kind(4, seed=3)
    for _ in range(2):
        found = along(drafter, text, {"it": walked})["it"]
        real = Decoder(target, drafter, decoded).generate(PROMPT, 24, stop=None)
        assert found.accept_lengths == real.accept_lengths
        assert [step.policy for step in found.steps] == [step.policy for step in real.steps]


def test_what_a_text_does_not_say_is_refused() -> None:
    target, drafter = CausalLM(tiny("llama")), CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    text = StoredText(PROMPT, [1, 2, 3], 3)
    with pytest.raises(ValueError, match="wild draws its children"):
        along(drafter, text, {"wild": Sampled.chains(2, 2)})
    length = PredictedLength(LengthPredictor(target.hidden), target)
    with pytest.raises(ValueError, match="seer reads the target's hidden states"):
        along(drafter, text, {"seer": length})
    with pytest.raises(ValueError, match="the target is needed"):
        along(EagleDrafter(tiny_head(target.model), target), text, {"chain": Static.chain(2)})


# Beside a generation.


def pair(kind: str):
    target = CausalLM(tiny("llama"))
    model = CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    return target, {
        "sharpened": lambda: model.calibrated(0.5),
        "reduced": lambda: EagleDrafter(tiny_head(target.model), target, tokens=torch.arange(1, VOCAB, 2)),
        "grafted": lambda: Grafted(model, NGramDrafter(), 1),
    }[kind]()


@pytest.mark.quick("grafted")
@pytest.mark.parametrize("kind", ["sharpened", "reduced", "grafted"])
def test_the_trees_beside_a_run_are_those_that_the_policies_draw_themselves(kind: str) -> None:
    found = generate_beside(Decoder(*pair(kind), RUN), POLICIES, PROMPT, 16)
    run = Decoder(*pair(kind), RUN).generate(PROMPT, 16)
    assert found.generation.tokens == run.tokens and found.generation.accept_lengths == run.accept_lengths
    context = list(PROMPT)
    for index, step in enumerate(run.steps):
        beside = found.trees[index]
        assert set(beside) == set(POLICIES)
        for name in POLICIES if index in (0, 2, len(run.steps) - 2) else ():
            target, drafter = pair(kind)
            alone = next(Decoder(target, drafter, POLICIES[name]).steps(context, 16 - len(context) + len(PROMPT)))
            for field in ("tokens", "parents", "path_log_probs"):
                np.testing.assert_allclose(
                    getattr(beside[name], field), getattr(alone.tree, field), atol=1e-9, err_msg=name
                )
            assert found.accepted[index].get(name, alone.accepted) == alone.accepted
        context += step.tokens
    assert any(found.accepted)


def test_the_a_of_other_trees_is_told_only_where_the_text_does_not_depend_on_the_tree() -> None:
    warm = Sampling(temperature=1.0)
    drawn = Decoder(*pair("grafted")[:1], pair("sharpened")[1], Sampled.chains(2, 2), verifier=multi_round)
    found = generate_beside(drawn, {"chain": Static.chain(3)}, PROMPT, 12, sampling=warm)
    assert any(found.trees) and not any(found.accepted)
    matched = generate_beside(Decoder(*pair("sharpened"), RUN), {"the same": RUN}, PROMPT, 16, sampling=warm)
    for step, accepted, trees in zip(matched.generation.steps, matched.accepted, matched.trees, strict=True):
        assert accepted.get("the same", step.accepted) == step.accepted
        assert trees["the same"].tokens.tolist() == step.tree.tokens.tolist()


def test_what_has_no_one_tree_is_refused() -> None:
    target, drafter = pair("sharpened")
    with pytest.raises(ValueError, match="without a drafter"):
        generate_beside(Decoder(target, None, Static.empty()), POLICIES, PROMPT)
    with pytest.raises(ValueError, match="wild draws its children"):
        generate_beside(Decoder(target, drafter, RUN), {"wild": Sampled.chains(2, 2)}, PROMPT)
    with pytest.raises(ValueError, match="learns from every tree"):
        generate_beside(Decoder(target, TokenRecycling(VOCAB), RUN), {"chain": Static.chain(2)}, PROMPT)
