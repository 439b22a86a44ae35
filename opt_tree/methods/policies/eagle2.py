"""EAGLE-2's tree: a beam search that keeps everything it saw, then the best of it (arXiv:2406.16858)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.children import TopK
from opt_tree.methods.policies.registry import register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@register("eagle2", about="a beam of fixed depth, then the best of it", paper="2406.16858")
@dataclass(frozen=True)
class Eagle2(TreePolicy):
    """Grow a beam of `top_k` nodes for a fixed number of rounds, then rerank (arXiv:2406.16858, sections 4.1 and 4.2).

    Expansion: the root's `top_k` best tokens are the first beam. In each of `depth` rounds the beam is expanded, every
    node of it proposes its `top_k` best tokens, all top_k ** 2 of them join the pool, and the `top_k` of highest path
    probability are the next beam. Reranking: the `nodes` best of the whole pool are verified; of equal ones the
    shallower, so that they are a tree. Always 1 + `depth` draft forwards, and as many layers.

    Unlike `OptTree`, which is exact, a node outside a layer's best `top_k` is never expanded, and the depth does not
    look at the text. Example, top_k = 2, depth = 2, nodes = 6; the root's distribution is (.6, .3, .1), every other one
    (.7, .2, .1); what stands in brackets is in the pool but not in the tree:

                 root
               /      \\
            .6          .3             beam: both
           /  \\        /  \\
        .42  (.12)   .21  (.06)        beam: .42 and .21
        /  \\         /  \\
     .294 (.084)  .147 (.042)          six best: .6 .42 .3 .294 .21 .147

        pair = load_pair("demo", eagle="demo")
        answer = Decoder(pair.target, pair.drafter, Eagle2(nodes=30)).generate(pair.encode("Why is the sky blue?"))
        answer.mean_acceptance_length, answer.steps[0].tree.nodes
    """

    top_k: int = 10
    """Width of the beam, and tokens proposed by each of its nodes."""
    depth: int = 5
    """Rounds after the root's own; the paper's tree depth, 6, is one more."""
    nodes: int = 60
    """Drafted nodes sent to the target, root excluded: the paper's 60 for targets of 7B, 50 for 13B and 48 for 70B. The
    published code's `total_token` counts the root."""

    def __post_init__(self) -> None:
        check_sizes(top_k=self.top_k, nodes=self.nodes)
        check_sizes(0, depth=self.depth)

    @property
    def children(self) -> TopK:
        return TopK(per_node=self.top_k)

    @property
    def max_depth(self) -> int:
        return 1 + self.depth

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the `top_k` best of the newest layer, the beam."""
        if pool.depth > self.depth:
            return None
        newest = pool.newest
        return np.sort(newest[np.argsort(-pool.path_log_probs[newest], kind="stable")[: self.top_k]])

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return pool.best(self.nodes)
