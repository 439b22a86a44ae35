"""OPT-Tree for a target that samples: one drawn token in every sibling group (RheoSampling, arXiv:2609.21827)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.policies.registry import register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@register("rheo", about="the best token and one draw in every group of siblings", paper="2609.21827")
@dataclass(frozen=True)
class Rheo(TreePolicy):
    """Keep the `nodes` best candidates where one token of every sibling group is drawn instead of chosen.

    Above temperature 0 a deterministic child is accepted with p(child) only, a drawn one with up to the sum over all
    tokens of min(p, q). So each group is the best token, one draw from the rest of the distribution, and the next best
    ones. The draw is ranked by min(q_best, 1 - q_best): at least what any token of the rest has, whichever comes out;
    what is drafted below it may depend on that. So the paper has it by two summaries of its text, with one token before
    the draw (its m = 1); it grows EAGLE-3's trees, where growth and stop are `OptTree`'s here. Example, three nodes,
    root distribution (.5, .3, .2), where c is drawn, (.8, .1, .1) below a:

              root
             /    \\
          .5: a   .5: c (.2)        ranks; c's own path probability is .2, and b was ranked .3
          |
       .4: a                        below c: .2 times what follows, at most

        decoder = Decoder(pair.target, pair.drafter, Rheo(nodes=30), rheo)
        decoder.generate(ids, sampling=Sampling(1.0)).mean_acceptance_length
    """

    nodes: int = 60
    """Drafted nodes sent to the target, root excluded."""
    threshold: float = 0.5
    """Drafting stops when the newest layer raised the sum of the best candidates' ranks by no more than this."""
    max_depth: int = 10
    """Layers drafted at most."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")

    @property
    def children(self) -> BestAndDraw:
        return BestAndDraw(self.nodes)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        if pool.gain(self.nodes) <= self.threshold:
            return None
        return pool.newest[pool.path_log_probs[pool.layer :] > pool.floor]

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return pool.best(self.nodes)
