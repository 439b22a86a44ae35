"""OPT-Tree: the tree that maximises the expected acceptance length under a node budget (arXiv:2406.17276)."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np
from jaxtyping import Int

from opt_tree.children import TopK
from opt_tree.errors import require
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class OptTree(TreePolicy):
    """Maximise E(A) under a node budget; draft another layer while it pays (arXiv:2406.17276, Alg. 1).

    The path probability of a node never exceeds its parent's, so the n best candidates are a tree (Thm 3.1) and their
    sum is E(A). With `threshold=0` drafting ends by itself when no unexpanded candidate is among the n best: no
    descendant can enter any more, and the tree is optimal over all trees of n nodes and `max_depth` layers.
    Example, n = 3, root distribution (.6, .3, .1), below the first child (.45, .4, .15):

          root            layer 1: .6 .3 .1    E = 1.0
         /    \\           layer 2: .27 .24     the best three are now .6 .3 .27: gain .17, the .1 is out
       .6      .3
       |
      .27                 E(A) = 1.17
    """

    nodes: int = 60
    """The paper's n: drafted nodes sent to the target, root excluded."""
    threshold: float = 0.5
    """The paper's delta: drafting stops when the newest layer raised E(A) by no more than this. 0.5 is the value of the
    published commands. Of a calibrated drafter 0.2 loses nothing and 0.5 a few per cent; a small bare one wants 0 to
    0.05, and loses 17 to 28 % of its tokens at 0.5 (results/thresholds.md). The paper takes a value between the time of
    a draft step, in decoding steps, and 1 (section 4.4)."""
    max_depth: int = 10
    """Layers drafted at most, the published commands' number (the paper's is n). All of them can be in the tree."""

    def __post_init__(self) -> None:
        require(Real, nodes=self.nodes, threshold=self.threshold, max_depth=self.max_depth)
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes} (for plain decoding use Static.empty())")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)
        if self.nodes != int(self.nodes) or self.max_depth != int(self.max_depth):
            raise ValueError(f"nodes and max_depth must be whole numbers, got {self.nodes} and {self.max_depth}")

    @cached_property
    def children(self) -> TopK:
        # A candidate outside the pool's n best can never come back, nor can anything below it.
        return TopK(total=self.nodes)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the newest nodes above the n-th best candidate (only their descendants can be among the n best)."""
        # E_sub(T, n) with the newest layer minus E_sub without it.
        if pool.gain(self.nodes) <= self.threshold:
            return None
        # Whoever only equals the n-th best cannot have a child above it, and ties go to the older node.
        floor, newest = pool.floor, pool.path_log_probs[pool.layer :].tolist()
        frontier = [row for row, path in enumerate(newest, pool.layer) if path > floor]
        return np.array(frontier) if frontier else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return pool.best(self.nodes)
