"""A draft tree: which tokens the target is asked about, and how they hang together. Its arrays are the host's."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.errors import require


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree in topological order; row 0, the root, is the last token of the text.

            0 the          tokens  = [the, cat, dog, sat]
           /     \\         parents = [ -1,   0,   0,   1]
        1 cat   2 dog      depths  = [  0,   1,   1,   2]
          |
        3 sat

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
        require(np.ndarray, **{n: getattr(self, n) for n in ("tokens", "parents", "path_log_probs", "draft_rows")})
        root, *parents = self.parents.tolist()
        if root != -1 or not all(0 <= parent < row for row, parent in enumerate(parents, start=1)):
            raise ValueError(f"not in topological order, or more than one root: parents {[root, *parents]}")

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> "Tree":
        """Return a tree that no drafter drew: nothing is said of its paths, and none of its nodes was expanded."""
        drafted = np.full(len(tokens), -1)
        drafted[0] = 0
        return cls(np.array(tokens), np.array(parents), np.zeros(len(tokens)), drafted)

    def __len__(self) -> int:
        """Rows of the tree, the root included."""
        return len(self.tokens)

    def ending_at(self, tokens: Collection[int]) -> "Tree":
        """Return the tree without what lies below nodes of these tokens, at which a text ends."""
        if not tokens or set(tokens).isdisjoint(self.tokens[1:].tolist()):
            return self
        kept, over = [0], {0: False}
        for row, (token, parent) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if row and not over.get(parent, True):
                kept.append(row)
                over[row] = token in tokens
        rows = np.array(kept)
        parents = np.append(-1, rows.searchsorted(self.parents[rows[1:]]))
        return Tree(self.tokens[rows], parents, self.path_log_probs[rows], self.draft_rows[rows], self.draft_log_probs)

    @property
    def nodes(self) -> int:
        """Drafted nodes: rows without the root. The budget of every policy counts these."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> Int[np.ndarray, " rows"]:
        """Edges between the root and each row."""
        return self.ancestors.sum(1) - 1

    @cached_property
    def ancestors(self) -> Bool[np.ndarray, "rows rows"]:
        """`ancestors[i, j]`: row j is row i or above it. As an attention mask: what row i may see of the tree."""
        seen = np.eye(len(self), dtype=bool)
        for row, parent in enumerate(self.parents[1:].tolist(), start=1):
            seen[row] |= seen[parent]
        return seen

    @property
    def expected_accepted(self) -> float:
        """E(A): the sum of path probabilities over drafted nodes, root excluded (arXiv:2406.17276, section 3)."""
        return float(np.exp(self.path_log_probs[1:], dtype=np.float64).sum())

    def path_to(self, row: int) -> Int[np.ndarray, " path"]:
        """Rows from the root to `row`, both included."""
        return self.ancestors[row].nonzero()[0]


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can read a tensor where it lies. Where it cannot, reading costs a synchronisation: see `fetch`."""
    return tensor.is_cpu


def fetch(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host: those of one device in one read, for which the host waits once."""
    # Every read-back goes through here and can be counted, but for copies that are begun before the wait.
    if len(tensors) == 1 or len({tensor.device for tensor in tensors}) > 1 or on_host(tensors[0]):
        return [tensor.cpu().numpy() for tensor in tensors]
    block = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]).cpu()
    parts = zip(block.split([tensor.nbytes for tensor in tensors]), tensors, strict=True)
    # Clones, as a part may begin where its numbers cannot.
    return [part.clone().view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in parts]


def send(array: np.ndarray | Tensor | list[int], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return what lies on the host as a tensor of a device, cast before; on the host itself the numbers are shared."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.as_tensor(array)
    tensor = tensor if dtype is None else tensor.to(dtype)
    # The host does not wait: what is not pinned is staged before the call returns.
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
