"""DySpec: a sampled tree that grows where it is most likely to be reached (arXiv:2410.11744)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.registry import register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@register("dyspec", about="distinct draws where they are likely to be reached", paper="2410.11744")
@dataclass(frozen=True)
class DySpec(TreePolicy):
    """Fill the `nodes` slots that verification is most likely to get to, each with a token drawn without replacement.

    A slot is the place of a next child below a node. Its value, known before its token is drawn, is the probability of
    getting there if the target were the drafter: the node's path probability times the mass that the siblings before it
    left over (the paper's v). Values fall along paths and along siblings, so what the paper's heap pops one after
    the other is simply the `nodes` best slots of the pool, drafted layer by layer: one forward a layer, not one a node.
    Nothing depends on a token before it is drawn, and a token once drawn stays.

    Example, four nodes, q = (.6, .3, .1) at every node; the slots' values, and below them what came out:

                root
             /        \\
          1: a         .4: c           second child of the root: 1 - .6
         /    \\
      .6: b  .42: a                    below a: .6, then .6 * (1 - .3); best of the rest: .36, below the second a

        decoder = Decoder(pair.target, pair.drafter, DySpec(nodes=30), without_replacement)
        decoder.generate(ids, sampling=Sampling(1.0)).mean_acceptance_length
    """

    nodes: int = 60
    """Drafted nodes sent to the target, root excluded."""
    threshold: float = 0.0
    """Only slots of a higher value are filled (the paper's threshold variant, its C about 1 / nodes): fewer layers."""
    max_depth: int = 10
    """Layers drafted at most."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must lie in [0, 1), got {self.threshold}")

    @property
    def children(self) -> WithoutReplacement:
        return WithoutReplacement(total=self.nodes)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the newest nodes whose first slot, worth their own path probability, can be filled."""
        return pool.newest[pool.path_log_probs[pool.layer :] > max(pool.floor, self._least)]

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        best = pool.best(self.nodes)
        return best[pool.reach[best] > self._least]

    @property
    def _least(self) -> float:
        return math.log(self.threshold) if self.threshold else -math.inf
