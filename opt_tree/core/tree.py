"""A draft tree: which tokens the target is asked about, and how they hang together.

Owns the shape of a tree and what follows from it (depths, ancestors, E(A)). Knows nothing of models, devices or of how
the tree was grown. Trees are small integers, so they live on the host as numpy arrays; only `draft_log_probs` is a
tensor, on the drafter's device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core.errors import require


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree in topological order; row 0, the root, is the last committed token.

            0 the          tokens  = [the, cat, dog, sat, ran]
           /     \\         parents = [ -1,   0,   0,   1,   1]
        1 cat   2 dog      depths  = [  0,   1,   1,   2,   2]
        /    \\
     3 sat  4 ran

    Invariant: `parents[0] == -1` and `0 <= parents[i] < i` for every other row.
    """

    tokens: Int[np.ndarray, " rows"]
    parents: Int[np.ndarray, " rows"]
    path_log_probs: Float[np.ndarray, " rows"]
    """The drafter's log-probability of the path from the root to the row, the root excluded: the root's is 0."""
    draft_rows: Int[np.ndarray, " rows"]
    """0 for the root, k for the k-th node handed to the drafter for expansion, -1 for a node never expanded."""
    draft_log_probs: Float[Tensor, "expanded vocab"] | None = None
    """The drafter's distributions, indexed by `draft_rows`; kept only where the children were sampled from them."""

    def __post_init__(self) -> None:
        require(np.ndarray, tokens=self.tokens, parents=self.parents, path_log_probs=self.path_log_probs)
        require(np.ndarray, draft_rows=self.draft_rows)
        root, *parents = self.parents.tolist()
        if root != -1 or not all(0 <= parent < row for row, parent in enumerate(parents, start=1)):
            raise ValueError(f"not in topological order, or more than one root: parents {[root, *parents]}")

    @classmethod
    def sound(cls, **fields: Any) -> "Tree":
        """Return a tree of arrays that are known to be one: nothing is checked. What follows from it may be given."""
        tree = cls.__new__(cls)
        vars(tree).update(fields)
        return tree

    def __len__(self) -> int:
        """Rows of the tree, the root included."""
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        """Drafted nodes: rows without the root. The budget of every policy counts these."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> Int[np.ndarray, " rows"]:
        """Edges between the root and each row."""
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths)

    @cached_property
    def ancestors(self) -> Bool[np.ndarray, "rows rows"]:
        """`ancestors[i, j]`: row j is row i or above it. As an attention mask: what row i may see of the tree."""
        return ancestor_mask(self.parents)

    @property
    def expected_accepted(self) -> float:
        """E(A): the sum of path probabilities over drafted nodes, root excluded (arXiv:2406.17276, section 3)."""
        return float(np.exp(self.path_log_probs[1:], dtype=np.float64).sum())

    def path_to(self, row: int) -> Int[np.ndarray, " path"]:
        """Rows from the root to `row`, both included."""
        return self.ancestors[row].nonzero()[0]


_FIRST, _NONE, _CERTAIN = np.array([0]), np.array([-1]), np.array([0.0])


def alone(root: int) -> Tree:
    """Return the tree of a root without nodes: plain decoding."""
    return Tree(np.array([root]), _NONE, _CERTAIN, _FIRST)


def ancestor_mask(parents: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, "rows rows"]:
    """Return which rows are a row's ancestors, the row itself included. Parents must stand before their children."""
    seen: list[int] = []  # by each row, a bit a row: joining two integers takes a tenth of joining two rows of numpy
    for row, parent in enumerate(parents.tolist()):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << row)
    width = len(seen) // 8 + 1
    packed = np.frombuffer(b"".join([bits.to_bytes(width, "little") for bits in seen]), np.uint8)
    return np.unpackbits(packed.reshape(-1, width), 1, len(seen), "little").view(bool)


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can read a tensor where it lies. Where it cannot, reading costs a synchronisation: see `fetch`."""
    return tensor.is_cpu


def fetch(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host. Every read-back from a device goes through here, so that they can be counted."""
    return [tensor.cpu().numpy() for tensor in tensors]
