"""The tree rule of the published OPT-Tree code, for comparison with the paper's rule in `opt_tree.policy`.

Written from its description, on this library's correct masks: every layer is n wide, the gain that stops drafting is
the previous layer's, and the newest layer, drafted and paid for, is left out.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.methods.policies.registry import register
from opt_tree.methods.policies.talon import LayerBest
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@register("published", about="the tree that OPT-Tree's published code grows", paper="2406.17276")
@dataclass(frozen=True)
class PublishedRule(TreePolicy):
    """OPT-Tree's tree as the published code grows it."""

    nodes: int = 60
    threshold: float = 0.5
    max_depth: int = 10

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)

    @property
    def children(self) -> LayerBest:
        return LayerBest(total=self.nodes)

    def _best(self, pool: CandidatePool, layers: int) -> Int[np.ndarray, " best"]:
        order = np.argsort(-pool.path_log_probs, kind="stable")
        return order[pool.depths[order] <= layers][: self.nodes + 1]

    def _expected(self, pool: CandidatePool, layers: int) -> float:
        """E(A) of the best nodes of so many layers."""
        return float(np.exp(pool.path_log_probs[self._best(pool, layers)[1:]]).sum())

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the whole newest layer while the layer before it paid."""
        gain = self._expected(pool, pool.depth - 1) - self._expected(pool, pool.depth - 2)
        return None if pool.depth > 1 and gain <= self.threshold else pool.newest

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return self._best(pool, max(1, pool.depth - 1))
