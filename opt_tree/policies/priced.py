"""The tree that is worth its seconds: every node and every layer has to earn what it costs on this machine."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from opt_tree.children import TopK
from opt_tree.policies.costs import Costs
from opt_tree.pool import CandidatePool

KNOTS = tuple(np.log((0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)).tolist())
"""Path log-probabilities at which calibration is learned."""


CARRY = 0.7
"""The surplus of a layer in parts of the one above it, where nothing is known."""


@dataclass(frozen=True)
class Priced:
    """Maximise E(A) less the price of the step's seconds, at `rate` tokens a second.

    Tokens a second in the long run is a sum over a sum. Where it is at its maximum, a second is worth `rate` tokens,
    and each step maximises sum p - rate * seconds (Dinkelbach, Management Science 13, 1967). A node's seconds are those
    of a row, so exactly the candidates above p = rate * row are kept: a tree, as a child is never more probable than
    its parent. A layer is drafted where the surplus expected of it, sum (p - rate * row), exceeds its own price.

    What is learned from step to step (`rate`, `trust`, `carry`, `context`) is `Auto`'s; policies that differ in
    nothing else are equal. Example, rate * row = .1: of .6 .3 .08 the first two are kept, with a surplus of .7.
    """

    costs: Costs
    nodes: int = 64
    """Drafted nodes sent to the target at most."""
    max_depth: int = 10
    """Layers drafted at most."""
    rate: float = field(default=0.0, compare=False)
    """Tokens a second: what time is worth. 0: nothing, all `nodes` are kept."""
    context: int = field(default=0, compare=False)
    """Tokens before the tree."""
    trust: tuple[float, ...] = field(default=KNOTS, compare=False)
    """What path log-probabilities of `KNOTS` have turned out to be; rising. Between and below, the same shift."""
    carry: tuple[float, ...] = field(default=(), compare=False)
    """By depth, from 1: the surplus of the layer below in parts of this one's; `CARRY` where nothing is known."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.max_depth < 1:
            raise ValueError(f"nodes and max_depth must be at least 1, got {self.nodes} and {self.max_depth}")

    @property
    def children(self) -> TopK:
        return TopK(total=self.nodes)

    def surplus(self, path_log_probs: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
        """What nodes of these path log-probabilities are worth, less the price of their rows."""
        below = np.minimum(path_log_probs - KNOTS[0], 0)  # -inf stays what it is
        worth = np.exp(np.interp(path_log_probs, KNOTS, self.trust) + below)
        return worth - self.rate * self.costs.at(self.context).row

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the newest nodes whose children are expected to earn their row, if together they earn the layer."""
        costs, newest = self.costs.at(self.context), pool.path_log_probs[pool.layer :]
        carry = self.carry[pool.depth - 1] if pool.depth <= len(self.carry) else CARRY
        expected = carry * self.surplus(newest) - self.rate * costs.draft_row
        chosen = (expected > 0) & (newest > pool.floor)
        if not expected[chosen].sum() > self.rate * costs.layer:
            return None
        return pool.layer + chosen.nonzero()[0]

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        """Keep what is above its price; nothing at all where together it does not pay for scoring a tree."""
        costs, best = self.costs.at(self.context), pool.best(self.nodes)[1:]
        surplus = self.surplus(pool.path_log_probs[best])
        kept = surplus > 0
        if surplus[kept].sum() <= self.rate * (costs.step + costs.row - costs.plain):
            return np.array([0])
        return np.append(0, best[kept])
