"""Everything drafted in one step, on the host: candidates, which were expanded, and the tree of the chosen ones."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from opt_tree.tree import Tree


class Frontier(NamedTuple):
    """The nodes handed to the drafter for expansion.

    Draft row 0 is the root, part of the drafter's context; row k is the k-th node expanded in this step, and column
    k - 1 of `visible`.
    """

    tokens: Int[np.ndarray, " frontier"]
    parents: Int[np.ndarray, " frontier"]
    """Draft rows of the nodes' parents."""
    depths: Int[np.ndarray, " frontier"]
    visible: Bool[np.ndarray, "frontier expanded"]
    """Which expanded nodes, this frontier's own included, each node may see: its ancestors and itself."""


class Picked(NamedTuple):
    """The children of one layer."""

    path_log_probs: Float[np.ndarray, " children"]
    """Log-probabilities of the paths from the root."""
    tokens: Int[np.ndarray, " children"]
    rows: Int[np.ndarray, " children"]
    """Rows of the frontier that they are children of."""


class CandidatePool:
    """Candidates in the order they were drafted: the root, then layer after layer. Policies read it and never write.

    Invariant: a parent is stored before its children and its reach is at least theirs, so that the n best by a stable
    sort are closed under parents, ties and zero probabilities included.
    """

    depth: int = 0
    """Layers drafted so far."""
    layer: int = 1
    """The pool row at which the newest layer begins."""

    def __init__(self, root: int, children: Any) -> None:
        """`children`: how they are picked, by its `pick(answer, above, floor)`. A kind of children makes its pool."""
        self.children = children
        # As in `Tree`, of every candidate.
        self.tokens, self.parents, self.path_log_probs = np.array([root]), np.array([-1]), np.zeros(1)
        self.depths, self.draft_rows = np.zeros((2, 1), dtype=np.int64)
        self._ranked: dict[int, list[float]] = {}
        self._frontier, self._above = np.array([0]), np.zeros(1)
        # What expanded nodes see, by draft row (0: the root, which has no column) and column: ancestors and themselves.
        self._seen = np.zeros((1, 0), dtype=bool)

    @property
    def size(self) -> int:
        """Candidates so far, the root among them."""
        return len(self.tokens)

    @property
    def reach(self) -> Float[np.ndarray, " pool"]:
        """What candidates are ranked by. Whoever draws children ranks them by what was known before the draw."""
        return self.path_log_probs

    @property
    def newest(self) -> Int[np.ndarray, " layer"]:
        """Pool rows of the newest layer."""
        return np.arange(self.layer, self.size)

    def add(self, answer: Any) -> None:
        """Store what is picked below the nodes last handed out by `frontier`, at first the root. One read-back."""
        self._store(self.children.pick(answer, self._above, self.floor))

    def _store(self, picked: Picked) -> None:
        """Store the children of a layer as the newest one."""
        self.layer, self.depth, count = self.size, self.depth + 1, len(picked.tokens)
        self.tokens = np.concatenate([self.tokens, picked.tokens])
        self.parents = np.concatenate([self.parents, self._frontier.take(picked.rows)])
        self.depths = np.concatenate([self.depths, np.full(count, self.depth)])
        self.draft_rows = np.concatenate([self.draft_rows, np.full(count, -1)])
        # minimum: adding in a narrower dtype on the device may round a child above its parent.
        paths = np.minimum(picked.path_log_probs, self._above.take(picked.rows))
        self.path_log_probs = np.concatenate([self.path_log_probs, paths])

    @property
    def floor(self) -> float:
        """The reach a new candidate must exceed to be among the best that the children's budget admits."""
        budget = self.children.budget
        return -math.inf if budget is None or self.size <= budget else self._falling(self.size)[budget]

    def _falling(self, size: int) -> list[float]:
        """The reach of the first `size` candidates, the greatest first."""
        if size not in self._ranked:
            self._ranked[size] = sorted(self.reach[:size].tolist(), reverse=True)
        return self._ranked[size]

    def gain(self, nodes: int) -> float:
        """How much the newest layer raised the sum of the `nodes` best: E(A), for deterministic candidates."""
        now, before = (sum(map(math.exp, self._falling(size)[1 : nodes + 1])) for size in (self.size, self.layer))
        return now - before

    def best(self, nodes: int) -> Int[np.ndarray, " best"]:
        """The root and the `nodes` best candidates, best first; equal ones in the order they were stored."""
        return (-self.reach).argsort(kind="stable")[: nodes + 1]

    def frontier(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """Number the candidates `rows` as expanded and describe them to the drafter. Their children are added next."""
        self._frontier, self._above = rows, self.path_log_probs.take(rows)
        return self._expand(rows)

    def _expand(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """Give candidates the next draft rows, and each row its parent's columns besides its own."""
        before, parents = len(self._seen), self.draft_rows.take(self.parents.take(rows))
        seen = np.eye(before + len(rows), before + len(rows) - 1, k=-1, dtype=bool)  # each row its own column
        seen[:before, : before - 1], seen[before:, : before - 1] = self._seen, self._seen[parents]
        self._seen = seen
        self.draft_rows[rows] = np.arange(before, len(seen))
        return Frontier(self.tokens.take(rows), parents, self.depths.take(rows), seen[before:])

    def tree(self, rows: Int[np.ndarray, " rows"]) -> Tree:
        """Return the tree of the given pool rows, which must be closed under parents and include the root."""
        rows = np.sort(rows)
        above = self.parents.take(rows)
        parents = rows.searchsorted(above)
        if (orphans := (rows[parents] != above)[1:]).any():
            orphan = rows[1:][orphans][0]
            raise ValueError(f"candidate {orphan} was selected without its parent {self.parents[orphan]}")
        parents[0] = -1
        return Tree(self.tokens.take(rows), parents, self.path_log_probs.take(rows), self.draft_rows.take(rows))
