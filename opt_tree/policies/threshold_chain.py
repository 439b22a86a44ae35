"""A chain as long as the drafter is sure of it: DDD's rule on one path, as AdaEAGLE compares it (arXiv:2412.18910)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.core.children import TopK
from opt_tree.core.pool import CandidatePool
from opt_tree.policies.base import check_sizes
from opt_tree.policies.registry import DEPTH, register


@dataclass(frozen=True)
class ThresholdChain:
    """Draft the best token behind the best token while the path's probability is at least `threshold`.

    With `least` the chain is that long in any case, so that a predicted length and the threshold together draft the
    longer of the two (AdaEAGLE's second form, "AdaEAGLE-DDD"). What was drafted is scored. Threshold .4:

        root - .6 - .42 - .294        .294 < .4: nothing is drafted below it

        decoder = Decoder(pair.target, pair.drafter, ThresholdChain(8, 0.5))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    nodes: int = 8
    """The longest chain."""
    threshold: float = 0.55
    """Least probability of the path worth another token; the paper's best is exp(-0.6)."""
    least: int = 0
    """Tokens that are drafted whatever their probability."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes)
        if not 0 <= self.least <= self.nodes:
            raise ValueError(f"least must lie in 0..nodes, got {self.least} of {self.nodes}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a probability, got {self.threshold}")

    @property
    def children(self) -> TopK:
        return TopK(1)

    @property
    def max_depth(self) -> int:
        return self.nodes

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        rows = pool.newest
        sure = bool((pool.path_log_probs[rows] >= (math.log(self.threshold) if self.threshold else -math.inf)).all())
        return rows if pool.depth < self.nodes and (pool.depth < self.least or sure) else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.arange(len(pool.tokens))


@register("threshold_chain", about="one path, while its probability is above a threshold", paper="2412.18910")
def _at_budget(nodes: int, threshold: float = ThresholdChain.threshold, least: int = 0) -> ThresholdChain:
    return ThresholdChain(min(nodes, DEPTH), threshold, least)
