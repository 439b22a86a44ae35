"""The tree that is worth its seconds: every node and every layer has to earn what it costs on this machine."""

from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
from jaxtyping import Float, Int

from opt_tree.children import TopK
from opt_tree.errors import require
from opt_tree.methods.policies.costs import LARGEST, Costs
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool

KNOTS = tuple(np.log((0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)).tolist())
"""Path log-probabilities at which calibration is learned."""
FAR = -60.0
"""How much further down a probability is as good as none."""

CARRY = 0.7
"""The surplus of a layer in parts of the one above it, where nothing is known."""


@dataclass(frozen=True)
class Priced(TreePolicy):
    """Maximise E(A) less the price of the step's seconds, at `rate` tokens a second.

    Tokens a second in the long run is a sum over a sum. Where it is at its maximum, a second is worth `rate` tokens,
    and each step maximises sum p - rate * seconds (Dinkelbach, Management Science 13, 1967). With T the seconds of
    scoring a tree by its rows, the k best candidates go to the target for the k of the largest p_1 + ... + p_k - rate *
    T(1 + k), none included: a tree, as a child is never more probable than its parent. With D the seconds of a layer by
    its rows, and g_i what the children of the i-th best of the newest layer are expected to bring beyond their rows,
    a layer is drafted where some k has g_1 + ... + g_k > rate * D(k), from the k of the largest difference.

    In a batch `rate` is a lane's and the seconds are the batch's.

    What is known of a step alone (`now`, `rate`, `trust`, `carry`) is `Auto`'s; policies that differ in nothing else
    are equal. Example, rate * (a row) = .1: of .6 .3 .08 the first two are kept, with a surplus of .7.

    Others weigh a tree against its cost, too: SMART expands a node while its benefit over its cost exceeds the tree's
    speed-up (arXiv:2604.09731), CaDDTree searches the budget of most tokens a second (arXiv:2606.01813), Yggdrasil and
    CAST choose a tree by latency (arXiv:2512.23858, 2510.26577). EAGLE-4 is said to size its trees by a cost model; its
    text could not be read.
    """

    costs: Costs
    nodes: int = 64
    """Drafted nodes sent to the target at most: below `costs.LARGEST`."""
    max_depth: int = 10
    """Layers drafted at most."""
    rate: float = field(default=0.0, compare=False)
    """Tokens a second: what time is worth. 0: nothing, all `nodes` are kept."""
    now: Costs | None = field(default=None, compare=False)
    """What the step costs, behind its context and beside other lanes; None: `costs`."""
    trust: tuple[float, ...] = field(default=KNOTS, compare=False)
    """What path log-probabilities of `KNOTS` have turned out to be; rising. Linear between; below, the same shift."""
    carry: tuple[float, ...] = field(default=(), compare=False)
    """By depth, from 1: the surplus of the layer below in parts of this one's; `CARRY` where nothing is known."""

    def __post_init__(self) -> None:
        require(Integral, nodes=self.nodes, max_depth=self.max_depth)
        if self.nodes >= LARGEST:
            raise ValueError(f"nodes must be below {LARGEST}, the rows that costs are known of, got {self.nodes}")
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)

    @property
    def children(self) -> TopK:
        return TopK(total=self.nodes)

    @property
    def _now(self) -> Costs:
        return self.now or self.costs

    @property
    def _price(self) -> float:
        """Of a row of a small tree, in tokens."""
        return self.rate * self._now.row

    def worth(self, path_log_probs: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
        """The probabilities that nodes of these path log-probabilities have turned out to have."""
        trusted = np.interp(path_log_probs, (KNOTS[0] + FAR, *KNOTS), (self.trust[0] + FAR, *self.trust))
        return np.exp(trusted)

    def surplus(self, path_log_probs: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
        """What nodes of these path log-probabilities are worth, less the price of a row of a small tree."""
        return self.worth(path_log_probs) - self._price

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand as many of the newest nodes as their children are expected to earn most with, the layer's price paid.

        A child earns what it is worth beyond a row's average price, as how large the tree will be is not known yet; and
        beyond what its row costs in the tree as it is: a further row, or the last node, which it pushes out.
        """
        carry = self.carry[pool.depth - 1] if pool.depth <= len(self.carry) else CARRY
        newest = pool.path_log_probs[pool.layer :]
        able = (newest > pool.floor).nonzero()[0]
        if not len(able):
            return None
        surplus = self.worth(newest[able]) - max(self._price, self._row_now(pool))
        order = (-surplus).argsort(kind="stable")
        earned = carry * surplus[order].cumsum()
        most = int(earned.argmax()) + 1  # further rows would earn less, whatever the layer costs
        gain = earned[:most] - self.rate * self._now.layers(most)
        best = int(gain.argmax())
        if not gain[best] > 0:
            return None
        rows = able[order[: best + 1]]
        rows.sort()
        return pool.layer + rows

    def _row_now(self, pool: CandidatePool) -> float:
        """The price of one more row of the tree that would be selected now: the last node's worth, if that is less."""
        best, worth, nodes = self._best(pool)
        further = self.rate * float(self._now.further(len(best))[nodes])
        return min(further, float(worth[nodes])) if 0 < nodes < len(best) - 1 else further

    def _best(self, pool: CandidatePool) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"], int]:
        """The best candidates, what they are worth, and how many of them together most beyond the price of scoring.

        The root, which is the first, is there anyway.
        """
        best = pool.best(self.nodes)
        worth = self.worth(pool.path_log_probs[best])
        worth[0] = 0.0
        return best, worth, int((worth.cumsum() - self.rate * self._now.scores(len(best))).argmax())

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        """Keep as many of the best as together are worth most beyond the price of scoring them; maybe none."""
        best, _, nodes = self._best(pool)
        return best[: nodes + 1]
