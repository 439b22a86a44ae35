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


def _shown(row: int) -> property:
    """What a row of the storage says of the candidates so far."""
    return property(lambda pool: pool._storage[row, : pool.size])


_ROOT = np.array([0])
_ITSELF = np.eye(64, k=-1, dtype=bool)


class CandidatePool:
    """Candidates in the order they were drafted: the root, then layer after layer. Policies read it and never write.

    Invariant: a parent is stored before its children and its reach is at least theirs, so that the n best by a stable
    sort are closed under parents, ties and zero probabilities included.
    """

    def __init__(self, root: int, children: Any) -> None:
        """`children`: how they are picked, by its `pick(answer, above, floor)`. A kind of children makes its pool."""
        self.children = children
        self.depth = 0
        """Layers drafted so far."""
        self.layer = self.size = 1
        """The pool row at which the newest layer begins; and the candidates so far, the root among them."""
        self._budget = children.budget
        self._storage, self._paths = np.zeros((4, 128), dtype=np.int64), np.zeros(128)
        self._storage[:2, 0] = root, -1
        self._ranked: dict[int, list[float]] = {}
        self._sums: dict[tuple[int, int], float] = {}
        self._order: Int[np.ndarray, " pool"] | None = None
        self._frontier, self._above = _ROOT, np.zeros(1)
        self._seen = _ITSELF.copy()
        """What expanded nodes see, by draft row (0: the root, which has no column) and column: ancestors and itself."""
        self._expanded = 0

    tokens, parents, depths, draft_rows = map(_shown, range(4))

    @property
    def path_log_probs(self) -> Float[np.ndarray, " pool"]:
        """See `Tree.path_log_probs`."""
        return self._paths[: self.size]

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
        self._order = None
        self.layer = self.size
        self.depth += 1
        self.size = self.layer + len(picked.tokens)
        while self.size > len(self._paths):  # by doubling: to append to an array copies all of it
            self._storage = np.concatenate([self._storage, np.empty_like(self._storage)], axis=1)
            self._paths = np.concatenate([self._paths, np.empty_like(self._paths)])
        self.tokens[self.layer :] = picked.tokens
        self.parents[self.layer :] = self._frontier.take(picked.rows)
        self.depths[self.layer :] = self.depth
        self.draft_rows[self.layer :] = -1
        # minimum: adding in a narrower dtype on the device may round a child above its parent.
        self.path_log_probs[self.layer :] = np.minimum(picked.path_log_probs, self._above.take(picked.rows))

    @property
    def floor(self) -> float:
        """The reach a new candidate must exceed to be among the best that the children's budget admits."""
        if self._budget is None or self.size <= self._budget:
            return -math.inf
        return self._falling(self.size)[self._budget]

    def _falling(self, size: int) -> list[float]:
        """The reach of the first `size` candidates, the greatest first."""
        if size not in self._ranked:
            self._ranked[size] = sorted(self.reach[:size].tolist(), reverse=True)
        return self._ranked[size]

    def gain(self, nodes: int) -> float:
        """How much the newest layer raised the sum of the `nodes` best: E(A), for deterministic candidates."""
        return self._sum_of_best(nodes, self.size) - self._sum_of_best(nodes, self.layer)

    def _sum_of_best(self, nodes: int, size: int) -> float:
        if (nodes, size) not in self._sums:
            self._sums[nodes, size] = sum(map(math.exp, self._falling(size)[1 : nodes + 1]))
        return self._sums[nodes, size]

    def best(self, nodes: int) -> Int[np.ndarray, " best"]:
        """The root and the `nodes` best candidates, best first; equal ones in the order they were stored."""
        if self._order is None:
            self._order = (-self.reach).argsort(kind="stable")
        return self._order[: nodes + 1]

    def frontier(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """Number the candidates `rows` as expanded and describe them to the drafter. Their children are added next."""
        self._frontier, self._above = rows, self.path_log_probs.take(rows)
        return self._expand(rows)

    def _expand(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """Give candidates the next draft rows, and each row its parent's columns besides its own."""
        first, last = self._expanded, self._expanded + len(rows)
        while len(self._seen) <= last:  # room for twice as many; below the diagonal: row i + 1 has column i
            grown = np.eye(2 * len(self._seen), k=-1, dtype=bool)
            grown[: len(self._seen), : len(self._seen)] = self._seen
            self._seen = grown
        self._expanded, seen = last, self._seen[first + 1 : last + 1, :last]
        parents = self.draft_rows.take(self.parents.take(rows))
        self._seen[first + 1 : last + 1, :first] = self._seen[parents, :first]
        self.draft_rows[rows] = np.arange(first + 1, last + 1)
        return Frontier(self.tokens.take(rows), parents, self.depths.take(rows), seen)

    def tree(self, rows: Int[np.ndarray, " rows"]) -> Tree:
        """Return the tree of the given pool rows, which must be closed under parents and include the root."""
        rows = rows.copy()
        rows.sort()
        above = self.parents.take(rows)
        parents = rows.searchsorted(above)
        if (orphans := (rows[parents] != above)[1:]).any():
            orphan = rows[1:][orphans][0]
            raise ValueError(f"candidate {orphan} was selected without its parent {self.parents[orphan]}")
        parents[0] = -1
        return Tree(self.tokens.take(rows), parents, self.path_log_probs.take(rows), self.draft_rows.take(rows))
