"""OPT-Tree over a table, without layers: the best candidate so far is the next node of the tree.

Layers are for models, where a forward over many nodes costs what one over a single node does. A table is asked node by
node, and below nodes of the tree only; plain Python is all that runs. The tree is the loop's, to the rounding of a
logarithm.
"""

from bisect import insort
from heapq import heappop, heappush
from math import exp, inf, log

import numpy as np
from jaxtyping import Int

from opt_tree.drafters import Drafter
from opt_tree.drafters.ngram import Interpolated
from opt_tree.policies import OptTree, TreePolicy
from opt_tree.tree import Tree

Candidate = tuple[float, int, tuple[int, ...], int, int]
"""Minus its path's log-probability, its depth, the place of each node of its path among its siblings, the row of its
parent, its token. The less comes first: a better one, and of equals the one that the loop drafts first."""


def best_first(drafter: Drafter | None, policy: TreePolicy, context: list[int], limit: int) -> Tree | None:
    """Return the tree that the loop would grow, at most `limit` layers deep; None where it takes the loop.

    That is everywhere but for counts and an OPT-Tree which ends by itself.
    """
    if not isinstance(drafter, Interpolated) or type(policy) is not OptTree or policy.threshold:
        return None
    keep = 1 - drafter.order
    taken: list[Candidate] = [(0.0, 0, (), -1, context[-1])]
    tails = [tuple(context[-drafter.order :])]
    asked: list[int] = []  # the draft row of each node taken, -1 where nothing was asked behind it
    candidates: list[Candidate] = []
    costs: list[float] = []  # of all candidates so far, the least first
    while True:
        row = len(taken) - 1
        cost, depth, path, parent, token = taken[row]
        if row:
            tails.append((*tails[parent][keep:], token) if keep else (token,))
        asked.append(max(asked, default=-1) + 1 if row < policy.nodes and depth < limit else -1)
        if row == policy.nodes:
            break
        if depth < limit:
            # What exceeds the cost of as many candidates as there are nodes is in no tree.
            most = costs[policy.nodes - 1] if len(costs) >= policy.nodes else inf
            least = exp(cost - most) * (1 - 1e-9)
            for place, (follower, prob) in enumerate(drafter.law(tails[row]).items()):
                if prob >= least:
                    own = max(cost - log(prob), cost)
                    insort(costs, own)
                    heappush(candidates, (own, depth + 1, (*path, place), row, follower))
        if not candidates:
            break
        taken.append(heappop(candidates))
    return _tree(taken, np.array(asked))


def _tree(taken: list[Candidate], draft_rows: Int[np.ndarray, " rows"]) -> Tree:
    """Return the tree of the nodes taken, in the order in which the loop would draft them."""
    order = sorted(range(len(taken)), key=lambda row: taken[row][1:3])
    rows = {row: place for place, row in enumerate(order)}
    rows[-1] = -1
    costs, _, _, parents, tokens = zip(*(taken[row] for row in order), strict=True)
    above = np.array([rows[parent] for parent in parents])
    return Tree(np.array(tokens), above, 0.0 - np.array(costs), draft_rows[order])
