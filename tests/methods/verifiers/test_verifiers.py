"""Verifiers, by exact enumeration: the emitted law is the target's, to rounding, for every tree and every draft law.

Here `greedy` and `match`, on whole generations; `test_verifiers_field.py` has the verifiers of sampled children.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from enumeration import (
    LAWS,
    VOCAB,
    EnumeratingRandom,
    InvertingRandom,
    assert_lossless,
    assert_same,
    emitted_law,
    law_of,
    target_law,
    warped,
)
from hypothesis import given
from hypothesis import strategies as st
from table_models import Laws, TableDrafter, TableTarget, hashed_laws

from opt_tree import (
    Decoder,
    OptTree,
    Random,
    Sampling,
    Static,
    Tree,
    TreePolicy,
    Verifier,
    generate_batch,
    greedy,
    match,
)
from opt_tree.methods.children.iid import IID
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.methods.policies.talon import Talon
from opt_tree.methods.policies.threshold_chain import ThresholdChain

# Policy and verifier.
PAIRS: dict[str, tuple[TreePolicy, Verifier]] = {
    "opt": (OptTree(nodes=4, threshold=0.0, max_depth=3), match),
    "opt, early stop": (OptTree(nodes=3, threshold=0.6, max_depth=3), match),
    "chain": (Static.chain(3), match),
    "wide": (Static.kary(3, 1), match),
    "paths": (Static(((0,), (1,), (1, 0), (1, 1))), match),
    "second best only": (Static(((1,), (1, 1))), match),
    "empty": (Static.empty(), match),
    "binary": (Static.kary(2, 2), match),
    "eagle2": (Eagle2(2, 1, 5), match),
    "dynamic depth": (DynamicDepth(2, 2, 5, np.log(0.8), (1, 2)), match),
    "talon": (Talon(0.4, 5, 2), match),
    "sequoia": (sequoia_tree(AcceptanceRates((0.5, 0.3, 0.1)), 5, 3), match),
    "greedy static": (greedy_static_tree(AcceptanceRates((0.3, 0.6)), 5, 2), match),
    "threshold": (ThresholdChain(4, 0.3), match),
}


def decoder_of(target: Laws, drafter: Laws, policy: TreePolicy, verifier: Verifier) -> Decoder:
    return Decoder(TableTarget(target, VOCAB), TableDrafter(drafter), policy, verifier)


# Of six rows and seven, laws with zeros keep the number of branches down.
LARGE = [*PAIRS][[*PAIRS].index("binary") :]
CASES = [(pair, laws) for pair in PAIRS for laws in LAWS if pair not in LARGE or laws in ("zeros", "disjoint")]


@pytest.mark.parametrize(("pair", "laws"), CASES)
def test_the_emitted_law_is_the_targets(pair: str, laws: str) -> None:
    target, drafter = LAWS[laws]
    decoder = decoder_of(target, drafter, *PAIRS[pair])
    assert_lossless(decoder, target, (0,), 3)


SAMPLINGS = [Sampling(0.5), Sampling(1.7), Sampling(1.0, top_p=0.75), Sampling(1.0, top_k=2), Sampling(0.8, 0.9, 2)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("pair", ["opt", "paths", "empty"])
def test_the_emitted_law_is_the_processed_targets(pair: str, sampling: Sampling) -> None:
    target, drafter = LAWS["random"]
    decoder = decoder_of(target, drafter, *PAIRS[pair])
    expected = target_law(warped(target, sampling), (0,), 3)
    assert expected != target_law(target, (0,), 3)
    assert_same(emitted_law(decoder, sampling, (0,), 3), expected)


@pytest.mark.parametrize("policy", [OptTree(4, 0.0, 3), Static.chain(3), Static.kary(2, 2), Static.empty()], ids=str)
def test_one_draw_a_position_gives_the_targets_law_and_the_same_text_for_every_tree(policy: TreePolicy) -> None:
    """All of three numbers on a grid fine enough for laws in sixths: the emitted counts are exact, step after step.

    This is the coupling that `Random` makes: one draw a position, shared by all nodes of a depth and kept for the next
    step where it was not reached. That its race has the law is shown in test_random.py.
    """
    grid = 6
    target = hashed_laws(11, VOCAB, grid)
    decoder = decoder_of(target, hashed_laws(12, VOCAB), policy, match)
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for cells in np.ndindex(grid, grid, grid):
        random = InvertingRandom([(cell + 0.5) / grid for cell in cells])
        text: list[int] = []
        for step in decoder.steps([0], 3, Sampling(1.0), random):
            text += step.tokens
        plain: list[int] = [0]
        for cell in cells:
            plain.append(int((target(tuple(plain)).cumsum() * grid).round().searchsorted(cell, side="right")))
        assert text == plain[1:]
        counts[tuple(text)] += 1
    expected = target_law(target, (0,), 3)
    assert {outcome: count / grid**3 for outcome, count in counts.items()} == pytest.approx(expected, abs=1e-12)


def test_the_enumeration_visits_every_outcome_once() -> None:
    """A die and, after a six only, a coin."""

    def die_and_coin(random: EnumeratingRandom) -> tuple[int, int]:
        face = random.choose([1 / 6] * 6)
        return face, random.choose([0.25, 0.0, 0.75]) if face == 5 else -1

    expected = {(face, -1): 1 / 6 for face in range(5)} | {(5, 0): 1 / 24, (5, 2): 1 / 8}
    assert law_of(die_and_coin) == pytest.approx(expected)


# ---- why the kind of children is checked


def test_a_decoder_asks_the_verifier_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 `greedy` judges, which is exact for any tree."""
    monkeypatch.setattr(match, "valid_for", (IID,))
    with pytest.raises(TypeError, match="match is not exact for children of type TopK; it is for IID"):
        decoder_of(hashed_laws(1, VOCAB), hashed_laws(2, VOCAB), OptTree(), match)


@pytest.mark.parametrize("policy", [OptTree(nodes=4), Static.empty()], ids=["opt", "empty"])
def test_greedy_is_refused_above_temperature_0_wherever_it_comes_from(policy: TreePolicy) -> None:
    """It would emit the argmax, the same text for every seed. At temperature 0 it is the right one."""
    laws = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)
    decoder = decoder_of(*laws, policy, greedy)
    drawn, refusal = Sampling(0.5), "verifier greedy judges at temperature 0 only, got temperature 0.5; match draws"
    for ask in (
        lambda: decoder.generate([0], 4, drawn),
        lambda: next(decoder.steps([0], 4, drawn)),
        lambda: generate_batch(decoder, [[0], [1]], 4, drawn, width=2),
    ):
        with pytest.raises(ValueError, match=refusal):
            ask()
    assert decoder.generate([0], 4).tokens == decoder_of(*laws, OptTree(nodes=4), match).generate([0], 4).tokens


def test_a_policy_that_drafts_needs_a_drafter() -> None:
    target = TableTarget(hashed_laws(1, VOCAB), VOCAB)
    with pytest.raises(TypeError, match="OptTree needs a drafter"):
        Decoder(target, None, OptTree())
    assert next(Decoder(target, None, Static.empty()).steps([0], 1)).accepted == 0


# ---- one verdict at a time


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 12 rows over five tokens, siblings distinct."""
    tokens, parents = [draw(st.integers(0, 4))], [-1]
    for _ in range(draw(st.integers(0, 11))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 4))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Tree(np.array(tokens), np.array(parents), np.zeros(len(tokens)), np.full(len(tokens), -1))


def walk(tree: Tree, choice: list[int]) -> tuple[list[int], int]:
    """From the root to the child that carries the chosen token, as long as there is one."""
    path = [0]
    while True:
        wanted = choice[path[-1]]
        following = [row for row in range(1, len(tree)) if tree.parents[row] == path[-1] and tree.tokens[row] == wanted]
        if not following:
            return path, wanted
        path += following


@given(trees(), st.data(), st.booleans())
def test_greedy_follows_the_argmax(tree: Tree, data: st.DataObject, on_host: bool) -> None:
    """Scores that a softmax in float32 would merge still decide; of equal ones the first token wins."""
    level = st.sampled_from([0.0, 1.0, 1.0 + 1e-12, -np.inf])
    rows = data.draw(st.lists(st.lists(level, min_size=5, max_size=5), min_size=len(tree), max_size=len(tree)))
    choice = [row.index(max(row)) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opt_tree.verify.on_host", lambda scores: on_host)
        verdict = greedy(tree, torch.tensor(rows, dtype=torch.float64), Random())
    assert (verdict.path, verdict.token) == walk(tree, choice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_every_dtype(dtype: torch.dtype) -> None:
    tree = Tree(np.array([0, 2, 1]), np.array([-1, 0, 1]), np.zeros(3), np.full(3, -1))
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 3.0], [5.0, -1.0, 5.0]], dtype=dtype)
    verdict = greedy(tree, scores, Random())
    assert (verdict.path, verdict.token) == ([0, 1, 2], 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_greedy_on_the_host_is_the_argmax_of_half_precision(dtype: torch.dtype) -> None:
    """Read as integers: ties, zeros of both signs, infinities, rows without a positive number."""
    alone = Tree(np.array([0]), np.array([-1]), np.zeros(1), np.full(1, -1))
    numbers = [-np.inf, -3.0, -2.0, -1e-6, -0.0, 0.0, 1e-6, 1.0, 2.0, 3.0, np.inf]
    rng = np.random.default_rng(0)
    for greatest in range(1, len(numbers) + 1):
        for _ in range(20):
            row = torch.tensor(rng.choice(numbers[:greatest], (1, 40)), dtype=dtype)
            assert greedy(alone, row, Random()).token == int(row.double().argmax())


@given(trees(), st.data())
def test_match_follows_its_draws(tree: Tree, data: st.DataObject) -> None:
    draws = data.draw(st.lists(st.integers(0, 4), min_size=len(tree), max_size=len(tree)))
    verdict = match(tree, torch.zeros(len(tree), 5), EnumeratingRandom(draws))
    assert (verdict.path, verdict.token) == walk(tree, draws)
