"""A chain as long as the drafter is sure of it: DDD's rule on one path, as AdaEAGLE compares it (arXiv:2412.18910)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.children import TopK
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class Chain(TreePolicy, ABC):
    """One path, drafted on while `goes_on` says so. What was drafted is scored."""

    nodes: int = 8
    """The longest chain."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes)

    @property
    def children(self) -> TopK:
        return TopK(1)

    @property
    def max_depth(self) -> int:
        return self.nodes

    @abstractmethod
    def goes_on(self, pool: CandidatePool) -> bool:
        """Whether a token is drafted below the newest one."""

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        rows = pool.newest
        return rows if len(rows) and pool.depth < self.nodes and self.goes_on(pool) else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.arange(len(pool.tokens))


@dataclass(frozen=True)
class ThresholdChain(Chain):
    """Draft the best token behind the best token while the path's probability is at least `threshold`.

    With `least` the chain is that long in any case, so that a predicted length and the threshold together draft the
    longer of the two (AdaEAGLE's second form, "AdaEAGLE-DDD"). Threshold .4:

        root - .6 - .42 - .294        .294 < .4: nothing is drafted below it

        decoder = Decoder(pair.target, pair.drafter, ThresholdChain(8, 0.5))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    threshold: float = 0.55
    """Least probability of the path worth another token; the paper's best is exp(-0.6)."""
    least: int = 0
    """Tokens that are drafted whatever their probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= self.nodes:
            raise ValueError(f"least must lie in 0..nodes, got {self.least} of {self.nodes}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a probability, got {self.threshold}")

    def goes_on(self, pool: CandidatePool) -> bool:
        sure = pool.path_log_probs[pool.newest[0]] >= (math.log(self.threshold) if self.threshold else -math.inf)
        return bool(sure) or pool.depth < self.least


@register("threshold_chain", about="one path, while its probability is above a threshold (DDD)", paper="2409.00142")
def _at_budget(nodes: int, threshold: float = ThresholdChain.threshold, least: int = 0) -> ThresholdChain:
    return ThresholdChain(min(nodes, DEPTH), threshold, least)
