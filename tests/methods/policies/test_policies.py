"""Tree policies: OPT-Tree against brute force and its paper's own, unpruned algorithm; static trees as listed."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from asking import draft
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import Laws, TableDrafter, hashed_laws, written_laws

from opt_tree import OptTree, Static, Tree, TreePolicy
from opt_tree.methods.policies.registry import make_policy

Branch = tuple[int, ...]
CONTEXT = [0, 1]
DEEP = 99

seeds = st.integers(0, 10_000)
cells = st.sampled_from([None, None, 1, 2, 3, 4])


def branches(tree: Tree) -> list[Branch]:
    """The tokens below the root on the way to every row."""
    return [tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(len(tree))]


def brute_force(laws: Laws, nodes: int, depth: int) -> float:
    """The largest E(A) of all connected subtrees with the root and at most `nodes` nodes below it: tries every one.

    `open_nodes` may still be taken or left out for good; what is taken opens its children. Each subtree is met once.
    """

    def children(branch: Branch, value: float) -> list[tuple[Branch, float]]:
        if len(branch) == depth:
            return []
        return [((*branch, token), value * p) for token, p in enumerate(laws((*CONTEXT, *branch)).tolist())]

    def best(open_nodes: list[tuple[Branch, float]], budget: int) -> float:
        if not open_nodes or not budget:
            return 0.0
        (branch, value), *others = open_nodes
        taken = value + best(others + children(branch, value), budget - 1)
        return max(taken, best(others, budget))

    return best(children((), 1.0), nodes)


@dataclass
class Algorithm1:
    """arXiv:2406.17276, Alg. 1 as printed: layers n wide, plain products, nothing pruned, newest layer included."""

    laws: Laws
    nodes: int
    threshold: float
    max_depth: int
    layers: list[list[tuple[float, Branch]]] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    """By how much each drafted layer raised E_sub(T, n)."""

    def __post_init__(self) -> None:
        newest, before = [(1.0, ())], 0.0
        while True:
            children = [
                (value * p, (*branch, token))
                for value, branch in newest
                for token, p in enumerate(self.laws((*CONTEXT, *branch)).tolist())
                if p > 0
            ]
            newest = sorted(children, key=lambda child: -child[0])[: self.nodes]
            self.layers.append(newest)
            self.gains.append(self.expected_accepted - before)
            before = self.expected_accepted
            if self.gains[-1] <= self.threshold or len(self.layers) == self.max_depth:
                break

    @property
    def tree(self) -> list[tuple[float, Branch]]:
        """The n largest nodes; equal ones by depth, so that a parent comes before its child."""
        everything = [node for layer in self.layers for node in layer]
        return sorted(everything, key=lambda node: (-node[0], len(node[1])))[: self.nodes]

    @property
    def expected_accepted(self) -> float:
        return sum(value for value, _ in self.tree)


@settings(max_examples=50)
@given(seeds, st.sampled_from([2, 3, 4]), st.integers(1, 6), cells, st.sampled_from([1, 2, 3, 4, DEEP, DEEP]))
def test_opt_tree_has_the_largest_expected_acceptance(seed, vocab, nodes, cells, depth):
    """With threshold 0 it ends by itself, at the optimum over all trees of that depth (n nodes are at most n deep)."""
    laws = hashed_laws(seed, vocab, cells)
    drafter = TableDrafter(laws)
    tree = draft(drafter, OptTree(nodes, 0.0, DEEP), CONTEXT, depth)
    assert tree.nodes <= nodes and tree.depths.max() <= depth
    assert tree.expected_accepted == pytest.approx(brute_force(laws, nodes, min(nodes, depth)), abs=1e-12)
    assert drafter.forwards <= min(nodes + 1, depth)


@settings(max_examples=60)
@given(seeds, st.sampled_from([3, 4, 9]), st.integers(1, 12), st.floats(0, 1), st.integers(1, 6), cells)
def test_opt_tree_is_algorithm_1(seed, vocab, nodes, threshold, depth, cells):
    """The same tree and as many draft forwards as in the unpruned algorithm, threshold and depth cap included.

    Which of several equal nodes is taken is free; what they add up to and what they cost is not.
    """
    # Log-probabilities round differently from products: keep the threshold off the gains, which are few round numbers.
    threshold += 1e-9
    laws = hashed_laws(seed, vocab, cells)
    expected = Algorithm1(laws, nodes, threshold, depth)
    drafter = TableDrafter(laws)
    tree = draft(drafter, OptTree(nodes, threshold, depth), CONTEXT, depth)
    if cells is None:
        assert sorted(branches(tree)) == sorted([()] + [branch for _, branch in expected.tree])
    assert tree.expected_accepted == pytest.approx(expected.expected_accepted, abs=1e-12)
    # A layer that cannot add anything may be left undrafted; no other.
    idle = expected.gains[-1] < 1e-12
    assert len(expected.gains) - idle <= drafter.forwards <= len(expected.gains)


@given(seeds, st.sampled_from([3, 5]), st.integers(1, 9), cells)
def test_only_nodes_among_the_best_are_expanded(seed: int, vocab: int, nodes: int, cells: int | None) -> None:
    """At the time of its expansion a node is among the n best of everything drafted, and of the newest layer."""
    laws = hashed_laws(seed, vocab, cells)
    drafter = TableDrafter(laws)
    draft(drafter, OptTree(nodes, 0.0, DEEP), CONTEXT, DEEP)
    known: dict[Branch, float] = {}
    newest: list[Branch] = [()]
    for depth, expanded in enumerate(drafter.expanded, start=1):
        for branch in newest:
            law = laws((*CONTEXT, *branch)).tolist()
            known |= {(*branch, token): known.get(branch, 1.0) * p for token, p in enumerate(law)}
        bar = sorted(known.values(), reverse=True)[nodes - 1] if len(known) >= nodes else 0.0
        assert expanded and len(set(expanded)) == len(expanded) <= nodes - depth + 1
        for branch in expanded:
            assert len(branch) == depth and branch[:-1] in newest
            assert known[branch] >= bar * (1 - 1e-12) and known[branch] > 0
        newest = expanded


def test_drafting_stops_when_the_gain_is_no_more_than_the_threshold() -> None:
    """Certain tokens: every layer up to the n-th gains exactly 1, in floating point too."""
    certain = written_laws({(): (0.0, 1.0, 0.0)})
    for threshold, layers in ((1.0, 1), (np.nextafter(1.0, 0.0), 4)):
        drafter = TableDrafter(certain)
        tree = draft(drafter, OptTree(4, float(threshold), DEEP), CONTEXT, DEEP)
        assert branches(tree) == [(1,) * depth for depth in range(layers + 1)]
        assert layers <= drafter.forwards <= layers + (layers > 1)
    # Half and half: the n = 2 best of layer 1 add up to 1, every later layer ties at most.
    drafter = TableDrafter(written_laws({(): (0.5, 0.5, 0.0)}))
    assert branches(draft(drafter, OptTree(2, 0.0, DEEP), CONTEXT, DEEP)) == [(), (0,), (1,)]
    assert drafter.forwards <= 2


def naive_static(laws: Laws, paths: tuple[Branch, ...]) -> set[Branch]:
    """The token branches that a list of rank paths stands for, each followed from the root on its own."""
    found = {()}
    for path in paths:
        branch: Branch = ()
        for rank in path:
            law = laws((*CONTEXT, *branch))
            possible = [token for token in np.argsort(-law, kind="stable").tolist() if law[token] > 0]
            if rank >= len(possible):
                break  # fewer children than the tree asks for
            branch = (*branch, possible[rank])
        else:
            found.add(branch)
    return found


@st.composite
def path_lists(draw: st.DrawFn) -> tuple[Branch, ...]:
    """Any set of rank paths closed under parents, in any order."""
    paths: list[Branch] = [()]
    for _ in range(draw(st.integers(0, 10))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 3)))
        if path not in paths:
            paths.append(path)
    return tuple(draw(st.permutations(paths[1:])))


def sparse_laws(seed: int) -> Laws:
    """Laws over five tokens of which one to five have probability; no two alike, so that ranks are clear."""
    full = hashed_laws(seed, 5)

    def law(path: tuple[int, ...]) -> np.ndarray:
        cut = np.where(np.arange(5) <= (seed + sum(path)) % 5, full(path), 0.0)
        return cut / cut.sum()

    return law


@given(path_lists(), st.sampled_from([hashed_laws(1, 5), sparse_laws(2), sparse_laws(3)]))
def test_a_static_tree_is_the_listed_one(paths: tuple[Branch, ...], laws: Laws) -> None:
    policy = Static.of([list(path) for path in paths])
    drafter = TableDrafter(laws)
    tree = draft(drafter, policy, CONTEXT, policy.max_depth)
    assert policy.max_depth == max(map(len, paths), default=0) and policy.nodes == len(paths)
    assert len(set(branches(tree))) == len(tree)
    assert set(branches(tree)) == naive_static(laws, paths)
    # Only nodes that have children in the list are drafted below, once each: the deepest layer costs nothing.
    expanded = [branch for layer in drafter.expanded for branch in layer]
    inner = naive_static(laws, tuple({path[:-1] for path in paths}))
    assert set(expanded) == inner - {()} and len(set(expanded)) == len(expanded)


@pytest.mark.parametrize(
    ("policy", "paths"),
    [
        (Static.chain(3), {(0,), (0, 0), (0, 0, 0)}),
        (Static.chain(0), set()),
        (Static.kary(2, 2), {path for depth in (1, 2) for path in product(range(2), repeat=depth)}),
        (Static.kary(3, 1), {(0,), (1,), (2,)}),
        (Static.empty(), set()),
        (Static.of([[0], [1], [0, 0]]), {(0,), (1,), (0, 0)}),
    ],
    ids=["chain", "chain of none", "binary", "wide", "empty", "nested lists"],
)
def test_the_named_shapes(policy: Static, paths: set[Branch]) -> None:
    assert set(policy.paths) == paths and len(policy.paths) == len(paths)
    laws = hashed_laws(5, 4)
    tree = draft(TableDrafter(laws), policy, CONTEXT, policy.max_depth)
    assert set(branches(tree)) == naive_static(laws, tuple(paths))


@given(seeds, st.sampled_from([Static.chain(4), Static.kary(2, 3), OptTree(6, 0.0, 4)]), st.integers(0, 3))
def test_a_limit_cuts_every_tree(seed: int, policy: TreePolicy, limit: int) -> None:
    """Close to `max_new_tokens` or to the end of the context, fewer layers are drafted; none leaves the root alone."""
    drafter = TableDrafter(hashed_laws(seed, 3))
    tree = draft(drafter, policy, CONTEXT, limit)
    assert tree.tokens[0] == CONTEXT[-1]
    assert tree.depths.max() <= limit and drafter.forwards <= limit
    if isinstance(policy, Static):
        listed = tuple(path for path in policy.paths if len(path) <= limit)
        assert set(branches(tree)) == naive_static(drafter.laws, listed)
        assert drafter.forwards == limit


def test_the_tree_of_token_recycling_is_the_published_one():
    """Six levels of 8, 21, 25, 15, 8 and 3 nodes, and these paths: the README of the official repository."""
    tree = make_policy("recycling_tree", 80)
    levels = [{path for path in tree.paths if len(path) == length} for length in range(1, 7)]
    assert [len(level) for level in levels] == [8, 21, 25, 15, 8, 3] and tree.max_depth == 6
    assert levels[5] == {(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)}
    for level, last in zip(levels, ((7,), (7, 0), (5, 0, 0), (3, 0, 0, 0), (1, 0, 0, 0, 0)), strict=False):
        assert max(level) == last
    assert make_policy("recycling_tree", 12).paths == tree.paths[:12]


def test_the_list_of_eagle_1_is_the_published_one():
    """`mc_sim_7b_63`, written out: ranks of the tokens on each path."""
    listed = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    tree = make_policy("eagle1_list", 60)
    assert tree.paths == tuple(tuple(map(int, path)) for path in listed.split())
    assert make_policy("eagle1_list", 12).paths == tree.paths[:12]
