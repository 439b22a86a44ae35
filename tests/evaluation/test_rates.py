"""Acceptance rates: what is counted, on laws whose rates are known."""

import functools
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from table_models import Laws, TableDrafter, TableTarget

from evaluation.compare.rates import KINDS, Counts, measuring_tree
from opt_tree import Decoder, Generation, Sampling, Stop, TreePolicy, Verifier, match
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.sequoia import sequoia_tree

pytestmark = pytest.mark.slow

CONTEXT = [1, 2]
TARGET, DRAFT = (0.3, 0.1, 0.2, 0.4), (0.7, 0.2, 0.06, 0.04)


def everywhere(probabilities: Sequence[float]) -> Laws:
    """The same law after every path."""
    law = np.array(probabilities)
    return lambda path: law


def generate(policy: TreePolicy, verifier: Verifier, generations: int) -> list[Generation]:
    """Generations of 40 tokens at temperature 1, with the same two laws everywhere."""
    decoder = Decoder(TableTarget(everywhere(TARGET), 4), TableDrafter(everywhere(DRAFT)), policy, verifier)
    return [decoder.generate(CONTEXT, 40, Sampling(1.0), seed=seed) for seed in range(generations)]


@functools.cache
def count(kind: str, width: int, depth: int, generations: int) -> Counts:
    """What a number of generations on the measuring tree counts."""
    siblings, verifier = KINDS[kind]
    counts = Counts(*np.zeros((2, depth, width), dtype=int))
    for generation in generate(measuring_tree(width, depth, siblings), verifier, generations):
        counts.add(generation)
    return counts


def rounds(kind: str) -> tuple[float, float]:
    """The probabilities that the first and the second sibling is the accepted one, summed over what may be drawn."""
    target, draft = np.array(TARGET), np.array(DRAFT)
    first = np.minimum(target, draft).sum()
    excess = np.maximum(target - draft, 0) / (1 - first)
    second = 0.0
    for token in range(4):
        rejected = draft[token] * (1 - min(1, target[token] / draft[token]))
        left = np.where(np.arange(4) == token, 0, draft) / (1 - draft[token])
        later = left if kind == "WithoutReplacement" else draft
        second += rejected * np.minimum(excess, later).sum()
    return float(first), float(second)


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (4, 2), (6, 3), (7, 1)])
def test_measuring_tree_is_the_product_rule(width: int, depth: int) -> None:
    paths = measuring_tree(width, depth).paths
    everything = [path for d in range(1, depth + 1) for path in np.ndindex(*[width] * d)]
    assert sorted(paths) == sorted(path for path in everything if prod(rank + 1 for rank in path) <= width)


def test_rates_of_best_children_are_the_targets_law_by_rank() -> None:
    """Matched draws accept the child of rank r exactly when the target draws that token, at every depth."""
    counts = count("TopK", 4, 2, 40)
    for tried, accepted in zip(counts.tried, counts.accepted, strict=True):
        assert tried.min() > 50
        assert (np.abs(accepted / tried - TARGET) < 4 * np.sqrt(np.array(TARGET) * 0.8 / tried)).all()
    # The root has all four children in every tree; at depth 1 the later ranks are tried below the better parents only.
    assert len(set(counts.tried[0])) == 1 and list(counts.tried[1]) == sorted(counts.tried[1], reverse=True)


@pytest.mark.parametrize("kind", ["WithoutReplacement", "IID"])
def test_rates_of_drawn_children_are_those_of_their_rounds(kind: str) -> None:
    counts = count(kind, 2, 1, 40)
    assert counts.tried.min() > 800
    for rate, expected, tried in zip(counts.rates(1).by_rank, rounds(kind), counts.tried[0], strict=True):
        assert abs(rate - expected) < 4 * np.sqrt(expected * (1 - expected) / tried)


def test_the_two_kinds_of_drawing_differ() -> None:
    """Otherwise the test above could not tell one from the other: four standard errors of 800 trials are .05."""
    assert rounds("WithoutReplacement")[1] > rounds("IID")[1] + 0.08


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_tried_and_accepted_adds_up(kind: str) -> None:
    siblings, verifier = KINDS[kind]
    generations = generate(measuring_tree(5, 3, siblings), verifier, 5)
    counts = count(kind, 5, 3, 5)
    steps = [step for generation in generations for step in generation.steps]
    assert counts.accepted.sum() == sum(step.accepted for step in steps)
    assert (counts.accepted <= counts.tried).all()
    assert counts.tried[0, 0] == sum(step.tree.nodes > 0 for step in steps)


def test_nothing_is_counted_behind_the_end_of_a_generation() -> None:
    laws = everywhere((0.0, 1.0, 0.0, 0.0))
    decoder = Decoder(TableTarget(laws, 4), TableDrafter(laws), measuring_tree(2, 4))
    generation = decoder.generate(CONTEXT, 9, stop=Stop(frozenset({1})))
    counts = Counts(*np.zeros((2, 4, 2), dtype=int))
    counts.add(generation)
    assert len(generation.tokens) == 1 and generation.steps[0].accepted == 1
    # The token of rank 1 has probability 0: it is no child, and so was not tried.
    assert counts.tried.tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert counts.accepted.tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]


def test_rates_end_where_too_little_was_tried() -> None:
    tried, accepted = [[100, 100, 60], [70, 20, 90], [10, 5, 1]], [[50, 20, 6], [35, 5, 9], [5, 1, 0]]
    counts = Counts(np.array(tried), np.array(accepted))
    rates = counts.rates(50)
    assert rates.by_rank == pytest.approx((90 / 180, 26 / 125, 15 / 151))
    assert rates.by_depth == ((0.5, 0.2, 0.1), (0.5,))
    with pytest.raises(ValueError, match="180 times, fewer than 500"):
        counts.rates(500)


def test_trees_of_measured_rates_keep_their_promise() -> None:
    """Where acceptance is positional, as here, a step emits as many tokens as the tree's value says."""
    rates = AcceptanceRates(count("TopK", 4, 2, 40).rates(50).by_rank)
    tree = sequoia_tree(rates, nodes=7, depth=3)
    steps = [step for generation in generate(tree, match, 40) for step in generation.steps]
    whole = [len(step.tokens) for step in steps if step.tree.nodes == 7]  # not cut off by the token budget
    assert np.mean(whole) == pytest.approx(
        1 + rates.expected_accepted(tree.paths), abs=4 * np.std(whole) / len(whole) ** 0.5 + 0.05
    )
    # The target likes the drafter's last rank best: that no tree of seven nodes leaves out the first three ranks.
    assert [(rank,) in tree.paths for rank in range(4)] == [True] * 4
