"""A draft's candidates and its tree as tensors of fixed shape: what `CandidatePool` and `Tree` are on the host.

Owns the integers of a draft that stays on its device. A layer has as many candidates as it may have; those that are not
there have the path log-probability -inf, and so has everything below a node that is not drafted below. So a stop is no
branch of the program: all that follows is -inf, whether it is computed or left out. Knows nothing of models and
policies.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.tree import Tree


class TensorChildren(NamedTuple):
    """The candidates of one layer, in the order in which the host stores them; -inf: no candidate."""

    paths: Float[Tensor, " children"]
    """Log-probabilities of the paths from the root, in the dtype of the drafter's answer."""
    columns: Int[Tensor, " children"]
    rows: Int[Tensor, " children"]
    """Rows of the frontier that they are children of."""


class Expanded(NamedTuple):
    """Which nodes of the newest layer are drafted below next."""

    places: Int[Tensor, " frontier"]
    """Places in the layer, rising."""
    live: Bool[Tensor, " frontier"]
    """Which of them are; the others are there for the shape alone."""


class Selected(NamedTuple):
    """The tree: pool rows, parents before children, those that are in it before those that are not."""

    rows: Int[Tensor, " tree"]
    valid: Bool[Tensor, " tree"]


class TensorFrontier(NamedTuple):
    """The nodes that are drafted below next, and what their children need of them."""

    rows: Int[Tensor, " frontier"]
    """Pool rows."""
    live: Bool[Tensor, " frontier"]
    paths: Float[Tensor, " frontier"]
    over: Bool[Tensor, " frontier"]
    """Below which the text is over."""
    tokens: Int[Tensor, " frontier"]
    above: Int[Tensor, " frontier"]
    """Their parents' rows in the frontier before."""
    first: Int[Tensor, ""]
    """How many candidates there are."""
    slots: Int[Tensor, ""]
    """How many rows the frontiers take, without the root."""


class TensorLayer(NamedTuple):
    """The candidates of one layer, as a pool has them."""

    tokens: Int[Tensor, " children"]
    parents: Int[Tensor, " children"]
    paths: Float[Tensor, " children"]
    over: Bool[Tensor, " children"]
    """Whether they are below an end of the text."""
    expanded: Bool[Tensor, " children"]
    slots: Int[Tensor, " children"]


class TensorPool:
    """The candidates of one step, row 0 the root, as a `CandidatePool` has them, and places for those that are not."""

    def __init__(self, root: Int[Tensor, ""]) -> None:
        self.device, self.depth, self.slots = root.device, 0, 0
        nothing = torch.zeros(1, dtype=torch.long, device=self.device)
        no, nowhere = nothing.bool(), torch.zeros(1, dtype=torch.float64, device=self.device)
        self.front = TensorFrontier(nothing, ~no, nowhere, no, root[None], nothing, (~no[0]).long(), nothing[0])
        self._layers = [TensorLayer(root[None], nothing, nowhere, no, no, nothing)]
        self._flags: list[Bool[Tensor, ""]] = []

    def take(self, layer: TensorLayer, front: TensorFrontier | None) -> None:
        """Store a layer; `front`: what is drafted below next."""
        self._layers.append(layer)
        self.depth += 1
        if front is not None:
            self.front, self.slots = front, self.slots + len(front.rows)

    def flag(self, front: TensorFrontier | None) -> Bool[Tensor, ""] | None:
        """Note and return whether anything is drafted below the newest layer; None: nothing is, whatever the numbers.

        Where it is noted of each layer, those behind a False are not looked at.
        """
        if front is None:
            return None
        self._flags.append(front.live.any())
        return self._flags[-1]

    def close(self) -> None:
        """All candidates are there: put the layers together."""
        layers = self._layers
        self.tokens, self.parents, self.paths, self.over, self.expanded, self.slot_of = map(
            torch.cat, zip(*layers, strict=True)
        )
        depths = [torch.full_like(layer.tokens, depth) for depth, layer in enumerate(layers)]
        self.depths = torch.cat(depths)
        if self._flags:
            # In a layer behind a stop anything may stand: a graph that was not replayed left it there some time ago.
            there = torch.constant_pad_nd(torch.stack(self._flags).cumprod(0), (2, 0), 1)[self.depths]
            self.paths = torch.where(there > 0, self.paths, -math.inf)
        self.draft_rows = torch.where(self.expanded | (self.depths == 0), self.expanded.cumsum(0), -1)

    def best(self, nodes: int) -> Selected:
        """The root and the n best candidates; of equal ones those that were stored first."""
        return self.tree(self.paths.argsort(descending=True, stable=True)[: nodes + 1])

    def tree(self, rows: Int[Tensor, " tree"]) -> Selected:
        """Some rows as a tree: in the order of the pool, without what is no candidate and what is below an end."""
        valid = (self.paths[rows] > -math.inf) & ~self.over[rows]
        order = torch.where(valid, rows, len(self.paths) + rows).sort().values
        valid = order < len(self.paths)
        return Selected(torch.where(valid, order, 0), valid)


class TensorTree(NamedTuple):
    """A tree on the device; rows that are not in it stand behind those that are."""

    tokens: Int[Tensor, " rows"]
    parents: Int[Tensor, " rows"]
    """Rows of the tree; the root's own is 0."""
    depths: Int[Tensor, " rows"]
    sees: Bool[Tensor, "rows rows"]
    valid: Bool[Tensor, " rows"]
    draft_rows: Int[Tensor, " rows"]
    paths: Float[Tensor, " rows"]
    slots: Int[Tensor, " rows"]
    """Of expanded nodes, their rows in the drafter's cache behind the root's."""

    def told(self) -> list[Int[Tensor, " rows"]]:
        """What the host reads: tokens, parents, draft rows, bits of path log-probabilities, which rows are there."""
        return [self.tokens, self.parents, self.draft_rows, self.paths.view(torch.int64), self.valid.long()]

    def walk(self, choice: Int[Tensor, " rows"], limit: int) -> tuple[Int[Tensor, " path"], Int[Tensor, ""]]:
        """Follow the target's choices from the root: rows of the path, its last row over and over; drafted ones of it.

        Siblings are distinct, so that one of them at most is the choice.
        """
        own = torch.arange(len(self.tokens), device=self.tokens.device)
        agrees = (self.tokens == choice[self.parents]) | (own == 0)
        # Rows that are not there would tie the root, and which of equal ones is the greatest is the device's affair.
        accepted = self.valid & ~(self.sees & ~agrees).any(1)
        leaf = torch.where(accepted, self.depths, -1).argmax()
        # Indexing with one number would read it.
        (above,), (count,) = self.sees.index_select(0, leaf[None]), self.depths.index_select(0, leaf[None])
        places = torch.where(above, self.depths, limit + 1)
        path = torch.zeros(limit + 2, dtype=torch.long, device=own.device).scatter(0, places, own)[:-1]
        return torch.where(torch.arange(limit + 1, device=own.device) <= count, path, leaf), count


def read_tree(told: Int[np.ndarray, " numbers"], rows: int) -> tuple[Tree, Int[np.ndarray, " rest"]]:
    """The tree of so many rows that a `TensorTree` told of, and what was read behind it."""
    tokens, parents, numbers, paths, valid = told[: 5 * rows].reshape(5, rows)
    there = np.count_nonzero(valid)
    parents = parents[:there].copy()
    parents[0] = -1
    tree = tree_as_told(tokens[:there], parents, paths[:there].view(np.float64), numbers[:there])
    return tree, told[5 * rows :]


def tree_as_told(
    tokens: Int[np.ndarray, " rows"],
    parents: Int[np.ndarray, " rows"],
    paths: Float[np.ndarray, " rows"],
    numbers: Int[np.ndarray, " rows"],
) -> Tree:
    """A tree that is not looked at: a pool has parents before their children, and a look takes a tenth of a step."""
    tree = object.__new__(Tree)
    known = {"tokens": tokens, "parents": parents, "path_log_probs": paths, "draft_rows": numbers}
    vars(tree).update(known, draft_log_probs=None)
    return tree


def tree_of(pool: TensorPool, selected: Selected, limit: int) -> TensorTree:
    """The tree of some rows of a pool, which has at most `limit` layers."""
    rows, valid = selected
    count, size = len(rows), len(pool.tokens)
    own = torch.arange(count, device=pool.device)
    place = torch.zeros(size + 1, dtype=torch.long, device=pool.device).scatter(0, torch.where(valid, rows, size), own)
    parents = torch.where(valid, place[pool.parents[rows]], 0)
    sees = torch.eye(count, dtype=torch.bool, device=pool.device)
    jump, reach = parents, 1
    while reach <= limit:  # of each row as many ancestors as `reach` are seen, then twice as many
        sees, jump, reach = sees | sees[jump], jump[jump], 2 * reach
    sees = torch.where(valid[:, None], sees, own[:, None] == own)
    depths = torch.where(valid, pool.depths[rows], 0)
    found = pool.tokens[rows], parents, depths, sees, valid
    return TensorTree(*found, pool.draft_rows[rows], pool.paths[rows], pool.slot_of[rows])
