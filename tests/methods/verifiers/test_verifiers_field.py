"""The field's verifiers over every kind of tree they take: the emitted law is the target's, by exact enumeration."""

import functools
import heapq
import itertools
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from asking import begin, draft
from enumeration import LAWS as PLAIN_LAWS
from enumeration import (
    LOSSLESS,
    VOCAB,
    Text,
    drawn_trees,
    emitted_law,
    exact_for,
    law_of,
    scored,
    solved_once,
    unchecked,
    verdicts,
    warped,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from table_models import Laws, TableDrafter, TableTarget, hashed_laws, written_laws
from tiny_models import causal_logits, prompt, tiny_drafter
from torch import Tensor

from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    Decoder,
    OptTree,
    Random,
    Sampling,
    Static,
    Tree,
    TreePolicy,
    Verifier,
    greedy,
    match,
    prove,
)
from opt_tree.children import LogProbs
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.drawn import proposal
from opt_tree.methods.children.draws import Among, Draws, draws_of, probs_of
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.methods.verifiers import importance_weighted
from opt_tree.methods.verifiers.block_verification import block
from opt_tree.methods.verifiers.importance_weighted import khisti, tournament
from opt_tree.methods.verifiers.k_sequential import k_seq, threshold
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.multipath_block_verification import chosen_from, multipath_block
from opt_tree.methods.verifiers.naive_tree import naive
from opt_tree.methods.verifiers.recursive_rejection import without, without_replacement
from opt_tree.methods.verifiers.rheo_sampling import rheo
from opt_tree.methods.verifiers.rules import Attempt, Branching, branching_of
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.methods.verifiers.typical_acceptance import typical
from opt_tree.methods.verifiers.walks import block_efficiency, walk_up
from opt_tree.tools.enumeration import continued, distance
from opt_tree.verify import check

CONTEXT = (0,)

POLICIES: dict[str, TreePolicy] = {
    "chain": Sampled.chain(3),
    "parallel chains": Sampled.chains(2, 2),
    "three siblings": Sampled.kary(3, 1),
    "delayed": Sampled.delayed(trunk=1, branches=2, length=1),
    "uneven": Static(((0,), (1,), (0, 0), (0, 1)), IID),
    "binary, distinct": Sampled.kary(2, 2, replacement=False),
    "all, distinct": Sampled.kary(3, 1, replacement=False),
    "chain, distinct": Sampled((1, 1), replacement=False),
    "sequoia": sequoia_tree(AcceptanceRates((0.6, 0.3)), nodes=3, depth=3, siblings=WithoutReplacement),
    "dyspec": DySpec(nodes=3, max_depth=3),
    "dyspec, threshold": DySpec(nodes=4, threshold=0.3, max_depth=2),
    "rheo": Rheo(nodes=3, threshold=0.0, max_depth=3),
    "rheo, wide": Rheo(nodes=4, threshold=0.3, max_depth=2),
    "opt": OptTree(nodes=3, threshold=0.0, max_depth=3),
}
# Hundreds of trees each, or thousands: with laws of many zeros.
LARGE: dict[str, TreePolicy] = {
    "binary": Sampled.kary(2, 2),
    "three chains": Sampled.chains(3, 2),
    "long chains": Sampled.chains(2, 3),
    "long delayed": Sampled.delayed(trunk=1, branches=2, length=2),
    "deep, distinct": Sampled((2, 2, 1), replacement=False),
}


T1 = Sampling(1.0)
# The target's law, the drafter's, and what is made of both.
LAWS: dict[str, tuple[Laws, Laws, Sampling]] = {
    **{name: (*both, T1) for name, both in PLAIN_LAWS.items() if name != "certain drafter"},
    "warped": (hashed_laws(6, VOCAB), hashed_laws(7, VOCAB), Sampling(0.7, top_p=0.8)),
}
# Laws of a drafter that is the target, and those worked out by hand, say no more on a wide tree than on these.
NARROW = ("chain", "three siblings", "delayed", "sequoia")
CASES = [(policy, laws) for policy in POLICIES for laws in LAWS if policy in NARROW or laws not in ("equal", "by hand")]
CASES += [(policy, laws) for policy in LARGE for laws in ("disjoint", "warped")]
CASES.append(("long delayed", "zeros"))
# Hundreds of trees under laws without structure: a second or more each.
DENSE = ("binary, distinct", "dyspec", "dyspec, threshold", "parallel chains", "uneven", "long delayed")
QUICK = [
    f"{policy}-{laws}" for policy, laws in CASES if laws not in ("random", "equal", "zeros" if policy in DENSE else "")
]


@functools.cache
def trees_of(policy: str, laws: str) -> list[tuple[Tree, float, Float[Tensor, "rows vocab"]]]:
    """Every tree, its probability and its scores."""
    target, drafter, sampling = LAWS[laws]
    trees = drawn_trees((POLICIES | LARGE)[policy], drafter, CONTEXT, sampling)
    return [(tree, probability, scored(tree, target, CONTEXT, sampling)) for tree, probability in trees]


@pytest.fixture(autouse=True, scope="module")
def programmes_are_solved_once() -> Iterator[None]:
    with solved_once():
        yield


def law_over(verifier: Verifier, trees: Iterable[tuple[Tree, float, Float[Tensor, "rows vocab"]]]) -> dict[Text, float]:
    """The law of what one step emits, over trees with their probabilities and scores."""
    law: dict[Text, float] = defaultdict(float)
    for tree, probability, scores in trees:
        for (path, token), chance in verdicts(verifier, tree, scores).items():
            law[(*tree.tokens[list(path[1:])].tolist(), token)] += probability * chance
    return law


def distance_from(law: dict[Text, float], target: Callable[[Text], np.ndarray], length: int) -> float:
    """How far a law of texts, continued to a length by the target, is from the target's own."""
    return distance(continued(law, target, length), continued({(): 1.0}, target, length))


def emitted(verifier: Verifier, policy: str, laws: str) -> tuple[dict[Text, float], float]:
    """The law of what one step emits, and the largest error of the expected block efficiency on any tree."""
    law: dict[Text, float] = defaultdict(float)
    error = 0.0
    with unchecked():
        for tree, probability, scores in trees_of(policy, laws):
            expected = 0.0
            for (path, token), chance in verdicts(verifier, tree, scores).items():
                law[(*tree.tokens[list(path[1:])].tolist(), token)] += probability * chance
                expected += chance * len(path)
            error = max(error, abs(expected - block_efficiency(tree, scores.softmax(-1), verifier)))
    return law, error


def target_of(laws: str) -> Callable[[Text], np.ndarray]:
    """The processed law of the target behind a text that follows the context."""
    target, _, sampling = LAWS[laws]
    processed = warped(target, sampling)
    return lambda text: processed((*CONTEXT, *text))


def targets_draws(policy: str, laws: str) -> int:
    """How many combinations of draws `match` makes over all trees: one a row."""
    return sum(int((scores.softmax(-1) > 0).sum(-1).prod()) for _, _, scores in trees_of(policy, laws))


def error_of(verifier: Verifier, policy: str, laws: str) -> float:
    """The largest error in the law of the next depth + 1 tokens. Nothing outside the target's support is emitted."""
    got, error = emitted(verifier, policy, laws)
    assert error < 1e-12
    length = (POLICIES | LARGE)[policy].max_depth + 1
    target = target_of(laws)
    law, expected = continued(got, target, length), continued({(): 1.0}, target, length)
    assert law.keys() <= expected.keys()
    return distance(law, expected)


def pairs_of(policy: str, laws: str) -> list[Verifier]:
    """The verifiers of random targets that are exact for the policy; `match` where its draws can be counted out."""
    children = (POLICIES | LARGE)[policy].children
    return [
        verifier
        for verifier in LOSSLESS
        if exact_for(verifier, children) and (verifier is not match or targets_draws(policy, laws) < 10_000)
    ]


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize(("policy", "laws"), CASES)
def test_the_emitted_law_is_the_targets(policy: str, laws: str) -> None:
    """And the expected block efficiency of every tree is what its verdicts come to."""
    assert sum(probability for _, probability, _ in trees_of(policy, laws)) == pytest.approx(1, abs=1e-12)
    for verifier in pairs_of(policy, laws):
        assert error_of(verifier, policy, laws) < 1e-12, verifier.__name__


@pytest.mark.quick("parallel chains", "rheo")
@pytest.mark.parametrize("policy", ["parallel chains", "binary, distinct", "rheo"])
def test_at_temperature_0_every_tree_gives_the_argmax(policy: str) -> None:
    """Drawn at temperature 0 from the drafter's own law."""
    target, drafter, greedily = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB), Sampling()
    plain: Text = CONTEXT
    for _ in range(4):
        plain = (*plain, int(target(plain).argmax()))
    for tree, _ in drawn_trees(POLICIES[policy], drafter, CONTEXT, greedily):
        scores = scored(tree, target, CONTEXT, greedily)
        (((path, token), chance),) = verdicts(greedy, tree, scores).items()
        assert (*tree.tokens[list(path)].tolist(), token) == plain[: len(path) + 1] and chance == 1
        assert block_efficiency(tree, scores.softmax(-1), greedy) == len(path)


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [
        (Sampled.delayed(1, 2, 1), multi_round),
        (DySpec(nodes=2, max_depth=2), without_replacement),
        (Rheo(nodes=2, threshold=0.0, max_depth=2), rheo),
        (Sampled.chain(2), block),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_the_loop_emits_the_processed_targets_law(policy: TreePolicy, verifier: Verifier) -> None:
    """Two tokens through `Decoder.steps`, which may take two steps: temperature and top-p on both sides."""
    target, drafter, sampling = LAWS["warped"]
    decoder = Decoder(TableTarget(target, VOCAB), TableDrafter(drafter), policy, verifier)

    with unchecked():
        got = emitted_law(decoder, sampling, CONTEXT, 2)
    assert distance(got, continued({(): 1.0}, target_of("warped"), 2)) < 1e-12


# ---- one node at a time: more tokens, more children


BRANCHING: dict[str, tuple[Branching, bool]] = {  # and whether it is exact for independent draws
    verifier.__name__: (branching_of(verifier), IID in verifier.valid_for)
    for verifier in LOSSLESS
    if branching_of(verifier) is not None
}
SHAPES = st.sampled_from([(2, 1), (2, 3), (4, 2), (3, 3), (6, 2)])


def random_law(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """A law with a few zeros, or a coarse one, where ties and equal probabilities abound."""
    if rng.random() < 0.5:
        return np.bincount(rng.integers(vocab, size=4), minlength=vocab) / 4
    probs = rng.dirichlet(np.full(vocab, 0.7)) * (rng.random(vocab) < 0.8)
    return probs / probs.sum() if probs.sum() > 0 else np.eye(vocab)[0]


def children_of(draft: np.ndarray, k: int, replacement: bool) -> Iterator[tuple[Text, float]]:
    """Every list of children that can be drawn, with its probability; shorter where nothing is left to draw from."""
    if not k or not draft.sum() > 0:
        yield (), 1.0
        return
    for token in draft.nonzero()[0].tolist():
        left = draft if replacement else draft * (np.arange(len(draft)) != token)
        for rest, probability in children_of(left, k - 1, replacement):
            yield (token, *rest), probability * draft[token] / draft.sum()


def assert_the_mean_is_the_target(name: str, target: np.ndarray, draft: np.ndarray, k: int) -> None:
    """Over every list of `k` children a branching emits a law, and their mean is the target."""
    branching, replacement = BRANCHING[name]
    mean = np.zeros(len(target))
    with unchecked():
        for children, probability in children_of(draft, k, replacement):
            emitted = branching(target, draft, np.array(children))
            assert (emitted >= 0).all() and emitted.sum() == pytest.approx(1, abs=1e-12)
            mean += probability * emitted
    assert mean == pytest.approx(target, abs=1e-12)


@pytest.mark.parametrize("name", BRANCHING)
@settings(max_examples=25)
@given(st.integers(0, 10_000), SHAPES)
def test_a_branching_law_has_the_target_as_its_mean(name: str, seed: int, shape: tuple[int, int]) -> None:
    vocab, k = shape
    rng = np.random.default_rng(seed)
    assert_the_mean_is_the_target(name, random_law(rng, vocab), random_law(rng, vocab), k)


@pytest.mark.parametrize("name", BRANCHING)
@given(st.integers(0, 10_000))
@settings(max_examples=15)
def test_tokens_that_are_hardly_ever_drawn_are_judged_exactly_too(name: str, seed: int) -> None:
    """Probabilities down to 1e-30, every list of children, equal ones too: no 0/0, and the target is the mean."""
    rng = np.random.default_rng(seed)
    target, draft = (10.0 ** -rng.uniform(0, 30, 4) for _ in range(2))
    with np.errstate(divide="raise", invalid="raise"):
        assert_the_mean_is_the_target(name, target / target.sum(), draft / draft.sum(), 3)


@given(st.integers(0, 10_000))
def test_the_winner_of_a_duel_is_known_to_the_last_digits(seed: int) -> None:
    """Also of a token whose two draws meet once in 1e30 duels: relatively, over every pair of draws."""
    rng = np.random.default_rng(seed)
    target, first, second = (law / law.sum() for law in (10.0 ** -rng.uniform(0, 30, 7) for _ in range(3)))
    duel, winner = importance_weighted.Duel(target, first, second), np.zeros(7)
    for one, other in itertools.product(range(7), repeat=2):
        chance = duel.chance(one, other) if one != other else 1.0
        winner[one] += first[one] * second[other] * chance
        winner[other] += first[one] * second[other] * (1 - chance)
    assert duel.winner == pytest.approx(winner, rel=1e-12, abs=0)


def acceptance(name: str, target: np.ndarray, draft: np.ndarray, k: int) -> float:
    """The probability that the emitted token is one of the children."""
    branching, replacement = BRANCHING[name]
    with unchecked():
        return sum(
            probability * branching(target, draft, np.array(children))[list(set(children))].sum()
            for children, probability in children_of(draft, k, replacement)
        )


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_khisti_is_optimal_for_two_children_and_nobody_is_better(seed: int, vocab: int) -> None:
    """Optimal transport: min over sets S of p(S) + P(a child outside S) (arXiv:2410.18234, Thm 3)."""
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, vocab), random_law(rng, vocab)
    sets = [list(chosen) for size in range(vocab + 1) for chosen in itertools.combinations(range(vocab), size)]
    optimum = min(target[chosen].sum() + 1 - draft[chosen].sum() ** 2 for chosen in sets)
    assert acceptance("khisti", target, draft, 2) == pytest.approx(optimum, abs=1e-7)
    for name in ("naive", "k_seq", "multi_round"):
        assert acceptance(name, target, draft, 2) <= optimum + 1e-12


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(0, 1))
def test_rheo_takes_all_of_the_best_token_and_all_that_a_draw_can_give(seed: int, vocab: int, others: int) -> None:
    """p(best) + sum min(p, q without the best), whether or not more tokens stand beside them; and it emits p."""
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, vocab), random_law(rng, vocab)
    best = int(draft.argmax())
    rest = without(draft, best)
    taken, mean = 0.0, np.zeros(vocab)
    for token in rest.nonzero()[0]:
        beside = [other for other in np.argsort(-draft) if other not in (best, token)][:others]
        emitted = rheo.branching(target, draft, np.array([best, token, *beside]))
        taken += rest[token] * emitted[[best, token]].sum()
        mean += rest[token] * emitted
    if rest.any():
        assert mean == pytest.approx(target, abs=1e-12)
        assert taken == pytest.approx(target[best] + np.minimum(target, rest).sum(), abs=1e-12)


@pytest.mark.parametrize("failure", ["gives up", "raises nothing useful"])
def test_a_failing_solver_costs_acceptance_and_nothing_else(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published, a failed programme selects a child whose law is not the one it is then judged by."""
    rng = np.random.default_rng(3)
    wild = None if failure == "gives up" else rng.random((5, 5))
    target, draft = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    best = acceptance("khisti", target, draft, 3)
    monkeypatch.setattr(importance_weighted, "_best_weights", lambda *_: wild)
    mean = np.zeros(5)
    for children, probability in children_of(draft, 3, replacement=True):
        mean += probability * tournament(target, draft, np.array(children))
    assert mean == pytest.approx(target, abs=1e-12)
    assert acceptance("khisti", target, draft, 3) < best


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_the_threshold_of_k_seq_is_on_the_valid_side(seed: int, k: int) -> None:
    """What the children take together is at most p; with a threshold a thousandth lower it would not be."""
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, 4), random_law(rng, 4)
    rho = threshold(target, draft, k)
    assert 1 <= rho <= k

    def excess(rho: float) -> float:
        beta = np.minimum(target / rho, draft).sum()
        return 1 - (1 - beta) ** k - rho * beta

    assert excess(rho) <= 1e-15
    assert rho == 1 or excess(rho - 1e-3) > -1e-12 or np.minimum(target, draft).sum() == 0


# ---- bottom-up


def chain_of(drafter: Laws, tokens: Text) -> Tree:
    """The chain that a drafter would have drawn if these tokens came out."""
    rows = len(tokens) + 1
    laws = np.stack([drafter((*CONTEXT, *tokens[:depth])) for depth in range(rows - 1)])
    return Tree(
        np.array([*CONTEXT, *tokens]),
        np.arange(-1, rows - 1),
        np.zeros(rows),
        np.arange(rows),
        torch.from_numpy(laws).log(),
    )


@pytest.mark.parametrize("laws", LAWS)
def test_on_a_chain_traversal_and_multipath_block_are_block_verification(laws: str) -> None:
    """Same verdicts with the same probabilities, by different computations (arXiv:2505.12398, section 3)."""
    better = 0.0
    for tree, probability, scores in trees_of("chain", laws):
        one = verdicts(block, tree, scores)
        for other in (verdicts(traversal, tree, scores), verdicts(multipath_block, tree, scores)):
            assert max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) < 1e-12
        probs = scores.softmax(-1)
        better += probability * (block_efficiency(tree, probs, block) - block_efficiency(tree, probs, naive))
    assert better > -1e-12  # token by token is never better on average
    if laws in ("random", "by hand"):
        assert better > 1e-3


def test_the_examples_of_the_docstrings() -> None:
    target, drafter = written_laws({(): (0.3, 0.4, 0.3)}), written_laws({(): (0.6, 0.3, 0.1)})
    tree = chain_of(drafter, (0, 1))
    attempts = list(traversal.attempts(tree, scored(tree, target, CONTEXT, T1)))
    assert [attempt.row for attempt in attempts] == [2, 1, 0]
    assert [attempt.probability for attempt in attempts] == pytest.approx([2 / 3, 0.05 / 0.55, 1])
    assert attempts[1].token_probs == pytest.approx([0, 0, 1]) and attempts[2].token_probs == pytest.approx(
        [0, 1 / 3, 2 / 3]
    )
    fair, biased = written_laws({(): (1 / 3, 2 / 3)}), written_laws({(): (2 / 3, 1 / 3)})
    tree = chain_of(biased, (0, 1))
    assert next(iter(block.attempts(tree, scored(tree, fair, CONTEXT, T1)))).probability == pytest.approx(1)
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
    ab, ac = np.array([0, 1]), np.array([0, 2])
    assert naive.branching(p, q, ab) == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert multi_round.branching(p, q, ab) == pytest.approx([1 / 3, 2 / 3, 0])
    assert without_replacement.branching(p, q, ab) == pytest.approx([1 / 3, 4 / 9, 2 / 9])
    assert rheo.branching(p, q, ac) == pytest.approx([0, 0, 1])
    assert rheo.branching(p, q, ab) == pytest.approx([4 / 15, 2 / 3, 1 / 15])
    assert threshold(p, q, 2) == pytest.approx(1.463, abs=5e-4)
    assert acceptance("khisti", p, q, 2) == pytest.approx(0.84)


@pytest.mark.parametrize(("verifier", "accepted"), [(block, 11 / 9), (naive, 10 / 9), (multi_round, 10 / 9)])
def test_the_example_of_the_paper_of_block_verification(verifier: Verifier, accepted: float) -> None:
    """Two tokens from q = (2/3, 1/3) for p = (1/3, 2/3): 11/9 are kept, token by token 10/9 (arXiv:2403.10444)."""
    target, drafter = written_laws({(): (1 / 3, 2 / 3)}), written_laws({(): (2 / 3, 1 / 3)})
    kept = 0.0
    for path in itertools.product((0, 1), repeat=2):
        tree = chain_of(drafter, path)
        chance = np.prod([(2 / 3, 1 / 3)[token] for token in path])
        kept += chance * (block_efficiency(tree, scored(tree, target, CONTEXT, T1).softmax(-1), verifier) - 1)
    assert kept == pytest.approx(accepted)


def test_which_of_several_paths_is_chosen_is_in_its_law() -> None:
    """The docstring's example; with a third path b is so likely that only 6 of 7 times it is accepted."""
    target, drafter = written_laws({(): (1 / 4, 3 / 4)}), written_laws({(): (1 / 2, 1 / 2)})
    for paths, accepted, left in ((2, (1, 1), (1 / 4, 3 / 4)), (3, (1, 6 / 7), (1, 0))):
        for tree, _ in drawn_trees(Sampled.chains(paths, 1), drafter, CONTEXT, T1):
            first, last = multipath_block.attempts(tree, scored(tree, target, CONTEXT, T1))
            token = int(tree.tokens[first.row])
            assert token == max(tree.tokens[1:]), "b has the greater ratio"
            assert first.probability == pytest.approx(accepted[token])
            assert last.token_probs == pytest.approx(left)


@pytest.mark.parametrize("policy", ["parallel chains", "delayed"])
def test_all_of_a_path_is_accepted_where_the_drafter_is_the_target(policy: str) -> None:
    """All ratios are 1 then, however p and q were rounded, and the first path that was drawn comes from q itself."""
    target, _, _ = LAWS["equal"]
    noise = torch.tensor([1 - 2**-50, 1, 1 - 2**-49], dtype=torch.float64)
    for tree, _, _ in trees_of(policy, "equal"):
        rounded = scored(tree, target, CONTEXT, T1).softmax(-1) * noise
        assert block_efficiency(tree, rounded, multipath_block) == pytest.approx(POLICIES[policy].max_depth + 1)


def test_many_paths_are_exact_where_powers_of_distributions_cancel() -> None:
    """Differences of 40th powers: also what the drafter hardly ever says has its probability to the last digits."""
    draft, ratio = np.random.default_rng(5).dirichlet(np.full(6, 0.05)), np.array([3, 1, 2, 2, 3, 0], np.float32) / 3
    drawn = np.eye(41)[40]
    q = [Fraction(float(probability)) for probability in draft]
    less, most = (
        [sum((p for p, r in zip(q, ratio, strict=True) if before(r, own)), Fraction(0)) for own in ratio]
        for before in (operator.lt, operator.le)
    )
    expected = [p * (c**40 - a**40) / (c - a) for p, a, c in zip(q, less, most, strict=True)]
    law, carrying = chosen_from(draft, ratio, drawn, 2)
    assert law == pytest.approx([float(chance / sum(expected)) for chance in expected], rel=1e-12)
    # How many of the 40 are token 2: by the paths' generating function, differentiated: P(carrying = 1).
    once = sum(less[2] ** i * (most[2] - q[2]) ** (39 - i) for i in range(40)) * q[2] / expected[2]
    assert carrying[1] == pytest.approx(float(once), rel=1e-12) and carrying.sum() == pytest.approx(1)


@pytest.mark.parametrize("policy", ["parallel chains", "delayed", "binary"])
def test_a_path_may_end_at_a_token_that_ends_the_text(policy: str) -> None:
    """The loop cuts a tree below such tokens: what is cut depends on what was drawn, the emitted law does not."""
    laws = "disjoint" if policy == "binary" else "random"
    cut = []
    for tree, probability, _ in trees_of(policy, laws):
        shorter = tree.ending_at({1})
        cut.append((shorter, probability, scored(shorter, LAWS[laws][0], CONTEXT, T1)))
    assert any(len(shorter) < len(tree) for (shorter, *_), (tree, *_) in zip(cut, trees_of(policy, laws), strict=True))
    with unchecked():
        law = law_over(multipath_block, cut)
    assert distance_from(law, target_of(laws), (POLICIES | LARGE)[policy].max_depth + 1) < 1e-12


def test_equal_ratios_have_to_be_ordered_as_they_are_chosen() -> None:
    """The first drawn is chosen, but the law takes them by their tokens: as the paper's authors' code does it."""

    def first_of_equals(tree: Tree, target: np.ndarray, draft: np.ndarray, random: Random) -> tuple[list[int], int]:
        p, q = target[0], draft[0]
        ratio = np.minimum(1, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
        order = ratio.argsort(kind="stable")
        upto = np.append(0.0, q[order].cumsum()) ** (len(tree) - 1)
        law = np.diff(upto)[order.argsort()]
        row = max(range(1, len(tree)), key=lambda row: (ratio[tree.tokens[row]], -row))
        if random.accept(min(1, p[tree.tokens[row]] / law[tree.tokens[row]])):
            return [0, row], random.choose(target[row])
        return [0], random.choose(np.maximum(p - law, 0))

    laws = {"by hand": (PLAIN_LAWS["by hand"][0], PLAIN_LAWS["by hand"][1])}
    assert prove(first_of_equals, IID(1), depth=1, laws=laws)
    case = prove(first_of_equals, IID(2), depth=1, laws=laws).counterexample
    assert case is not None and case.error > 0.01


NO_CHAINS = [Sampled.chains(2, 2), Sampled.kary(2, 2, False), DySpec(3), Sampled.delayed(1, 2, 1)]
UNEVEN = [POLICIES["uneven"], sequoia_tree(AcceptanceRates((0.6, 0.3)), 3, 3, IID)]


@pytest.mark.parametrize(
    ("verifier", "policy", "why"),
    [
        *((block, policy, "block judges chains, one child a node") for policy in NO_CHAINS),
        *((multipath_block, policy, "multipath_block judges trees .* by depth; got IID") for policy in UNEVEN),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_shapes_that_a_verifier_does_not_judge_are_refused(verifier: Verifier, policy: TreePolicy, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        check(verifier, policy.children)


def test_block_verification_takes_every_chain_and_no_tree_with_branches() -> None:
    for policy in (Sampled.chain(3), Sampled.delayed(2, 1, 1), Sampled((1, 1), False)):
        check(block, policy.children)
    tree, _, scores = trees_of("binary, distinct", "by hand")[0]
    with pytest.raises(ValueError, match="block verification is for chains"):
        block(tree, scores, Random())


def test_typical_acceptance_is_refused_unless_asked_for_and_is_lossy() -> None:
    target, drafter, sampling = LAWS["by hand"]
    with pytest.raises(TypeError, match="typical does not keep the target's distribution; say lossy=True"):
        Decoder(TableTarget(target, VOCAB), TableDrafter(drafter), Sampled.chain(1), typical)
    decoder = Decoder(TableTarget(target, VOCAB), TableDrafter(drafter), Sampled.chain(1), typical, lossy=True)
    law = law_of(lambda random: next(decoder.steps([0], 2, sampling, random)).tokens[0])
    assert law == pytest.approx({0: 0.6, 1: 0.3, 2: 0.1})  # the drafter's: all three tokens are plausible


def test_typical_acceptance_keeps_the_longest_plausible_path() -> None:
    """Below a certain token nothing else is plausible; a flat law lets everything through."""
    target = written_laws({(0,): (0.05, 0.95, 0), (0, 1): (0.98, 0.02, 0), (): (0.3, 0.3, 0.4)})
    tree = Tree(np.array([0, 0, 1, 1, 0]), np.array([-1, 0, 0, 2, 2]), np.zeros(5), np.full(5, -1))
    assert {path for path, _ in verdicts(typical, tree, scored(tree, target, CONTEXT, T1))} == {(0, 2, 4)}
    assert block_efficiency(tree, scored(tree, target, CONTEXT, T1).softmax(-1), typical) == 3


def test_an_attempt_emits_a_token_of_its_own_list() -> None:
    """The first attempt fails with certainty; the second one's law is over tokens 2 and 4, or over the vocabulary."""
    tree, surely = Tree(np.array([0, 1]), np.array([-1, 0]), np.zeros(2), np.array([0, -1])), np.array([0.0, 1.0])
    for tokens, token in ((np.array([2, 4]), 4), (None, 1)):
        attempts = [Attempt(1, 0.0, surely[::-1], tokens), Attempt(0, 1.0, surely, tokens)]
        verdict = walk_up(tree, torch.zeros(2, 5), Random(), lambda *_, attempts=attempts: attempts)
        assert (verdict.path, verdict.token) == ([0], token)


def test_a_verifier_of_sampled_children_needs_their_laws() -> None:
    tree = Tree(np.array([0, 1]), np.array([-1, 0]), np.zeros(2), np.array([0, -1]))
    for verifier in (naive, traversal):
        with pytest.raises(ValueError, match="does not hold the distributions"):
            verifier(tree, torch.zeros(2, VOCAB), Random())
        with pytest.raises(ValueError, match="does not hold the distributions"):
            block_efficiency(tree, torch.ones(2, VOCAB) / VOCAB, verifier)
    assert block_efficiency(tree, torch.ones(2, VOCAB) / VOCAB, match) == pytest.approx(1 + 1 / 3)


# ---- drafters of another vocabulary or precision


@pytest.mark.parametrize(
    "verifier", [naive, k_seq, multi_round, khisti, traversal, multipath_block], ids=lambda v: v.__name__
)
def test_a_drafter_may_lack_tokens(verifier: Verifier) -> None:
    target, drafter = hashed_laws(1, VOCAB), hashed_laws(8, 2)
    trees = drawn_trees(Sampled.chains(2, 1), drafter, CONTEXT, T1)
    assert all(tree.draft_log_probs.shape[1] == 2 for tree, _ in trees)
    law = law_over(verifier, [(*one, scored(one[0], target, CONTEXT, T1)) for one in trees])
    assert distance_from(law, lambda text: target((*CONTEXT, *text)), 2) < 1e-12


@pytest.mark.parametrize("name", BRANCHING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_laws_are_reproduced_exactly(name: str, dtype: torch.dtype) -> None:
    """Their residuals are taken in float64: no law is renormalised in the precision it came in."""
    rows = (torch.randn(2, 5, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    tree = Tree(np.array([0]), np.array([-1]), np.zeros(1), np.zeros(1, dtype=np.int64))
    target = probs_of(T1.process(rows[:1], tree, [0]))[0].numpy()
    assert target == pytest.approx(rows[0].double().softmax(-1).numpy(), abs=1e-12)
    draft = probs_of(proposal(rows[1:].float().log_softmax(-1), T1))[0].numpy()
    assert_the_mean_is_the_target(name, target, draft, 2)


# ---- trees of sampled children


def test_the_tree_keeps_the_law_that_every_child_was_drawn_from() -> None:
    """As it was warped, at every node that was expanded, in the drafter's order."""
    drafter, sampling = hashed_laws(2, VOCAB), Sampling(0.7, top_p=0.8)
    expected = warped(drafter, sampling)
    for policy in (Sampled((2, 1, 1)), Sampled.kary(2, 2, False), DySpec(5, max_depth=3), Rheo(5, 0.0, 3)):
        tree = draft(TableDrafter(drafter), policy, list(CONTEXT), 3, sampling, Random(4))
        assert tree.draft_log_probs is not None and len(tree.draft_log_probs) > 1
        for parent in set(tree.parents[1:].tolist()):
            branch = tree.tokens[tree.path_to(parent)].tolist()
            got = probs_of(tree.draft_log_probs[tree.draft_rows[parent]])
            assert got.numpy() == pytest.approx(expected(tuple(branch)), abs=1e-12)
    plain = draft(TableDrafter(drafter), OptTree(4, 0.0, 3), list(CONTEXT), 3, sampling, Random(4))
    assert plain.draft_log_probs is None


MODEL_TREES = [Sampled.chains(3, 3), Sampled.kary(2, 3, replacement=False), DySpec(8), Rheo(8, threshold=0.2)]


@pytest.mark.parametrize("policy", MODEL_TREES, ids=str)
def test_with_models_the_laws_are_those_of_the_drafters_own_text(policy: TreePolicy) -> None:
    """Equal siblings share a row of its cache; every law is that of a plain forward over the branch."""
    context, model = prompt(7), tiny_drafter("llama")
    drafter = CausalLMDrafter(CausalLM(model))
    begin(drafter, context, None)
    tree = draft(drafter, policy, context, 3, Sampling(0.3), Random(1))
    assert tree.draft_log_probs is not None and tree.depths.max() == 3
    for parent in set(tree.parents[1:].tolist()):
        branch = tree.tokens[tree.path_to(parent)[1:]].tolist()
        expected = (causal_logits(model, [*context, *branch])[-1] / 0.3).softmax(-1)
        assert torch.allclose(probs_of(tree.draft_log_probs[tree.draft_rows[parent]]), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("policy", "widths"),
    [
        (Sampled.chain(3), [1, 1, 1]),
        (Sampled.chains(3, 2), [3, 3]),
        (Sampled.kary(2, 3), [2, 4, 8]),
        (Sampled.kary(2, 2, replacement=False), [2, 4]),
        (Sampled.delayed(trunk=2, branches=3, length=2), [1, 1, 3, 3]),
        (Sampled.delayed(trunk=0, branches=2, length=1), [2]),
        (Sampled.delayed(trunk=2, branches=3, length=0), [1, 1]),
    ],
    ids=str,
)
def test_shapes(policy: Sampled, widths: list[int]) -> None:
    tree = draft(TableDrafter(hashed_laws(2, 9)), policy, list(CONTEXT), 9, T1, Random())
    assert np.bincount(tree.depths).tolist() == [1, *widths]
    assert policy.nodes == tree.nodes == sum(widths) and policy.max_depth == len(widths)


class ByLaw(Random, Draws):
    """Its draws are a function of the law they are made from: every run draws the same below a path."""

    def __init__(self) -> None:
        Random.__init__(self)
        self.beside[Draws] = self

    def distinct(self, probs: Float[Tensor, "rows vocab"], k: int, among: Among | None = None) -> Int[Tensor, "rows k"]:
        orders = []
        for row in probs.numpy():
            noise = np.random.default_rng(zlib.crc32(row.round(6).tobytes())).exponential(size=len(row))
            orders.append(np.argsort(noise / row)[:k])
        return torch.from_numpy(np.stack(orders))


def popped(drafter: Laws, nodes: int, depth: int) -> set[Text]:
    """The paper's heap: pop the slot of the highest value, draw its token, push its child's slot and its sibling's."""
    heap: list[tuple[float, int, Text, Text]] = [(-1.0, 0, (), ())]
    chosen: set[Text] = set()
    for count in range(1, nodes + 1):
        if not heap:
            break
        value, _, above, before = heapq.heappop(heap)
        probs = probs_of(torch.from_numpy(drafter((*CONTEXT, *above))).log())
        token = int(ByLaw().distinct(probs[None], len(before) + 1)[0, -1])
        chosen.add((*above, token))
        left = 1 - float(probs[list(before)].sum())
        share = float(probs[token]) / left
        if len(above) + 1 < depth:
            heapq.heappush(heap, (value * share, 2 * count, (*above, token), ()))
        if len(before) + 1 < len(probs):
            heapq.heappush(heap, (value * (1 - share), 2 * count + 1, above, (*before, token)))
    return chosen


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4))
def test_dyspec_drafts_what_the_papers_heap_pops(seed: int, nodes: int, depth: int) -> None:
    drafter = hashed_laws(seed, 4)
    with unchecked():
        tree = draft(TableDrafter(drafter), DySpec(nodes, max_depth=depth), list(CONTEXT), depth, T1, ByLaw())
        expected = popped(drafter, nodes, depth)
    assert {tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(1, len(tree))} == expected


def test_dyspecs_threshold_leaves_the_worst_slots_empty() -> None:
    drafter = hashed_laws(3, 6)
    whole, part = (
        draft(TableDrafter(drafter), DySpec(30, least, 4), list(CONTEXT), 4, T1, ByLaw()) for least in (0.0, 0.2)
    )
    assert 1 < part.nodes < whole.nodes

    def slots(tree: Tree) -> list[float]:
        """The value of every node's slot: its parent's path probability times what the siblings before it left."""
        values = []
        for row in range(1, len(tree)):
            elder = (tree.parents == tree.parents[row]).nonzero()[0]
            above = np.exp(tree.path_log_probs[tree.parents[row]])
            values.append(float(above - np.exp(tree.path_log_probs[elder[elder < row]]).sum()))
        return values

    assert min(slots(part)) > 0.2
    assert sum(value > 0.2 for value in slots(whole)) == part.nodes


def test_a_sampled_node_is_never_dropped_for_what_it_is() -> None:
    """Ranked by what was known before: the unlikely first child stays, the likely second one goes."""
    pool = WithoutReplacement(total=2).pool(0, T1, ByLaw())
    pool.add(LogProbs(torch.tensor([[0.05, 0.05, 0.9]], dtype=torch.float64).log()))
    first, second = pool.tokens[1:3].tolist()
    assert pool.best(1).tolist() == [0, 1]
    assert np.exp(pool.reach[1:3]) == pytest.approx([1, 1 - [0.05, 0.05, 0.9][first]])
    assert np.exp(pool.path_log_probs[2]) == pytest.approx([0.05, 0.05, 0.9][second])
    with pytest.raises(ValueError, match="candidate 2 was selected without a sibling drawn before it"):
        pool.tree(np.array([0, 2]))


def test_rheos_draw_is_ranked_whatever_comes_out() -> None:
    """Best first, then the draw at min(q_best, 1 - q_best), then the others by their own probability."""
    for probs in ([0.1, 0.5, 0.25, 0.15], [0.05, 0.8, 0.1, 0.05], [0.3, 0.4, 0.3, 0.0]):
        best = max(probs)
        for token in (0, 2, 3):
            if not probs[token]:
                continue
            pool = BestAndDraw(4).pool(0, T1, Random())
            draws_of(pool._random).iid = lambda rest, k, token=token: torch.full((len(rest), k), token)  # type: ignore[method-assign]
            pool.add(LogProbs(torch.tensor([probs], dtype=torch.float64).log()))
            others = sorted((p for t, p in enumerate(probs) if t not in (1, token) and p), reverse=True)
            assert pool.tokens[1:3].tolist() == [1, token]
            assert np.exp(pool.reach[1:]) == pytest.approx([best, min(best, 1 - best), *others])
            assert np.exp(pool.path_log_probs[2]) == pytest.approx(probs[token])


@pytest.mark.parametrize(("threshold", "layers"), [(1.4, 1), (1.1, 2)])
def test_rheo_stops_when_a_layer_does_not_pay(threshold: float, layers: int) -> None:
    """Root law (.5, .3, .2): the first group's ranks sum to .5 + .5 and .3 or .2, whichever was not drawn."""
    drafter = TableDrafter(lambda path: np.array([0.5, 0.3, 0.2]))
    tree = draft(drafter, Rheo(3, threshold, 2), [0], 2, Sampling(1.0), Random())
    assert 1 + len(drafter.expanded) == layers and tree.nodes == 3


def test_a_law_of_one_token_has_one_distinct_child() -> None:
    certain = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64).log()
    for children in (WithoutReplacement(3), WithoutReplacement(total=3), BestAndDraw(3)):
        pool = children.pool(0, T1, Random())
        pool.add(LogProbs(certain))
        assert pool.tokens.tolist() == [0, 1]
    pool = IID(3).pool(0, T1, Random())
    pool.add(LogProbs(certain))
    assert pool.tokens.tolist() == [0, 1, 1, 1]


def test_equal_siblings_cost_the_drafter_one_row() -> None:
    """Two of three chains begin alike: their next tokens are drawn from one and the same law; all three are kept."""
    drafter = TableDrafter(hashed_laws(2, VOCAB))
    random = Random()
    layers = iter([[[1, 2, 1]], [[0], [2], [0]], [[1], [1], [2]]])
    draws_of(random).iid = lambda probs, k: torch.tensor(next(layers))  # type: ignore[method-assign]
    tree = draft(drafter, Sampled.chains(3, 3), list(CONTEXT), 3, T1, random)
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert drafter.expanded == [[(1,), (2,)], [(1, 0), (2, 2)]]
    assert tree.draft_rows.tolist() == [0, 1, 2, 1, 3, 4, 3, -1, -1, -1]
    assert drafter.tokens == len(tree.draft_log_probs) == 5


def test_equal_siblings_share_the_first_ones_row() -> None:
    """Rows of equal text can differ by rounding; whichever branch went deepest must not decide which one counts."""
    tree = Tree(np.array([0, 1, 1, 2, 0]), np.array([-1, 0, 0, 1, 2]), np.zeros(5), np.full(5, -1))
    rows = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]])  # the two rows of 1 disagree: 0 or 2
    verdict = greedy(tree, rows, Random())
    assert (verdict.path, verdict.token) == ([0, 2, 4], 2)
