"""Trees of fixed shape with drawn children: chains, parallel chains, k-ary and delayed trees."""

from dataclasses import dataclass
from math import prod

import numpy as np
from jaxtyping import Int

from opt_tree.children import Children
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class Sampled(TreePolicy):
    """Draw `widths[d]` children below every node of depth d, with replacement (`IID`) or without.

    What is drafted never depends on which tokens come out, so that every verifier of such children is exact.
    `Sampled((3, 1))`, three parallel chains of two, might come out like this; equal siblings stay separate nodes, and
    verifiers treat them as one node with the children of both (arXiv:2602.16994, section 3.2):

              root
            /   |  \\
           a    b   a
           |    |   |
           c    a   b

        decoder = Decoder(pair.target, pair.drafter, Sampled.chains(3, 5), traversal)
        decoder.generate(ids, sampling=Sampling(1.0)).mean_acceptance_length
    """

    widths: tuple[int, ...]
    """Children of a node, by its depth."""
    replacement: bool = True

    def __post_init__(self) -> None:
        _ = self.children  # which checks the widths
        check_sizes(nodes=self.nodes)

    @classmethod
    def chain(cls, length: int) -> "Sampled":
        """One sampled path: classic speculative sampling, or block verification."""
        check_sizes(0, length=length)
        return cls((1,) * length)

    @classmethod
    def chains(cls, k: int, length: int) -> "Sampled":
        """`k` independent paths, as in the comparison of arXiv:2602.16994."""
        check_sizes(0, length=length)
        return cls((k,) + (1,) * (length - 1))

    @classmethod
    def kary(cls, k: int, depth: int, replacement: bool = True) -> "Sampled":
        """Every node has `k` children, `depth` layers deep."""
        check_sizes(0, depth=depth)
        return cls((k,) * depth, replacement)

    @classmethod
    def delayed(cls, trunk: int = 2, branches: int = 3, length: int = 4) -> "Sampled":
        """A trunk of tokens, then independent branches from its end (arXiv:2602.16994, Def. 5.2: L1, K, L2).

        Drafter and target part with depth, so siblings near the root are wasted on what one child would have done.
        Without a trunk they are parallel chains, without a length a chain. Trunk 2, two branches of length 2:

            root - a - c
                      / \\
                     a   b
                     |   |
                     b   b
        """
        check_sizes(0, trunk=trunk, length=length)
        check_sizes(branches=branches)
        return cls((1,) * trunk + (branches,) * min(length, 1) + (1,) * (length - 1))

    @property
    def nodes(self) -> int:
        """Drafted nodes; fewer without replacement where fewer tokens are possible."""
        return sum(prod(self.widths[: depth + 1]) for depth in range(len(self.widths)))

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @property
    def children(self) -> Children:
        return IID(self.widths) if self.replacement else WithoutReplacement(self.widths)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        return pool.newest if pool.depth < self.max_depth else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.arange(len(pool.tokens))


@register("chains", about="k independent paths", paper="2305.09781")
def _chains(nodes: int, k: int = 3) -> Sampled:
    check_sizes(k=k)
    if k > nodes:
        raise ValueError(f"{k} chains need at least {k} nodes, the budget is {nodes}")
    return Sampled.chains(k, min(nodes // k, DEPTH))


@register("delayed", about="one path first, then branches", paper="2602.16994")
def _delayed(nodes: int, branches: int = 3, trunk: int = 2, length: int | None = None) -> Sampled:
    """Without a length, branches as long as the budget allows."""
    check_sizes(branches=branches)
    trunk = min(trunk, nodes)
    if length is None:
        length = min((nodes - trunk) // branches, DEPTH - trunk)
    return Sampled.delayed(trunk, branches, length)
