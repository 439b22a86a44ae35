"""Controllers: a policy is chosen from the past. The choice never changes what is said, nor how likely it is."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asking import tiny_lm_drafter, tiny_target
from enumeration import Text, first_token, target_law
from table_models import TableDrafter, TableTarget, hashed_laws
from tiny_models import ARCHITECTURES, build, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    Decoder,
    EagleDrafter,
    OptTree,
    Random,
    Sampling,
    Scheduled,
    Static,
    Tree,
    TreePolicy,
    generate_beside,
    prove,
)
from opt_tree.children import LogProbs
from opt_tree.generation import Outcome, Step, StepTimes
from opt_tree.methods.children.draws import draws_of
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.naive_tree import naive
from opt_tree.target import Output
from opt_tree.tools.presets import plain
from opt_tree.verify import match

VOCAB = 3
CONTEXT = (0, 2)
TARGET, DRAFTER = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)


class Surest(TreePolicy):
    """Drafts a chain where the drafter is sure of the next token, else a bush. A function of the root alone."""

    reads_root = True

    def __init__(self, chain: TreePolicy, bush: TreePolicy) -> None:
        self.policies = (chain, bush)
        self.roots: list[torch.Tensor] = []

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        if root is None:
            return self.policies[1]
        self.roots.append(root.values)
        return self.policies[int(root.values.softmax(-1).max() < 0.6)]


class Peeking(TreePolicy):
    """Draws the child before it chooses, and drafts it only if it is token 0. It must not see the draws."""

    reads_root = True

    def __init__(self, random: Random) -> None:
        self.random, self.policies = random, (Sampled.chain(1), Static.empty())

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        draws = draws_of(self.random)
        drawn = draws.iid(root.values.softmax(-1), 1)
        draws.iid = lambda probs, k: drawn
        return self.policies[int(drawn) != 0]


def emitted(controller: Callable[[Random], TreePolicy], verifier: Callable) -> dict[Text, float]:
    """The exact distribution of the first token of the first step."""
    target, drafter = TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER)
    return first_token(lambda random: Decoder(target, drafter, controller(random), verifier), CONTEXT)


def target_probs() -> dict[Text, float]:
    return target_law(TARGET, CONTEXT, 1)


@pytest.mark.quick("<lambda>-naive", "<lambda>-multi_round1", "<lambda>-match0", "<lambda>-match1", "<lambda>-match2")
@pytest.mark.parametrize(
    ("controller", "verifier"),
    [
        (lambda random: Surest(Sampled.chain(2), Sampled.chains(2, 2)), multi_round),
        (lambda random: Surest(Sampled.delayed(1, 2, 1), Sampled.chain(1)), naive),
        (lambda random: Scheduled([Static.empty(), Sampled.chains(2, 1)]), multi_round),
        (lambda random: BetaLength(3, seed=2), match),
        (lambda random: CalibratedLength(2, seed=5), match),
        (lambda random: Auto(Costs.straight(1.9e-3, 2e-3, 7e-5, 5.5e-4, 2e-5)), match),
    ],
)
def test_a_choice_from_the_past_keeps_the_distribution(controller, verifier):
    assert emitted(controller, verifier) == pytest.approx(target_probs(), abs=1e-12)


def test_a_choice_that_peeks_at_what_is_drawn_does_not():
    """By enumeration: 0 is drafted only when it was drawn anyway, and so comes out too often."""
    found, expected = emitted(Peeking, naive), target_probs()
    assert sum(found.values()) == pytest.approx(1)
    assert max(abs(found[text] - p) for text, p in expected.items()) > 0.01
    # The same policies chosen blindly are exact.
    assert emitted(lambda random: Scheduled([Sampled.chain(1)]), naive) == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def target() -> CausalLM:
    return tiny_target()


@pytest.mark.slow
def test_a_schedule_takes_its_policies_in_turn_and_changes_no_token(target):
    drafter = tiny_lm_drafter()
    policies = [OptTree(6, 0.0, 3), Static.empty(), Eagle2(2, 2, 5), Static.chain(3)]
    decoder = Decoder(target, drafter, Scheduled(policies))
    text = plain(target).generate(prompt(9), 40).tokens
    for _ in range(2):  # every prompt begins at the first
        answer = decoder.generate(prompt(9), 40)
        assert answer.tokens == text
        used = [step.policy for step in answer.steps]
        assert used == [policies[i % 4] for i in range(len(used))] and len(used) > 6
        assert all(step.tree.nodes == 0 for step in answer.steps[1::4])
    sampled = decoder.generate(prompt(9), 30, Sampling(0.8), seed=4).tokens
    assert sampled == plain(target).generate(prompt(9), 30, Sampling(0.8), seed=4).tokens


def test_a_schedule_and_a_posterior_begin_anew_with_every_text():
    schedule, posterior, told = Scheduled([Static.chain(n) for n in (0, 1, 2, 1)]), BetaLength(2), []
    posterior._numbers = SimpleNamespace(random=lambda: 1.0, beta=lambda *counts: told.append(counts) or 0.5)
    for controller, nodes in ((schedule, [0, 1, 2]), (posterior, [1, 1])):
        decoder = Decoder(TableTarget(TARGET, VOCAB), TableDrafter(TARGET), controller)  # all is accepted
        for _ in range(2):
            answer = decoder.generate(list(CONTEXT), sum(nodes) + len(nodes))
            assert [step.tree.nodes for step in answer.steps] == nodes
    assert told == [(1, 1), (2, 1)] * 2


@pytest.mark.slow
def test_the_root_is_asked_once_and_shown(target):
    lm = CausalLM(tiny_drafter("llama"))
    controller = Surest(OptTree(6, 0.0, 3), Static.chain(2))
    decoder = Decoder(target, CausalLMDrafter(lm), controller)
    answer = decoder.generate(prompt(9), 30)
    assert answer.tokens == plain(target).generate(prompt(9), 30).tokens
    drafted = [step for step in answer.steps if step.tree.nodes]
    assert len(controller.roots) == len(drafted) and controller.roots[0].shape == (1, lm.vocab)
    assert {type(step.policy) for step in drafted} == {OptTree, Static}
    assert all(step.draft_forwards == step.tree.depths.max() for step in drafted if isinstance(step.policy, Static))


class Recorder(TreePolicy):
    """Keeps what it is told."""

    features = (0,)

    def __init__(self) -> None:
        self.policies = (OptTree(5, 0.0, 2),)
        self.told: list[tuple[Step, Outcome]] = []

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self.prefill = prefill.features[0].shape

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        assert root is None
        return self.policies[0]

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.told.append((step, outcome))


def test_what_a_controller_learns_from(target):
    """Costs from the step; the features it asked for, and every row's logits, from the outcome."""
    controller, head = Recorder(), tiny_head(target.model)
    decoder = Decoder(target, EagleDrafter(head, target), controller)
    answer = decoder.generate(prompt(9), 20)
    assert controller.prefill == (8, target.hidden)
    assert [step for step, _ in controller.told] == answer.steps
    for step, outcome in controller.told:
        assert outcome.path == step.path and outcome.tokens == step.tokens
        assert sorted(outcome.features) == [-1, 0]
        assert all(states.shape == (len(step.path), target.hidden) for states in outcome.features.values())
        assert outcome.logits.shape == (len(step.tree), target.vocab)
        assert (step.draft_forwards > 0) == (step.tree.nodes > 0)
        assert step.times.total > step.times.target_forward > 0


class Undeclared(Scheduled):
    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        return Eagle2()


def test_what_is_wrong_is_said(target):
    drafter = tiny_lm_drafter()
    with pytest.raises(TypeError, match="multi_round is not exact for children of type TopK"):
        Decoder(target, drafter, Scheduled([Sampled.chain(2), OptTree()]), multi_round)
    with pytest.raises(TypeError, match="OptTree needs a drafter"):
        Decoder(target, None, Scheduled([Static.empty(), OptTree()]))
    with pytest.raises(ValueError, match="at least one policy"):
        Scheduled([])
    with pytest.raises(ValueError, match="Undeclared chose a policy that is not one of its own: Eagle2"):
        Decoder(target, drafter, Undeclared([OptTree()])).generate(prompt(4), 4)


def test_what_a_table_drafts_costs_layers_without_forwards():
    costs = Costs.straight(plain=1.0, step=2.0, row=0.1, layer=1.0, draft_row=0.0)
    chain = Tree(np.array([0, 1, 2]), np.array([-1, 0, 1]), np.zeros(3), np.zeros(3, dtype=np.int64))
    step = Step(chain, [0], [5], OptTree(), 1, 3, StepTimes(0.0, 0.0, 0.0, 0.0, 0.0))
    assert costs.of(step) == pytest.approx(2.0 + 0.3 + 2 * 1.0)  # two layers of a table, at no forward
    bare = replace(step, tree=Tree.of([4], [-1]), draft_forwards=0, draft_tokens=0)
    assert costs.of(bare) == 1.0 + 1.0  # it was asked and knew nothing
    assert costs.of(replace(bare, policy=Static.empty())) == 1.0


@pytest.mark.slow
def test_the_length_of_a_chain_follows_acceptance(target):
    """The target drafts for itself, so that all is accepted; an unrelated model, so that next to nothing is."""
    lengths = {}
    for name, model in (("itself", build(ARCHITECTURES["llama"]())), ("another", tiny("gpt2"))):
        answer = Decoder(target, CausalLMDrafter(CausalLM(model)), BetaLength(6, seed=1)).generate(prompt(9), 60)
        assert answer.tokens == plain(target).generate(prompt(9), 60).tokens
        lengths[name] = np.mean([step.tree.nodes for step in answer.steps[3:-2]])
    assert lengths["itself"] > 4 > 2 > lengths["another"] >= 1


class Bare(TreePolicy):
    """No children, no depth: nothing that grows."""


def test_a_controller_stands_only_where_a_policy_chooses():
    """What grows no tree is refused where trees are grown, before anything is decoded."""
    target, drafter = TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER)
    schedule = Scheduled([Static.chain(1)])
    nested = Scheduled([Static.chain(1)])
    nested.policies = (schedule,)
    for grown in (
        lambda: Decoder(target, drafter, nested),
        lambda: Scheduled([schedule]),
        lambda: prove(match, schedule),
        lambda: generate_beside(Decoder(target, drafter, OptTree(3)), {"schedule": schedule}, [0], 2),
    ):
        with pytest.raises(TypeError, match="Scheduled chooses among policies and grows no tree itself"):
            grown()
    with pytest.raises(TypeError, match="Bare grows no tree: it has no children"):
        Decoder(target, drafter, Bare())
