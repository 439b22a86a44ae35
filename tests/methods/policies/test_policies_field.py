"""The field's deterministic trees: each by its paper's rule written out plainly, the fixed ones against brute force."""

import doctest
import heapq
from collections.abc import Iterator
from functools import cache
from math import log

import numpy as np
import pytest
from asking import draft
from hypothesis import given
from hypothesis import strategies as st
from table_models import Laws, TableDrafter, TableTarget, hashed_laws, written_laws

from opt_tree import Decoder, OptTree, Random, Static, TopK, Tree, TreePolicy
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies import greedy_static as greedy_static_module
from opt_tree.methods.policies import sequoia as sequoia_module
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.methods.policies.jetspec import JetSpecTree
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.methods.policies.talon import Talon
from opt_tree.methods.policies.threshold_chain import ThresholdChain

Branch = tuple[int, ...]
Node = tuple[float, Branch]
CONTEXT = [8, 9]
DEEP = 99

# The laws of the docstrings' drawn trees.
DRAWN = written_laws({(8, 9): (0.6, 0.3, 0.1), (): (0.7, 0.2, 0.1)})

seeds = st.integers(0, 10_000)
cells = st.sampled_from([None, 1, 2, 3, 4])
rates_of = st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple)


def branches(tree: Tree) -> list[Branch]:
    """The tokens below the root on the way to every node."""
    return sorted(tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(1, len(tree)))


def grow(laws: Laws, policy: TreePolicy) -> tuple[list[Branch], TableDrafter]:
    """The branches of one drafted tree, and the drafter that knows what it was asked."""
    drafter = TableDrafter(laws)
    return branches(draft(drafter, policy, CONTEXT, policy.max_depth)), drafter


def proposals(laws: Laws, parents: list[Node], top_k: int) -> list[Node]:
    """The `top_k` most probable children of every parent, with their path probabilities."""
    found = []
    for value, branch in parents:
        law = laws((*CONTEXT, *branch)).tolist()
        best = sorted(range(len(law)), key=lambda token: -law[token])[:top_k]
        found += [(value * law[token], (*branch, token)) for token in best if law[token] > 0]
    return found


def largest(nodes: list[Node], count: int) -> list[Node]:
    return sorted(nodes, key=lambda node: -node[0])[:count]


def beams(laws: Laws, top_k: int, rounds: int) -> tuple[list[list[Node]], list[Node]]:
    """EAGLE-2's expansion as published: the beam of every layer, and everything that was ever proposed."""
    proposed = proposals(laws, [(1.0, ())], top_k)
    found, everything = [proposed], list(proposed)
    for _ in range(rounds):
        proposed = proposals(laws, found[-1], top_k)
        found.append(largest(proposed, top_k))
        everything += proposed
    return found, everything


@given(seeds, st.sampled_from([3, 4, 9]), st.integers(1, 5), st.integers(0, 4), st.integers(1, 20))
def test_eagle2_is_a_beam_and_the_best_of_all_it_saw(seed: int, vocab: int, top_k: int, depth: int, nodes: int) -> None:
    laws = hashed_laws(seed, vocab)
    expected, everything = beams(laws, top_k, depth)
    tree, drafter = grow(laws, Eagle2(top_k, depth, nodes))
    assert tree == sorted(branch for _, branch in largest(everything, nodes))
    assert drafter.forwards == 1 + depth
    assert [sorted(layer) for layer in drafter.expanded] == [
        sorted(branch for _, branch in beam) for beam in expected[:depth]
    ]


@given(seeds, cells, st.integers(1, 3), st.integers(0, 3), st.integers(1, 12))
def test_eagle2_is_a_tree_whatever_is_equal(seed: int, cells: int | None, top_k: int, depth: int, nodes: int) -> None:
    """With ties at the cut, and with probabilities of 1 and 0, what is selected still hangs together."""
    tree, drafter = grow(hashed_laws(seed, 4, cells), Eagle2(top_k, depth, nodes))
    assert len(tree) <= nodes and all(branch[:-1] in tree for branch in tree if len(branch) > 1)
    assert all(len(layer) <= top_k for layer in drafter.expanded)


@given(
    seeds,
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 12),
    st.floats(-3, 0),
    st.sets(st.integers(1, 6)).map(sorted).map(tuple),
)
def test_dynamic_depth_is_eagle2_of_the_depth_at_which_the_beam_becomes_unlikely(
    seed: int, top_k: int, depth: int, nodes: int, threshold: float, checks: tuple[int, ...]
) -> None:
    laws = hashed_laws(seed, 5)
    found, _ = beams(laws, top_k, depth)
    likely = [log(sum(value for value, _ in beam)) for beam in found]
    stops = [layer for layer in checks if layer <= depth and likely[layer - 1] < threshold]
    layers = min([*stops, 1 + depth])
    tree, drafter = grow(laws, DynamicDepth(top_k, depth, nodes, threshold, checks))
    assert drafter.forwards == layers
    assert tree == grow(laws, Eagle2(top_k, layers - 1, nodes))[0]


@given(seeds, st.sampled_from([3, 4, 9]), st.floats(0, 1), st.integers(1, 25), st.integers(1, 5), st.integers(1, 6))
def test_talon_keeps_what_is_not_much_less_likely_than_its_layers_best(seed, vocab, ratio, nodes, top_k, max_depth):
    laws = hashed_laws(seed, vocab)
    layers = [largest(proposals(laws, [(1.0, ())], top_k), nodes)]  # all others: every token of the vocabulary
    while (left := nodes - sum(map(len, layers))) and len(layers) < max_depth:
        proposed = proposals(laws, layers[-1], vocab)
        best = max(value for value, _ in proposed)
        layers.append(largest([node for node in proposed if node[0] >= ratio * best * (1 - 1e-12)], left))
    tree, drafter = grow(laws, Talon(ratio, nodes, top_k, max_depth))
    assert tree == sorted(branch for layer in layers for _, branch in layer)
    assert drafter.forwards == len(layers)


@given(seeds, cells, st.floats(0, 1), st.integers(1, 20), st.integers(1, 3))
def test_talon_spends_its_budget(seed: int, cells: int | None, ratio: float, nodes: int, top_k: int) -> None:
    """Ties and zero probabilities included; every layer keeps at least one node, so there are at most `nodes`."""
    tree, drafter = grow(hashed_laws(seed, 4, cells), Talon(ratio, nodes, top_k))
    assert len(tree) == nodes and drafter.forwards <= nodes


@given(seeds, st.sampled_from([3, 9]), st.floats(0, 1), st.integers(1, 20), st.integers(1, 9), st.integers(1, 4))
def test_jetspecs_tree_is_its_heaps_and_never_above_opt_trees(seed, vocab, cut, nodes, width, max_depth):
    """Algorithm 1 of its paper written out; where laws name few tokens, a node has fewer children than `width`."""

    def laws(path: tuple[int, ...]) -> np.ndarray:
        law = hashed_laws(seed, vocab)(path)
        named = np.where(law < cut * law.max(), 0, law)
        return named / named.sum()

    heap, expected = [(-1.0, 0, ())], []
    while heap and len(expected) < nodes:
        value, _, branch = heapq.heappop(heap)
        if len(branch) < max_depth:
            for child, path in proposals(laws, [(-value, branch)], width)[: nodes - len(expected)]:
                expected.append(path)
                heapq.heappush(heap, (-child, len(expected), path))
    policy = JetSpecTree(nodes, width, max_depth)
    assert grow(laws, policy)[0] == sorted(expected)
    tree, best = (draft(TableDrafter(laws), each, CONTEXT, DEEP) for each in (policy, OptTree(nodes, 0, max_depth)))
    assert tree.expected_accepted <= best.expected_accepted + 1e-9


def shapes(budget: int, depth: int, ranks: int) -> Iterator[frozenset[Branch]]:
    """Every tree of at most `budget` nodes whose siblings have the ranks 0, 1, ... without a gap, once each."""

    def siblings(path: Branch, rank: int, budget: int) -> Iterator[frozenset[Branch]]:
        yield frozenset()
        if rank == ranks or not budget or len(path) == depth:
            return
        child = (*path, rank)
        for below in siblings(child, 0, budget - 1):
            for others in siblings(path, rank + 1, budget - 1 - len(below)):
                yield frozenset([child]) | below | others

    return siblings((), 0, budget)


@cache
def all_shapes(budget: int, depth: int, ranks: int) -> tuple[frozenset[Branch], ...]:
    return tuple(shapes(budget, depth, ranks))


@given(rates_of, st.lists(rates_of, max_size=2).map(tuple), st.integers(1, 6), st.integers(1, 4))
def test_sequoia_has_the_largest_value_of_all_trees(by_rank, by_depth, nodes, depth) -> None:
    """By rank alone, or by depth, too. Rising rates included: the second child may be likelier, and needs the first."""
    rates = AcceptanceRates(by_rank, by_depth)
    tree = sequoia_tree(rates, nodes, depth)
    best = max(rates.expected_accepted(shape) for shape in all_shapes(nodes, depth, 3))
    assert rates.expected_accepted(tree.paths) == pytest.approx(best, abs=1e-12)
    assert len(tree.paths) <= nodes and tree.max_depth <= depth
    assert all((*path[:-1], path[-1] - 1) in tree.paths for path in tree.paths if path[-1])


def test_brute_force_meets_every_shape_once() -> None:
    """Ordered trees of up to four nodes below the root: 1 + 1 + 2 + 5 + 14 (Catalan numbers)."""
    found = list(shapes(4, 4, 4))
    assert len(found) == len(set(found)) == 23


def closed_sets(rates: AcceptanceRates, budget: int, depth: int) -> float:
    """The largest sum of rates' products over all sets of at most `budget` paths that contain their parents."""

    def best(waiting: list[Node], budget: int) -> float:
        if not waiting or not budget:
            return 0.0
        (value, path), *others = waiting
        below = [(value * rate, (*path, rank)) for rank, rate in enumerate(rates.below(len(path)))]
        taken = value + best(others + (below if len(path) < depth else []), budget - 1)
        return max(taken, best(others, budget))

    return best([(rate, (rank,)) for rank, rate in enumerate(rates.below(0))], budget)


@given(rates_of, st.lists(rates_of, max_size=2).map(tuple), st.integers(1, 5), st.integers(1, 3))
def test_greedy_tree_is_the_best_of_its_size(by_rank, by_depth, nodes, depth):
    """With rates that differ from depth to depth, and with ranks left out where a later one is better."""
    rates = AcceptanceRates(by_rank, by_depth)
    tree = greedy_static_tree(rates, nodes, depth)
    assert rates.expected_accepted(tree.paths) == pytest.approx(closed_sets(rates, nodes, depth), abs=1e-12)
    assert tree.nodes <= nodes and tree.max_depth <= depth


def test_greedy_tree_without_a_depth_uses_the_whole_budget() -> None:
    assert greedy_static_tree(AcceptanceRates((1.0,)), 7) == Static.chain(7)
    assert greedy_static_tree(AcceptanceRates((0.9, 0.1)), 63).nodes == 63


@pytest.mark.parametrize("siblings", [IID, WithoutReplacement])
@given(seeds, st.integers(1, 12), st.integers(1, 4))
def test_sequoia_draws_its_shape(siblings: type, seed: int, nodes: int, depth: int) -> None:
    """Of sampled siblings the rank is the place in the order of the draws; which tokens come out changes no shape."""
    policy = sequoia_tree(AcceptanceRates((0.5, 0.25, 0.125)), nodes, depth, siblings)
    tree = draft(TableDrafter(hashed_laws(seed, 5)), policy, CONTEXT, DEEP, random=Random(seed))
    paths: list[Branch] = [()]
    for row in range(1, len(tree)):
        siblings_before = int((tree.parents[1:row] == tree.parents[row]).sum())
        paths.append((*paths[tree.parents[row]], siblings_before))
    assert sorted(paths[1:]) == sorted(policy.paths)
    assert isinstance(policy.children, siblings) and tree.draft_log_probs is not None


@pytest.mark.parametrize(
    ("policy", "tree", "forwards"),
    [
        (Eagle2(2, 2, 6), [(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (1, 0, 0)], 3),
        (DynamicDepth(2, 2, 6, log(0.7), (1, 2)), [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)], 2),
        (Talon(0.3, 7, 2), [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (1, 0), (1, 0, 0)], 4),
        (JetSpecTree(5, 2), [(0,), (0, 0), (0, 0, 0), (0, 1), (1,)], 3),
        (ThresholdChain(8, 0.4), [(0,), (0, 0), (0, 0, 0)], 3),
        (ThresholdChain(8, 0.4, 5), [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)], 5),
        (ThresholdChain(2, 0.0), [(0,), (0, 0)], 2),
        (ThresholdChain(8, 1.0), [(0,)], 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_drawn_examples(policy: TreePolicy, tree: list[Branch], forwards: int) -> None:
    found, drafter = grow(DRAWN, policy)
    assert found == tree and drafter.forwards == forwards


@pytest.mark.parametrize("module", [sequoia_module, greedy_static_module])
def test_docstring_examples_run(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.attempted and not results.failed


def test_sequoia_of_rates_that_are_all_zero_is_the_empty_tree() -> None:
    policy = sequoia_tree(AcceptanceRates((0.0, 0.0)), 5, 3)
    assert policy.paths == () and isinstance(policy.children, TopK)
    target = TableTarget(hashed_laws(0, 12), 12)
    assert Decoder(target, None, policy).generate(CONTEXT, 4).accept_lengths == [1] * 4
