"""JetSpec's tree: the likeliest node gets its best children, all at once, until the nodes are spent."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.children import TopK
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@register(
    "jetspec",
    about="the likeliest node gets its best children, seven at once, then the next one (JetSpec)",
    paper="2606.18394",
)
@dataclass(frozen=True)
class JetSpecTree(TreePolicy):
    """Take the likeliest node, add its `width` best children, and go on with the next one (arXiv:2606.18394, Alg. 1).

    A node waits in a heap, ranked by the probability of its path, from the moment it is added; the root is the first.
    The last node gets as many children as are left.

    It is not the best tree: `OptTree` chooses every node, this rule the parents alone, whose unlikely children come
    along. With as many nodes and layers its E(A) is never above that of OPT-Tree at threshold 0. DDTree's
    (arXiv:2604.12989), from one heap as well, adds a node at a time, and is OPT-Tree's.

    The paper grows it over what one forward says of every depth, where a layer costs nothing. Over other drafters each
    layer is a forward, of every node that the heap may still come to.

    Example, width = 2, nodes = 5, the distributions of `Eagle2`'s; the number is the place in the order of the heap:

                    root 1
                   /      \\
              .6 2          .3         two nodes, then two more; one is left
             /    \\
        .42 3      .12
         |
       .294                            of two children the better one

        pair = load_pair("demo", "dspark:demo")
        answer = Decoder(pair.target, pair.drafter, JetSpecTree(60)).generate(pair.encode("Why is the sky blue?"))
        answer.mean_acceptance_length, answer.steps[0].tree.nodes
    """

    nodes: int = 255
    """Drafted nodes sent to the target, root excluded. The paper's budgets, up to 256, count the root."""
    width: int = 7
    """Children of a node: the paper's W."""
    max_depth: int = DEPTH
    """Layers drafted at most. The paper has as many as a block drafts: it is trained on blocks of 16."""

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, width=self.width, max_depth=self.max_depth)

    @property
    def children(self) -> TopK:
        return TopK(per_node=self.width)

    def _left(self, pool: CandidatePool) -> Int[np.ndarray, " pool"]:
        """How many nodes are left to add when the heap comes to each candidate, as far as is drafted."""
        order = (-pool.path_log_probs).argsort(kind="stable")
        counts = np.bincount(pool.parents[1:], minlength=pool.size)
        left = np.empty_like(counts)
        left[order] = self.nodes - counts[order].cumsum() + counts[order]
        return left

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        # Children that are not drafted yet count as none: whatever the heap can come to is among these.
        return pool.newest[self._left(pool)[pool.layer :] > 0] if pool.depth < self.max_depth else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        # Siblings are stored one after another, the best first, and groups of them as their parents are.
        ranks = np.arange(pool.size) - pool.parents.searchsorted(pool.parents)
        taken = ranks < self._left(pool)[pool.parents]
        taken[0] = True
        return taken.nonzero()[0]
