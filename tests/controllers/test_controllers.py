"""Controllers: a policy is chosen from the past. The choice never changes what is said, nor how likely it is."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TableDrafter, TableTarget, hashed_laws
from enumeration import Text, first_token, target_law
from tiny_models import ARCHITECTURES, build, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    Controller,
    Decoder,
    EagleDrafter,
    Fixed,
    OptTree,
    Random,
    Sampling,
    Scheduled,
    Static,
    Tree,
    TreePolicy,
)
from opt_tree.controllers import BetaLength, CalibratedLength, Thompson
from opt_tree.controllers.hindsight import tells_of, tokens_of
from opt_tree.core.children import IID, Few
from opt_tree.core.step import Outcome, Step, StepTimes
from opt_tree.core.target import Output
from opt_tree.core.tree import alone
from opt_tree.decoding.presets import plain
from opt_tree.policies import Costs, Delayed, Eagle2, Sampled
from opt_tree.verifiers import match, multi_round, naive, traversal, without_replacement

VOCAB = 3
CONTEXT = (0, 2)
TARGET, DRAFTER = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)


class Surest(Controller):
    """Drafts a chain where the drafter is sure of the next token, else a bush. A function of the root alone."""

    reads_root = True

    def __init__(self, chain: TreePolicy, bush: TreePolicy) -> None:
        self.policies = (chain, bush)
        self.roots: list[torch.Tensor] = []

    def choose(self, context: list[int], root: torch.Tensor | Few | None) -> TreePolicy:
        if root is None:
            return self.policies[1]
        self.roots.append(root)
        return self.policies[int(root.softmax(-1).max() < 0.6)]


class Peeking(Controller):
    """Draws the child before it chooses, and drafts it only if it is token 0. It must not see the draws."""

    reads_root = True

    def __init__(self, random: Random) -> None:
        self.random, self.policies = random, (Sampled.chain(1), Static.empty())

    def choose(self, context: list[int], root: torch.Tensor | Few | None) -> TreePolicy:
        drawn = self.random.iid(root.softmax(-1), 1)
        self.random.iid = lambda probs, k: drawn
        return self.policies[int(drawn) != 0]


def emitted(controller: Callable[[Random], Controller], verifier: Callable) -> dict[Text, float]:
    """The exact distribution of the first token of the first step."""
    target, drafter = TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER)
    return first_token(lambda random: Decoder(target, drafter, controller(random), verifier), CONTEXT)


def target_probs() -> dict[Text, float]:
    return target_law(TARGET, CONTEXT, 1)


@pytest.mark.parametrize(
    ("controller", "verifier"),
    [
        (lambda random: Surest(Sampled.chain(2), Sampled.chains(2, 2)), multi_round),
        (lambda random: Surest(Delayed(1, 2, 1), Sampled.chain(1)), naive),
        (lambda random: Scheduled([Static.empty(), Sampled.chains(2, 1)]), multi_round),
        (lambda random: BetaLength(3, Sampled.chain, seed=2), naive),
        (lambda random: Thompson([Static.empty(), Sampled.chains(2, 1), Sampled.chain(2)], seed=1, trials=1), naive),
        (lambda random: CalibratedLength(2, seed=5), match),
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


class PeekingJudge(Controller):
    """Draws two children before it chooses, and lets them decide who judges them."""

    reads_root = True
    verifiers = (naive, multi_round)

    def __init__(self, random: Random) -> None:
        self.random, self.policies = random, (Sampled.chains(2, 1),)

    def choose(self, context: list[int], root: torch.Tensor | Few | None) -> TreePolicy:
        drawn = self.random.iid(root.softmax(-1), 2)
        self.random.iid = lambda probs, k: drawn
        self.verifier = self.verifiers[int(drawn[0, 1] == 0)]
        return self.policies[0]


class JudgedInTurn(Scheduled):
    """Both verifiers, chosen blindly."""

    verifiers = (naive, multi_round)

    def __init__(self, judge: int) -> None:
        super().__init__([Sampled.chains(2, 1)])
        self.verifier = self.verifiers[judge]


def test_a_verifier_may_be_chosen_blindly_but_not_by_what_was_drawn():
    expected = target_probs()
    for judge in range(2):
        assert emitted(lambda random, judge=judge: JudgedInTurn(judge), traversal) == pytest.approx(expected, abs=1e-12)
    found = emitted(PeekingJudge, naive)
    assert max(abs(found[text] - p) for text, p in expected.items()) > 0.001


@pytest.fixture
def target() -> CausalLM:
    return CausalLM(build(ARCHITECTURES["llama"]()))


def test_a_schedule_takes_its_policies_in_turn_and_changes_no_token(target):
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")))
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


class Recorder(Controller):
    """Keeps what it is told."""

    features = (0,)

    def __init__(self) -> None:
        self.policies = (OptTree(5, 0.0, 2),)
        self.told: list[tuple[Step, Outcome]] = []

    def reset(self, prompt: list[int], output: Output | None) -> None:
        self.prefill = output.features[0].shape

    def choose(self, context: list[int], root: torch.Tensor | Few | None) -> TreePolicy:
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
        assert outcome.path == step.path and outcome.tokens == step.tokens and outcome.accepted == step.accepted
        assert sorted(outcome.features) == [-1, 0]
        assert all(states.shape == (len(step.path), target.hidden) for states in outcome.features.values())
        assert outcome.logits.shape == (len(step.tree), target.vocab)
        assert (step.draft_forwards > 0) == (step.tree.nodes > 0)
        assert step.times.total > step.times.target_forward > 0


class Undeclared(Fixed):
    def choose(self, context: list[int], root: torch.Tensor | Few | None) -> TreePolicy:
        return Eagle2()


def test_what_is_wrong_is_said(target):
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    with pytest.raises(TypeError, match="multi_round is not exact for children of type TopK"):
        Decoder(target, drafter, Scheduled([Sampled.chain(2), OptTree()]), multi_round)
    with pytest.raises(TypeError, match="OptTree needs a drafter"):
        Decoder(target, None, Scheduled([Static.empty(), OptTree()]))
    with pytest.raises(ValueError, match="at least one policy"):
        Scheduled([])
    judged = JudgedInTurn(0)
    judged.verifiers = (without_replacement,)
    with pytest.raises(TypeError, match="without_replacement is not exact for children of type IID"):
        Decoder(target, drafter, judged, traversal)
    judged.verifiers = (multi_round,)
    with pytest.raises(ValueError, match="JudgedInTurn chose a verifier that is not one of its own: naive"):
        Decoder(target, drafter, judged, traversal).generate(prompt(4), 4, Sampling(1.0))
    with pytest.raises(ValueError, match="Undeclared chose a policy that is not one of its own: Eagle2"):
        Decoder(target, drafter, Undeclared(OptTree())).generate(prompt(4), 4)


class Bigrams(TableDrafter):
    """Names two tokens of each node, with most of their mass, as a table does."""

    sparse = True

    def _counted(self, answer):
        probs, tokens = super()._counted(answer).exp().topk(2)
        return Few((0.7 * probs).log(), tokens)


def test_a_drafter_that_names_few_tokens():
    """Exact under `match`, with E(A) as it says; refused where children are drawn."""
    target = TableTarget(TARGET, VOCAB)
    decoder = Decoder(target, Bigrams(DRAFTER), OptTree(5, 0.0, 3))
    step = next(decoder.steps(list(CONTEXT), 6))
    root = np.sort(DRAFTER(CONTEXT))[::-1][:2]
    first = step.tree.depths == 1
    assert np.exp(step.tree.path_log_probs[first]).max() == pytest.approx(0.7 * root[0])

    assert first_token(lambda _: decoder, CONTEXT) == pytest.approx(target_probs(), abs=1e-12)
    with pytest.raises(TypeError, match="Bigrams names a few tokens of each node only; Sampled draws its children"):
        Decoder(target, Bigrams(DRAFTER), Sampled.chain(2), naive)


def simulated(controller: Controller, tokens: Callable[[int], int], seconds: list[float], steps: int) -> list[int]:
    """Which policies a controller takes on a machine where the i-th costs `seconds[i]` and emits `tokens(i)` a step."""
    taken = []
    tree = Tree(np.array([0]), np.array([-1]), np.zeros(1), np.zeros(1, dtype=np.int64))
    for _ in range(steps):
        policy = controller.choose([1], None)
        arm = controller.policies.index(policy)
        times = StepTimes(seconds[arm], 0.0, 0.0, 0.0, 0.0)
        emitted = [0] * tokens(arm)
        controller.observe(
            Step(tree, [0], emitted, policy, 0, 0, times), Outcome(tree, [0], emitted, {}, torch.zeros(1, 1))
        )
        taken.append(arm)
    return taken


def test_thompson_finds_the_policy_of_most_tokens_a_second():
    """Arms of 1.0, 1.5, 1.8 and 1.2 tokens a unit of time on average; noise of the size that steps have."""
    seconds, mean = [1.0, 1.4, 2.0, 4.0], [1.0, 2.1, 3.6, 4.8]
    # None of them tells of another one: that would take real trees.
    arms = [Static.empty(), Static.chain(2), OptTree(12, 0.3), OptTree(24, 0.5)]
    best = []
    for seed in range(6):
        noise = np.random.default_rng(seed)
        taken = simulated(Thompson(arms, seed), lambda arm, noise=noise: 1 + noise.poisson(mean[arm] - 1), seconds, 400)
        assert taken[:4] == [3, 2, 1, 0]
        best.append(np.mean(np.array(taken[100:]) == 2))
    assert min(best) > 0.4 and np.mean(best) > 0.8


def test_with_costs_thompson_does_not_look_at_the_clock():
    """The clock says that drafting is a thousand times slower than it is."""
    costs = Costs.straight(plain=1.0, step=2.0, row=0.1, layer=1.0, draft_row=0.0)
    controller = Thompson([Static.empty(), OptTree(12)], costs=costs)
    # The simulated trees are all empty: a unit of time each, and another one where the drafter was asked.
    taken = simulated(controller, lambda arm: [1, 4][arm], [1.0, 1000.0], 40)
    assert taken[:2] == [1, 0] and np.mean(taken[2:]) > 0.9
    chain = Tree(np.array([0, 1, 2]), np.array([-1, 0, 1]), np.zeros(3), np.zeros(3, dtype=np.int64))
    step = Step(chain, [0], [5], OptTree(), 1, 3, StepTimes(0.0, 0.0, 0.0, 0.0, 0.0))
    assert costs.of(step) == pytest.approx(2.0 + 0.3 + 2 * 1.0)  # two layers of a table, at no forward
    bare = replace(step, tree=alone(4), draft_forwards=0, draft_tokens=0)
    assert costs.of(bare) == 1.0 + 1.0  # it was asked and knew nothing
    assert costs.of(replace(bare, policy=Static.empty())) == 1.0


def test_thompson_follows_a_change():
    """The machine's other arm becomes the better one: it is taken most of the time soon after."""
    controller = Thompson([Static.empty(), OptTree(12)], decay=0.99)
    before = simulated(controller, lambda arm: [1, 4][arm], [1.0, 2.0], 150)
    after = simulated(controller, lambda arm: [1, 1][arm], [1.0, 2.0], 300)
    assert np.mean(before[50:]) > 0.8 and np.mean(after[150:]) < 0.2


def test_the_length_of_a_chain_follows_acceptance(target):
    """The target drafts for itself, so that all is accepted; an unrelated model, so that next to nothing is."""
    lengths = {}
    for name, model in (("itself", build(ARCHITECTURES["llama"]())), ("another", tiny("gpt2"))):
        answer = Decoder(target, CausalLMDrafter(CausalLM(model)), BetaLength(6, seed=1)).generate(prompt(9), 60)
        assert answer.tokens == plain(target).generate(prompt(9), 60).tokens
        lengths[name] = np.mean([step.tree.nodes for step in answer.steps[3:-2]])
    assert lengths["itself"] > 4 > 2 > lengths["another"] >= 1


@pytest.mark.parametrize(
    ("drawn", "smaller"),
    [
        (Static.chain(6), [Static.empty(), *map(Static.chain, range(1, 7))]),
        (Static.kary(3, 3), [Static.kary(2, 2), Static.chain(3), Static.of([[0], [2], [2, 1]])]),
        (OptTree(12, 0.0), [OptTree(12, 0.1), OptTree(6, 0.2), OptTree(2, 0.0, 3), Static.empty()]),
    ],
)
def test_hindsight_is_what_the_smaller_tree_brings(target, drawn, smaller):
    """Every step is decoded again with the smaller tree. Of an OPT-Tree a few steps may be told wrongly."""
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")))
    context, wrong, seen = prompt(9), 0, set()
    for step in Decoder(target, drafter, drawn).generate(context, 40).steps[:-1]:
        for policy in smaller:
            assert tells_of(policy, drawn)
            own = next(Decoder(target, drafter, policy).steps(context, 12))
            told = tokens_of(policy, step)
            wrong += told != len(own.tokens)
            seen.add(told)
            assert isinstance(policy, OptTree) or told == len(own.tokens)
        context = [*context, *step.tokens]
    assert wrong <= 1 and len(seen) > 1


@pytest.mark.parametrize(
    ("policy", "drawn"),
    [
        (Static.chain(3), Static.chain(2)),
        (Static.chain(2), OptTree(12)),
        (OptTree(6, 0.2), OptTree(12, 0.3)),
        (OptTree(13), OptTree(12)),
        (OptTree(6), OptTree(6, max_depth=3)),
        (Sampled.chain(1), Sampled.chain(2)),
        (Static(((0,),), IID), Static(((0,), (0, 0)), IID)),
    ],
)
def test_a_tree_tells_nothing_of_what_it_does_not_contain(policy, drawn):
    assert not tells_of(policy, drawn)
    assert tells_of(drawn, drawn) and tells_of(Static.empty(), drawn)


def test_hindsight_stops_where_a_layer_gains_too_little():
    """A chain of .6 .36 .216, all accepted: behind a layer that gained too little nothing is drafted."""
    rows = np.arange(4)
    chain = Tree(rows, rows - 1, rows * np.log(0.6), np.array([0, 1, 2, -1]))
    times = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    step = Step(chain, [0, 1, 2, 3], [1, 2, 3, 9], OptTree(3, 0.0), 3, 3, times)
    told = [tokens_of(OptTree(3, threshold), step) for threshold in (0.7, 0.4, 0.3)]
    assert told == [2, 3, 4] and tokens_of(OptTree(2, 0.3), step) == 3


def drafted(controller: Controller, accepted: Callable[[], int], steps: int) -> list[int]:
    """How long the chains are that a controller takes where so many tokens of a long enough one are accepted."""
    taken = []
    for _ in range(steps):
        policy = controller.choose([1, 2], None)
        length = policy.nodes
        rows = np.arange(length + 1)
        tree = Tree(rows, rows - 1, -rows.astype(float), np.minimum(rows, 0))
        path = [*range(min(accepted(), length) + 1)]
        tokens = [5] * len(path)
        step = Step(tree, path, tokens, policy, length, length, StepTimes(0.0, 0.0, 0.0, 0.0, 0.0))
        controller.observe(step, Outcome(tree, path, tokens, {}, torch.zeros(1, 1)))
        taken.append(length)
    return taken


def test_thompson_learns_of_small_trees_from_a_large_one():
    """Nothing is ever accepted: one step of each is enough to know that plain decoding is best, and stays it."""
    costs = Costs.straight(plain=1.0, step=1.0, row=0.1, layer=0.5, draft_row=0.0)
    taken = drafted(Thompson([Static.chain(length) for length in range(9)], costs=costs), lambda: 0, 60)
    assert taken[:9] == [*range(8, -1, -1)] and np.mean(np.array(taken[9:]) == 0) > 0.9


def test_thompson_is_sure_of_what_a_tree_adds_long_before_it_is_sure_of_what_it_brings():
    """Four tokens or none: a chain of 8 adds nothing to one of 4 and costs 4 % more, where steps differ by twice 2."""
    costs = Costs.straight(plain=1.0, step=1.0, row=0.01, layer=0.0, draft_row=0.0)
    for seed in range(5):
        noise = np.random.default_rng(seed)
        controller = Thompson([Static.chain(4), Static.chain(8)], seed, costs=costs)
        taken = drafted(controller, lambda noise=noise: 4 * noise.integers(2), 200)
        assert taken[:2] == [8, 4] and np.mean(np.array(taken[50:]) == 8) < 0.15


def test_thompson_keeps_apart_what_does_not_lie_inside_one_another():
    """Of a chain and a tree of another kind neither tells of the other; both add to no tree at all."""
    controller = Thompson([OptTree(12), Static.chain(2), Static.empty(), Static.chain(4)])
    assert controller._base == [2, 2, None, 1]
    assert Thompson([OptTree(12), OptTree(12), Static.chain(2)])._base == [None] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BetaLength(0), "longest must be at least 1, got 0"),
        (lambda: Thompson([]), "at least one policy"),
        (lambda: Thompson([OptTree()], trials=0), "trials must be at least 1 and decay in"),
        (lambda: Thompson([OptTree()], decay=1.5), "got 1 and 1.5"),
    ],
)
def test_bad_settings_of_thompson_sampling(make, message):
    with pytest.raises(ValueError, match=message):
        make()
