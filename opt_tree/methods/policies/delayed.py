"""Delayed tree expansion: a single path first, branches where the drafter begins to err (arXiv:2602.16994)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class Delayed(TreePolicy):
    """Draw a trunk of tokens, then independent branches from its end (arXiv:2602.16994, Def. 5.2: K, L1, L2).

    Drafter and target part with depth, so siblings near the root are wasted on what one child would have done; every
    node's children are i.i.d. given the node, so the verifiers of `IID` stay exact. Trunk 2, two branches of length 2:

        root - a - c
                  / \\
                 a   b
                 |   |
                 b   b

        decoder = Decoder(pair.target, pair.drafter, Delayed(trunk=2, branches=3, length=4), multi_round)
        decoder.generate(ids, sampling=Sampling(1.0)).mean_acceptance_length
    """

    trunk: int = 2
    """The paper's L1: tokens before the branching point; 0 for parallel chains."""
    branches: int = 3
    """The paper's K."""
    length: int = 4
    """The paper's L2: tokens of each branch; 0 for a chain."""

    def __post_init__(self) -> None:
        if self.trunk < 0 or self.length < 0 or self.branches < 1:
            raise ValueError(
                "trunk and length must be 0 or more and branches at least 1, "
                f"got {self.trunk}, {self.length} and {self.branches}"
            )
        _ = self.children if self.nodes == 0 else None  # which refuses an empty tree
        check_sizes(nodes=self.nodes)

    @property
    def nodes(self) -> int:
        return self.trunk + self.branches * self.length

    @property
    def max_depth(self) -> int:
        return self.trunk + self.length

    @property
    def children(self) -> IID:
        return IID((1,) * self.trunk + (self.branches,) * min(self.length, 1) + (1,) * (self.length - 1))

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        return pool.newest if pool.depth < self.max_depth else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.arange(len(pool.tokens))


@register("delayed", about="one path first, then branches", paper="2602.16994")
def _at_budget(nodes: int, branches: int = 3, trunk: int = 2, length: int | None = None) -> Delayed:
    """Without a length, branches as long as the budget allows."""
    trunk = min(trunk, nodes)
    return Delayed(trunk, branches, min((nodes - trunk) // branches, DEPTH - trunk) if length is None else length)
