"""OPT-Tree for several sequences at once: one budget for all their trees, hence one price of a node in all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.core.children import TopK
from opt_tree.core.meeting import Table, meet
from opt_tree.core.pool import CandidatePool
from opt_tree.policies.base import MOST_NODES, check_sizes
from opt_tree.policies.registry import register


@register(
    "shared",
    about="OPT-Tree with one price of a node in all lanes; the budget is their average",
    paper="2406.17276",
)
@dataclass(frozen=True)
class Shared(Table):
    """Maximise the sum of E(A) over all lanes under the sum of their budgets (OPT-Tree, arXiv:2406.17276, jointly).

    The n best candidates of all pools together are a tree in each: the sum of E(A) has no larger value for n nodes, by
    the argument of the paper's Thm 3.1. So there is a price, the probability of the n-th best: above it a node is worth
    its row, whichever lane it is in. A lane whose drafter is unsure gets few nodes or none, and others get them.

    Example, two lanes, `nodes=2`: of .9 .8 .7 .05 and .3 .1 the best four are .9 .8 .7 and .3; E(A) is 2.7 in all. Two
    in each lane would be 2.1. Alone this is `OptTree(nodes, threshold, max_depth)`.
    """

    nodes: int = 8
    """Drafted nodes that go to the target in each step, on average a lane."""
    threshold: float = 0.0
    """Drafting stops in a lane when its newest layer raised its E(A) by no more than this."""
    max_depth: int = 10
    """Layers drafted at most."""
    most: int = 64
    """Nodes of one lane at most."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)
        if not self.nodes <= self.most <= MOST_NODES:
            raise ValueError(f"most must lie in nodes..{MOST_NODES}, got {self.most} for {self.nodes} nodes")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")

    @property
    def children(self) -> TopK:
        return TopK(total=self.most)

    def decide(self, brought: Sequence[CandidatePool]) -> list[tuple[int, float]]:
        """From all lanes' pools to each one's number of nodes and the price: the log-probability of the last node.

        While the pools are not full there is no price yet, -inf.
        """
        best = [pool.path_log_probs[pool.best(self.most)[1:]] for pool in brought]
        lanes, worth = np.repeat(np.arange(len(best)), [len(own) for own in best]), np.concatenate(best)
        chosen = (-worth).argsort(kind="stable")[: self.nodes * len(brought)]
        counts = np.bincount(lanes[chosen], minlength=len(brought)).tolist()
        price = float(worth[chosen[-1]]) if len(chosen) == self.nodes * len(brought) else -np.inf
        return [(count, price) for count in counts]

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the newest nodes above the price: no child is above its parent, so others can bring nothing."""
        count, price = meet(self, pool, last=False)
        newest = pool.path_log_probs[pool.layer :]
        rows = pool.layer + ((newest > price) & (newest > pool.floor)).nonzero()[0]
        return rows if len(rows) and pool.gain(count) > self.threshold else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        count, _ = meet(self, pool, last=True)
        return pool.best(count)
