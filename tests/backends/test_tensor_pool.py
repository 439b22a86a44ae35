"""Trees that grow on tensors are those of the host's pool and policy, node by node, whatever a drafter says."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.backends.tensor_growth import Fixed, Growth, first_best
from opt_tree.backends.tensor_pool import TensorPool, read_tree, tree_of
from opt_tree.children import LogProbs
from opt_tree.decode import grow
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.static import EAGLE_1, Static
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.pool import Frontier
from opt_tree.target import run_alone
from opt_tree.tools.on_device import growth_of
from opt_tree.tree import Tree

ROOT = 2
Law = Callable[[tuple[int, ...]], Float[Tensor, " columns"]]


class Scripted(Drafter):
    """Says what a law says of each path."""

    def __init__(self, law: Law) -> None:
        self.law = law

    def root(self, context: list[int]) -> LogProbs:
        self.paths: list[tuple[int, ...]] = [()]
        return LogProbs(self.law(())[None])

    def expand(self, frontier: Frontier) -> LogProbs:
        nodes = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        below = [(*self.paths[parent], token) for parent, token in nodes]
        self.paths += below
        return LogProbs(torch.stack([self.law(path) for path in below]))

    def accept(self, outcome: Outcome) -> None: ...


def on_tensors(
    policy: TreePolicy, law: Law, limit: int, ends: frozenset[int] = frozenset(), stops: str | None = None
) -> Tree:
    """The tree that grows on tensors. Rows of nodes that are not there are asked about as well.

    `stops`: behind a stop, one more layer is drafted, and the others are "left out", or are there with "any" numbers.
    """
    columns = len(law(()))
    growth = growth_of(policy, columns)
    assert isinstance(growth, Growth)
    marks = torch.tensor([token in ends for token in range(columns)])
    pool, front, flags = TensorPool(torch.tensor(ROOT)), None, list[bool]()
    growth.begin(pool.device)
    paths: list[tuple[int, ...]] = [()]
    while True:
        values, depth = torch.stack([law(path) for path in paths]), pool.depth + 1
        layer, front = growth.layer(pool.front, values, (None, marks if ends else None), depth, depth >= limit)
        pool.take(layer, front)
        flag = pool.flag(front) if stops else None
        if front is None or (pool.depth > 1 and flags[-1] is False):
            break
        flags.append(flag is None or bool(flag))
        paths = [(*paths[row], token) for row, token in zip(front.above.tolist(), front.tokens.tolist(), strict=True)]
        assert pool.slots <= growth.room(limit) and len(paths) <= growth.widest
    if stops == "any" and front is not None:
        best = layer._replace(paths=torch.zeros_like(layer.paths), expanded=torch.ones_like(layer.expanded))
        for _ in range(pool.depth, limit):
            pool.take(best, front._replace(live=torch.ones_like(front.live)))
            pool.flag(pool.front if pool.depth < limit else None)
    pool.close()
    tree = tree_of(pool, growth.select(pool), limit)
    told = torch.cat([*tree.told(), torch.tensor([7])]).numpy()
    found_tree, rest = read_tree(told, len(tree.tokens))
    assert rest.tolist() == [7] and len(tree.tokens) <= 1 + growth.nodes
    assert tree.sees[: len(found_tree), : len(found_tree)].numpy().tolist() == found_tree.ancestors.tolist()
    assert tree.depths[: len(found_tree)].tolist() == found_tree.depths.tolist()
    return found_tree


def compare(policy: TreePolicy, law: Law, limit: int, ends: frozenset[int] = frozenset()) -> Tree:
    """Raise AssertionError unless both grow the same tree."""
    tree = run_alone(grow(Scripted(law), policy, [ROOT], min(policy.max_depth, limit))).ending_at(ends)
    for stops in (None, "left out", "any"):
        found = on_tensors(policy, law, min(policy.max_depth, limit), ends, stops)
        for part in ("tokens", "parents", "draft_rows", "path_log_probs"):
            assert getattr(found, part).tolist() == getattr(tree, part).tolist(), (part, stops)
    return tree


def coarse(seed: int, columns: int, dtype: torch.dtype = torch.float32, impossible: bool = True) -> Law:
    """Laws of few distinct numbers, so that ties are everywhere; many tokens are impossible, and some rows unknown."""

    def law(path: tuple[int, ...]) -> Float[Tensor, " columns"]:
        random = np.random.default_rng([seed, *(token + 1 for token in path)])
        kinds = [0.0, math.log(0.5), math.log(0.25), math.log(0.125)] + [-math.inf] * (3 * impossible)
        values = np.array(kinds)[random.integers(0, len(kinds), columns)]
        if impossible and random.random() < 0.1:
            values[:] = -math.inf
        return torch.tensor(values - math.log(2) * random.integers(0, 2), dtype=dtype)

    return law


def smooth(seed: int, columns: int, dtype: torch.dtype = torch.float32, width: float = 3.0) -> Law:
    """Laws of numbers that do not tie."""

    def law(path: tuple[int, ...]) -> Float[Tensor, " columns"]:
        random = np.random.default_rng([seed, *(token + 1 for token in path)])
        return torch.tensor(width * random.normal(size=columns), dtype=dtype).log_softmax(-1)

    return law


POLICIES = {
    "opt": OptTree(8, 0.1, 5),
    "opt to the end": OptTree(20, 0.0, 6),
    "opt, one node": OptTree(1, 0.0, 3),
    "eagle2": Eagle2(3, 3, 9),
    "eagle2, wide": Eagle2(6, 2, 60),
    "ddd": DynamicDepth(3, 5, 12, math.log(0.4), (1, 2, 4)),
    "list": Static.of_widths(EAGLE_1),
    "chain": Static.chain(4),
    "holes": Static(((1,), (3,), (1, 0), (1, 2), (1, 2, 1))),
}


@pytest.mark.quick("3-chain", "3-holes", "3-opt, one node", "40-holes", "40-opt, one node")
@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("columns", [3, 40])
def test_trees_are_those_of_the_host(name, columns):
    """Of both kinds of laws, in both widths of numbers, cut short or not, with and without an end."""
    for seed in range(6):
        dtype = torch.float32 if seed % 2 else torch.float64
        ends = frozenset({1, 2}) if seed % 3 == 0 else frozenset()
        limit = 9 if seed % 4 else 2
        compare(POLICIES[name], smooth(seed, columns, dtype, 1 + seed % 4), limit, ends)
        if name != "opt to the end":  # a gain of nothing is a matter of the last bit there
            compare(POLICIES[name], coarse(seed, columns, dtype), limit, ends)
            compare(POLICIES[name], coarse(seed, columns, dtype, impossible=False), limit, ends)


def table(rows: dict[tuple[int, ...], list[float]], other: list[float]) -> Law:
    """Probabilities by hand."""
    return lambda path: torch.tensor(rows.get(path, other)).log()


def test_of_equal_candidates_at_the_cut_the_first_are_taken():
    assert first_best(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), 3).tolist() == [1, 2, 3]
    assert first_best(torch.full((5000,), -1.0), 4).tolist() == [0, 1, 2, 3], "topk would take others"
    tree = compare(OptTree(3, 0.0, 1), table({}, [0.0, *[0.2] * 5]), 1)
    assert tree.tokens.tolist() == [ROOT, 1, 2, 3]


def test_a_certain_child_ties_its_parent_and_stays_below_it():
    tree = compare(OptTree(3, 0.0, 3), table({}, [0.0, 1.0, 0.0]), 3)
    assert tree.depths.tolist() == [0, 1, 2, 3]


def test_fewer_candidates_than_nodes():
    tree = compare(OptTree(10, 0.0, 1), table({}, [0.5, 0.0, 0.5]), 1)
    assert tree.nodes == 2
    tree = compare(Eagle2(5, 0, 20), table({}, [0.5, 0.25, 0.25]), 9)
    assert tree.nodes == 3


def test_nothing_is_known_at_the_root():
    for policy in POLICIES.values():
        assert compare(policy, table({}, [0.0, 0.0, 0.0]), 5).nodes == 0


def test_an_empty_frontier_ends_the_tree():
    """Two equal nodes fill the budget: neither exceeds the second best, and nothing is expanded."""
    tree = compare(OptTree(2, 0.0, 5), table({}, [0.5, 0.5, 0.0]), 5)
    assert tree.depths.tolist() == [0, 1, 1] and tree.draft_rows.tolist() == [0, -1, -1]


def test_a_stop_in_the_first_layer():
    tree = compare(OptTree(4, 0.9, 5), table({}, [0.5, 0.3, 0.05]), 5)
    assert tree.depths.tolist() == [0, 1, 1, 1] and tree.draft_rows.tolist() == [0, -1, -1, -1]


def test_a_stop_behind_the_second_layer_keeps_it():
    tree = compare(OptTree(4, 0.3, 5), table({(): [0.6, 0.3, 0.1]}, [0.4, 0.1, 0.05]), 5)
    assert tree.depths.max() == 2


def test_a_number_that_is_none_is_no_candidate():
    law = table({(0,): [math.nan, 0.6, math.nan]}, [0.6, 0.3, 0.1])
    assert compare(OptTree(4, 0.0, 3), law, 3).tokens.tolist()[1:3] == [0, 1]


def test_a_child_that_rounds_above_its_parent_is_not_above_it():
    """In float32 a sum may: here by a log-probability that is above 0."""
    tree = compare(OptTree(3, 0.0, 3), lambda path: torch.tensor([1e-3 if path else -0.5, -9.0]), 3)
    assert (np.diff(tree.path_log_probs[1:]) == 0).all() and tree.depths.tolist() == [0, 1, 2, 3]


def test_what_is_below_an_end_is_not_in_the_tree_and_was_drafted():
    tree = compare(OptTree(6, 0.0, 4), table({}, [0.5, 0.4, 0.1]), 4, frozenset({0}))
    assert all(parent == 0 or tree.tokens[parent] != 0 for parent in tree.parents[1:])
    whole = compare(OptTree(6, 0.0, 4), table({}, [0.5, 0.4, 0.1]), 4)
    assert whole.nodes == 6 > tree.nodes


def test_the_root_may_be_an_end():
    assert compare(OptTree(4, 0.0, 2), table({}, [0.5, 0.3, 0.2]), 2, frozenset({ROOT})).nodes == 4


def test_a_list_that_asks_for_more_children_than_there_are_tokens():
    tree = compare(Static(((0,), (1,), (4,), (4, 0))), table({}, [0.5, 0.3, 0.2]), 3)
    assert tree.nodes == 2 and Fixed(((0,), (4,)), 3).widest >= 0
