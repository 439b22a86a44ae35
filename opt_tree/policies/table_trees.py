"""OPT-Tree over tables without a pool: the n best nodes so far in a sorted list, each asked what follows it.

A model is asked layer by layer, as a forward over many nodes costs what one over a single node does. A table is asked
node by node, and below nodes of the tree only; plain Python is all that runs. The tree is the loop's, to the rounding
of a logarithm: of a table alone, of one below the layers of a model.
"""

from bisect import insort
from itertools import count
from math import exp, inf, log
from typing import NamedTuple

import numpy as np

from opt_tree.core.continuations import Continuations, Tail
from opt_tree.core.pool import CandidatePool
from opt_tree.core.tree import Tree

Path = tuple[int, ...]
Node = tuple[float, int, Path, Tail]
"""Minus its path's log-probability, its depth, the place of each node of its path among its siblings, the last tokens
of its path. The less comes first: a better one, and of equals the one that the loop drafts first."""


class Budget(NamedTuple):
    """Of a tree: how many nodes, and how much E(A) has to rise for another layer."""

    nodes: int
    threshold: float


def grow(
    budget: Budget, continuations: Continuations, context: list[int], limit: int, above: CandidatePool | None = None
) -> Tree:
    """Return the tree that the loop would grow, at most `limit` layers deep; `above` is what it has grown so far."""
    probs, order, depth = continuations
    nodes, rows = _begin(context, order, above, budget.nodes)
    numbers = count(max(rows.values(), default=-1) + 1)
    # With a threshold, layer by layer: each has to raise E(A) by more. Without one they all do, the best node first.
    spans = [(layer, layer + 1) for layer in range(depth, limit)] if budget.threshold else [(depth, limit)]
    for first, last in spans:
        before, place = _expected(nodes), 0
        # What an asked node adds stands behind it. Behind the last one of a full tree there is no room.
        while place < min(len(nodes), budget.nodes):
            cost, at, path, tail = nodes[place]
            place += 1
            if not first <= at < last:
                continue
            rows[path] = next(numbers)
            most = nodes[-1][0] if len(nodes) > budget.nodes else inf
            least = exp(cost - most) * (1 - 1e-9)
            kept = tail[1 - order :] if order > 1 else ()
            for child, (token, prob) in enumerate(probs(tail).items()):
                if prob > least:
                    insort(nodes, (max(cost - log(prob), cost), at + 1, (*path, child), (*kept, token)))
                    if len(nodes) > budget.nodes + 1:
                        nodes.pop()
        if _expected(nodes) - before <= budget.threshold:
            break
    return _tree(nodes, rows)


def _begin(
    context: list[int], order: int, above: CandidatePool | None, most: int
) -> tuple[list[Node], dict[Path, int]]:
    """Return the best nodes so far, and the draft rows of those that were expanded."""
    tail = tuple(context[-order:])
    if above is None:
        return [(0.0, 0, (), tail)], {}
    paths: list[Path] = [()]
    tails = [tail]
    kept = 1 - order
    for row, (token, parent) in enumerate(zip(above.tokens[1:].tolist(), above.parents[1:].tolist(), strict=True), 1):
        paths.append((*paths[parent], row))
        tails.append((*tails[parent][kept:], token) if kept else (token,))
    best, costs = above.best(most).tolist(), (-above.path_log_probs).tolist()
    depths, rows = above.depths.tolist(), above.draft_rows.tolist()
    return (
        [(costs[row], depths[row], paths[row], tails[row]) for row in best],
        {path: row for path, row in zip(paths, rows, strict=True) if row >= 0},
    )


def _expected(nodes: list[Node]) -> float:
    """E(A) of the nodes, of which the root is the first."""
    return sum(exp(-node[0]) for node in nodes[1:])


def _tree(nodes: list[Node], rows: dict[Path, int]) -> Tree:
    """Return the tree of the nodes, in the order in which the loop would draft them."""
    order = sorted(nodes, key=lambda node: node[1:3])
    place = {path: row for row, (_, _, path, _) in enumerate(order)}
    return Tree.sound(
        tokens=np.array([tail[-1] for _, _, _, tail in order]),
        parents=np.array([place[path[:-1]] if path else -1 for _, _, path, _ in order]),
        path_log_probs=0.0 - np.array([cost for cost, _, _, _ in order]),
        draft_rows=np.array([rows.get(path, -1) for _, _, path, _ in order]),
        depths=np.array([depth for _, depth, _, _ in order]),
    )
