"""Trees as they grow: what the drafter is asked, where growing ends, and that no other tree of the size is better."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_tree.children import LogProbs, TopK
from opt_tree.decode import grow
from opt_tree.drafter import Drafter
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.sampling import Random, Temperature
from opt_tree.target import run_alone as run
from opt_tree.tree import Tree

VOCAB = 2
Path = tuple[int, ...]
EVERY = [path for depth in (1, 2, 3) for path in product(range(VOCAB), repeat=depth)]


class Table(Drafter):
    """Says of each path below the root what a table has; `asked` lists the paths that it was asked about, by layer."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.laws = {path: rng.dirichlet([0.8] * VOCAB) for path in [(), *EVERY]}
        self.reach = {path: np.prod([self.laws[path[:i]][path[i]] for i in range(len(path))]) for path in EVERY}
        self.asked: list[list[Path]] = []

    def answer(self, paths: list[Path]) -> LogProbs:
        self.asked.append(paths)
        return LogProbs(torch.from_numpy(np.stack([self.laws[path] for path in paths])).log())

    def root(self, context: list[int]) -> LogProbs:
        assert context == [9, 7]
        self.expanded: list[Path] = [()]
        return self.answer([()])

    def expand(self, frontier) -> LogProbs:
        parents, tokens = frontier.parents.tolist(), frontier.tokens.tolist()
        paths = [(*self.expanded[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        self.expanded += paths
        return self.answer(paths)

    def accept(self, outcome) -> None: ...


def tree_of(drafter: Drafter, policy: TreePolicy, limit: int, root: LogProbs | None = None) -> Tree:
    return run(grow(drafter, policy, [9, 7], limit, root=root))


def paths_of(tree: Tree) -> set[Path]:
    return {tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(1, len(tree))}


def best_of_all(reach: dict[Path, float], nodes: int, layers: int) -> float:
    """The greatest E(A) of a tree of so many nodes, by looking at every set of nodes that is one."""
    known = [path for path in EVERY if len(path) <= layers]
    return max(
        sum(reach[path] for path in some)
        for some in combinations(known, min(nodes, len(known)))
        if all(len(path) == 1 or path[:-1] in some for path in some)
    )


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=40)
def test_no_tree_of_the_size_is_better(seed: int, nodes: int, limit: int) -> None:
    """And the drafter was asked about those nodes alone below which one of the best could be."""
    drafter = Table(seed)
    tree = tree_of(drafter, OptTree(nodes, 0.0, 9), limit)
    assert tree.tokens[0] == 7 and tree.path_log_probs[0] == 0
    assert tree.nodes == min(nodes, sum(VOCAB**depth for depth in range(1, limit + 1)))
    assert tree.expected_accepted == pytest.approx(best_of_all(drafter.reach, nodes, limit), abs=1e-12)
    assert tree.expected_accepted == pytest.approx(sum(drafter.reach[path] for path in paths_of(tree)), abs=1e-12)
    known: list[float] = []
    for layer, asked in enumerate(drafter.asked[:-1], start=1):
        children = [(*path, token) for path in asked for token in range(VOCAB)]
        known += [drafter.reach[path] for path in children]
        least = sorted(known, reverse=True)[nodes - 1] if len(known) >= nodes else -1.0
        assert drafter.asked[layer] == [path for path in children if drafter.reach[path] > least]
    assert len(drafter.asked) <= limit


def test_another_layer_is_drafted_while_it_pays() -> None:
    """Of the example of `OptTree`, with n = 4: the second layer gains .41, and a threshold of as much ends growing."""
    first, second = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.45, 0.4, 0.15], [0.2, 0.3, 0.5]])
    for threshold, goes_on in ((0.40, True), (0.42, False), (None, False)):
        pool = CandidatePool(7, TopK(total=4))
        pool.add(LogProbs(first.double().log()))
        assert OptTree(4, 0.99).expand(pool).tolist() == [1, 2, 3] and OptTree(4, 1.01).expand(pool) is None
        pool.frontier(np.array([1, 2]))
        pool.add(LogProbs(second.double().log()))
        policy = OptTree(4, pool.gain(4) if threshold is None else threshold)
        assert pool.gain(4) == pytest.approx(0.41, abs=1e-6)
        found = policy.expand(pool)
        assert found.tolist() == [4] if goes_on else found is None, "the .24 is the last of the best and stays a leaf"
        chosen = pool.tree(policy.select(pool))
        assert np.exp(chosen.path_log_probs) == pytest.approx([1, 0.6, 0.3, 0.27, 0.24], abs=1e-6)


def test_of_equal_nodes_the_older_ones_are_drafted() -> None:
    pool, policy = CandidatePool(7, TopK(total=3)), OptTree(3, 0.0)
    pool.add(LogProbs(torch.tensor([[0.25, 0.25, 0.25, 0.25]]).log()))
    assert pool.tokens.tolist() == [7, 0, 1, 2] and not len(policy.expand(pool))
    assert policy.select(pool).tolist() == [0, 1, 2, 3]
    pool = CandidatePool(7, TopK(total=3))
    pool.add(LogProbs(torch.tensor([[0.5, 0.25, 0.25]]).log()))
    assert policy.expand(pool).tolist() == [1]
    pool.frontier(np.array([1]))
    pool.add(LogProbs(torch.tensor([[0.5, 0.5, 0.0]]).log()))
    assert policy.select(pool).tolist() == [0, 1, 2, 3] and policy.expand(pool) is None


def test_without_room_or_a_drafter_there_is_the_root_alone() -> None:
    drafter = Table(0)
    for who, limit in ((drafter, 0), (drafter, -2), (None, 5)):
        tree = tree_of(who, OptTree(3), limit)
        assert (tree.tokens.tolist(), tree.parents.tolist(), tree.draft_rows.tolist()) == ([7], [-1], [0])
    assert not drafter.asked


def test_what_was_asked_of_the_root_is_not_asked_again() -> None:
    drafter, other = Table(3), Table(3)
    root = other.root([9, 7])
    drafter.expanded = [()]
    tree, expected = (tree_of(one, OptTree(4, 0.0), 3, known) for one, known in ((drafter, root), (other, None)))
    assert paths_of(tree) == paths_of(expected) and () not in {path for layer in drafter.asked for path in layer}


def test_children_are_picked_with_the_sampling_and_the_random_numbers_of_the_text() -> None:
    given: list[tuple[int, Temperature, Random]] = []

    class Noting(TopK):
        def pool(self, root, sampling, random) -> CandidatePool:
            given.append((root, sampling, random))
            return super().pool(root, sampling, random)

    class Policy(OptTree):
        children = Noting(total=3)

    sampling, random = Temperature(0.7), Random(4)
    run(grow(Table(1), Policy(3), [9, 7], 2, sampling, random))
    run(grow(Table(1), Policy(3), [9, 7], 2))
    assert given[0] == (7, sampling, random) and given[1][:2] == (7, Temperature())
    assert given[1][2].fresh.random() == Random(0).fresh.random()


def test_a_fault_in_a_forward_is_raised_where_it_was_asked_for() -> None:
    class Broken:
        def run(self, forward):
            raise ValueError("out of order")

    class Asked:
        model = Broken()

    def asking():
        with pytest.raises(ValueError, match="out of order"):
            yield Asked()
        return "caught"

    assert run(asking()) == "caught"


def test_a_policy_grows_nothing_by_itself() -> None:
    pool, policy = CandidatePool(7, TopK(total=2)), TreePolicy()
    for asked in (policy.expand, policy.select):
        with pytest.raises(NotImplementedError, match="TreePolicy grows no tree"):
            asked(pool)
    assert policy.policies == (policy,) and policy.choose([1], None) is policy
    with pytest.raises(NotImplementedError, match="Table asks for a forward and does not read it"):
        Table(0).read(None)


# ---- trees that are cut


@given(st.integers(0, 10_000))
@settings(max_examples=50)
def test_nothing_lies_below_a_token_at_which_the_text_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 14))
    parents = [-1, *(int(rng.integers(row)) for row in range(1, rows))]
    tokens, ends = rng.integers(0, 5, rows), frozenset(rng.integers(0, 6, int(rng.integers(3))).tolist())
    whole = Tree(tokens, np.array(parents), -rng.random(rows), np.arange(rows), torch.zeros(rows, 5))
    cut = whole.ending_at(ends)
    kept = [row for row in range(rows) if not ends.intersection(tokens[whole.path_to(row)[1:-1]].tolist())]
    for part in ("tokens", "path_log_probs", "draft_rows"):
        assert getattr(cut, part).tolist() == getattr(whole, part)[kept].tolist()
    assert [-1, *(kept[parent] for parent in cut.parents[1:])] == [parents[row] for row in kept]
    assert cut.draft_log_probs is whole.draft_log_probs and (len(kept) == rows) >= (cut is whole)
