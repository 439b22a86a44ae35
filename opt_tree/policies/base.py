"""What a tree policy answers: which candidates to draft below next, and which go to the target."""

from numbers import Real
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from opt_tree.core.children import Children
from opt_tree.core.errors import require
from opt_tree.core.pool import CandidatePool

MOST_NODES = 4096
"""Drafted nodes of a tree at most. Attention takes a number for each pair of rows: 64 MiB a head at this size."""


def check_sizes(least: int = 1, /, **sizes: float) -> None:
    """Raise TypeError or ValueError unless all are numbers from `least` to `MOST_NODES`.

    A tree of so many nodes has no more layers, and no node in it more children.
    """
    require(Real, **sizes)
    for name, size in sizes.items():
        if not size >= least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if size > MOST_NODES:
            raise ValueError(f"{name} must be at most {MOST_NODES}, got {size}")


@runtime_checkable
class TreePolicy(Protocol):
    """Grows a tree. A frozen dataclass without state: everything it may look at is in the pool."""

    @property
    def children(self) -> Children:
        """How siblings are picked; a verifier is valid for some kinds only."""
        ...

    @property
    def max_depth(self) -> int:
        """Layers it drafts at most; 0 is the empty tree, that is plain decoding."""
        ...

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Return the rows of the newest layer whose children are drafted next, or None to stop.

        Asked after every layer; the children are the next one.
        """
        ...

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        """Return the pool rows that go to the target: the root among them, closed under parents."""
        ...
