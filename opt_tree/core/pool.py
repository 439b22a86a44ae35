"""Everything drafted in one step: candidates, which of them were expanded, and the tree made of the chosen ones.

Owns the integers of the draft phase, on the host as numpy arrays: ranking a layer costs microseconds there, and the one
read-back a layer is needed anyway. Knows nothing of models; policies read it and never write it.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core.children import Children, EqualSiblings, Few, Layer, Picking
from opt_tree.core.random import Random
from opt_tree.core.target import Laws
from opt_tree.core.tree import Tree


class Frontier(NamedTuple):
    """The nodes handed to the drafter for expansion, in the words of the drafter's cache.

    Draft row 0 is the root, which is part of the drafter's context; draft row k >= 1 is the k-th node ever expanded in
    this step, and column k - 1 of `visible`.
    """

    tokens: Int[np.ndarray, " frontier"]
    parents: Int[np.ndarray, " frontier"]
    """Draft rows of the nodes' parents."""
    depths: Int[np.ndarray, " frontier"]
    visible: Bool[np.ndarray, "frontier expanded"]
    """Which expanded nodes, this frontier's own included, each node may see: its ancestors and itself."""


def _shown(row: int) -> property:
    """What a row of the storage says of the candidates so far."""
    return property(lambda pool: pool._storage[row, : pool.size])


_ROOT = np.array([0])
_ITSELF = np.eye(64, k=-1, dtype=bool)


class CandidatePool:
    """Candidates in the order they were drafted: row 0 is the root, then layer after layer.

    Invariant: a parent is stored before its children and its reach is at least theirs. Any selection of the n best by a
    stable sort is therefore closed under parents, ties and zero probabilities included.
    """

    def __init__(self, root: int, children: Children, random: Random | None = None) -> None:
        if children.sampled and random is None:
            raise ValueError(f"{type(children).__name__} draws its children; the pool needs a Random")
        self.children = children
        self._random = random or Random()
        self.depth = 0
        """Layers drafted so far."""
        self.layer = 1
        """Pool row at which the newest layer begins."""
        self.size = 1
        """Candidates so far, the root among them."""
        self._budget = children.budget
        self._store(np.zeros((5, 128), dtype=np.int64))
        self._storage[0, 0], self._storage[1, 0] = root, -1
        self._reach: Float[np.ndarray, " pool"] | None = None
        self._ranked: dict[int, list[float]] = {}
        self._sums: dict[tuple[int, int], float] = {}
        self._order: Int[np.ndarray, " pool"] | None = None
        self._frontier, self._above = _ROOT, np.zeros(1)
        self._seen = _ITSELF.copy()
        """What expanded nodes may see, by draft row and column; every node sees itself."""
        self._expanded = 0
        self._equal = EqualSiblings() if children.sampled else None

    def _store(self, storage: Int[np.ndarray, "5 capacity"]) -> None:
        """Keep candidates here from now on: four rows of integers, and one whose bits are path log-probabilities."""
        self._storage, self._paths = storage, storage[4].view(np.float64)

    def _reserve(self, size: int) -> None:
        """Make room for so many candidates. Grown by doubling: an assignment costs a third of a concatenation."""
        while size > self._storage.shape[1]:
            self._store(np.concatenate([self._storage] * 2, axis=1))

    tokens, parents, depths, draft_rows = map(_shown, range(4))

    @property
    def path_log_probs(self) -> Float[np.ndarray, " pool"]:
        """See `Tree.path_log_probs`."""
        return self._paths[: self.size]

    @property
    def reach(self) -> Float[np.ndarray, " pool"]:
        """What candidates are ranked by. Deterministic ones: `path_log_probs`. Sampled ones: what was known before the
        token was drawn; otherwise its own probability would decide whether it is kept (see `Picked.reach`).
        """
        return self.path_log_probs if self._reach is None else self._reach

    @property
    def newest(self) -> Int[np.ndarray, " layer"]:
        """Pool rows of the newest layer."""
        return np.arange(self.layer, self.size)

    def add(self, answer: Laws | Few | Float[Tensor, "expanded vocab"]) -> None:
        """Store the children of the nodes last handed out by `frontier` (at first: of the root). One read-back.

        `answer`: log-probabilities of the next token behind each of those nodes, or the few tokens known there.
        """
        log_probs, tokens, peaks, best = Laws(answer) if isinstance(answer, Tensor) else Laws(*answer)
        self._order = None
        if self._equal is not None:
            log_probs = self._equal.spread(log_probs)
        above = self._above
        picked = self.children.pick(Layer(log_probs, above, self.depth, self.floor, tokens, peaks, best), self._random)
        reach, self.layer = self.reach, self.size
        self.depth += 1
        self._reserve(self.layer + len(picked.tokens))
        self.size = self.layer + len(picked.tokens)
        self.tokens[self.layer :] = picked.tokens
        self.parents[self.layer :] = self._frontier.take(picked.rows)
        self.depths[self.layer :] = self.depth
        self.draft_rows[self.layer :] = -1
        # minimum: adding in a narrower dtype on the device may round a child above its parent.
        self.path_log_probs[self.layer :] = np.minimum(picked.path_log_probs, above.take(picked.rows))
        if self._equal is not None:
            self._equal.add(self.parents[self.layer :], self.tokens[self.layer :])
        if picked.reach is not None:
            bounded = np.minimum(picked.reach, reach[self.parents[self.layer :]])
            self._reach = np.concatenate([reach, bounded])

    @property
    def picking(self) -> Picking:
        """How the children of the nodes last handed out will be picked."""
        return Picking(children=self.children, above=self._above)

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

    def expected(self, rows: Int[np.ndarray, " rows"]) -> float:
        """E(A) of a selection whose first row is the root."""
        return float(np.exp(self.path_log_probs[rows[1:]]).sum())

    def frontier(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """Number the candidates `rows` as expanded and describe them to the drafter. Their children are added next.

        Sampled candidates of the same text are one row there (see `EqualSiblings`).
        """
        self._frontier, self._above = rows, self.path_log_probs.take(rows)
        if self._equal is not None:
            rows = self._equal.merge(rows)
        first, last = self._expanded, self._expanded + len(rows)
        while len(self._seen) <= last:
            grown = np.eye(2 * len(self._seen), k=-1, dtype=bool)
            grown[: len(self._seen), : len(self._seen)] = self._seen
            self._seen = grown
        self._expanded, seen = last, self._seen[first + 1 : last + 1, :last]
        parents = self.draft_rows.take(self.parents.take(rows))
        self._seen[first + 1 : last + 1, :first] = self._seen[parents, :first]
        self.draft_rows[rows] = np.arange(first + 1, last + 1)
        if self._equal is not None:
            self.draft_rows[self._frontier] = self.draft_rows[self._equal.first[self._frontier]]
        return Frontier(self.tokens.take(rows), parents, self.depths.take(rows), seen)

    def tree(self, rows: Int[np.ndarray, " rows"]) -> Tree:
        """Return the tree of the given pool rows, which must be closed under parents and include the root.

        Sampled siblings are kept up to some one of them, in the order they were drawn. Whether there is another one may
        depend on those before it; a gap would mean that the token itself decided, which no verifier corrects for.
        """
        rows = rows.copy()
        rows.sort()
        above = self.parents.take(rows)
        parents = rows.searchsorted(above)
        if (orphans := (rows[parents] != above)[1:]).any():
            orphan = rows[1:][orphans][0]
            raise ValueError(f"candidate {orphan} was selected without its parent {self.parents[orphan]}")
        parents[0] = -1
        if self.children.sampled and (skipped := _ranks(self.parents)[rows] != _ranks(parents)).any():
            raise ValueError(f"sampled candidate {rows[skipped][0]} was selected without a sibling drawn before it")
        drawn_from = self._equal.drawn_from() if self._equal is not None else None
        log_probs, draft_rows = self.path_log_probs.take(rows), self.draft_rows.take(rows)
        return Tree(self.tokens.take(rows), parents, log_probs, draft_rows, drawn_from)


def _ranks(parents: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The place of each row among the rows of the same parent, in the order in which they stand."""
    order = np.argsort(parents, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - np.searchsorted(parents[order], parents[order])
    return ranks
