"""Rows of a tree behind a state: what each adds and reads, and where its ancestors lie.

A layer with a state lets a part of it go and adds to it a row at a time, S <- exp(g) S + k u^T; a row reads S^T q.
Unrolled from the committed state S0, with G the sum of g along a row's path, that is a masked sum as of attention:
exp(G) S0^T q + sum over the path of exp(G - G_j) (k_j . q) u_j. So nothing is kept for a sibling, and a path is
committed by one sum.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.tree import send

State = Float[Tensor, "heads key_dim value_dim"]


@runtime_checkable
class PendingRows(Protocol):
    """Pending rows of one layer, in the order in which they were run."""

    def behind(self, state: State, path: Int[Tensor, " path"]) -> State:
        """The state at the end of a path of these rows, which begins behind `state`."""


@dataclass
class Sums:
    """Pending rows whose states are sums over their paths."""

    keys: Float[Tensor, "heads columns key_dim"]
    gates: Float[Tensor, "heads columns"]
    """g: the row's own decay, a logarithm."""
    decays: Float[Tensor, "heads columns"]
    """G: the sum of g along the row's path, from the committed state on."""
    updates: Float[Tensor, "heads known value_dim"] | None = None
    """u: what the row adds to the state, along its key. That of the newest rows may not be known yet."""

    @classmethod
    def of(
        cls,
        before: PendingRows | None,
        keys: Float[Tensor, "heads rows key_dim"],
        gates: Float[Tensor, "heads rows"],
        sees: Bool[Tensor, "rows columns"],
    ) -> "Sums":
        """These rows behind the pending ones; what they add is not known yet."""
        if before is None:
            return cls(keys, gates, gates @ sees.T.to(gates.dtype))
        assert isinstance(before, Sums)
        gates = torch.cat((before.gates, gates), 1)
        decays = torch.cat((before.decays, gates @ sees.T.to(gates.dtype)), 1)
        return cls(torch.cat((before.keys, keys), 1), gates, decays, before.updates)

    def left(self, sees: Bool[Tensor, "rows columns"]) -> Float[Tensor, "heads rows columns"]:
        """How much of what each row added is left at each of the newest ones; nothing where it is not seen."""
        decay = self.decays[:, -len(sees) :]
        return (decay[:, :, None] - self.decays[:, None]).masked_fill(~sees, -torch.inf).exp()

    def from_state(self, rows: int) -> Float[Tensor, "heads rows 1"]:
        """How much of the committed state is left at each of the newest rows."""
        return self.decays[:, -rows:].exp()[..., None]

    def add(self, updates: Float[Tensor, "heads rows value_dim"]) -> None:
        """Say what the newest rows add to the state."""
        self.updates = updates if self.updates is None else torch.cat((self.updates, updates), 1)

    def read(
        self, queries: Float[Tensor, "heads rows key_dim"], left: Float[Tensor, "heads rows columns"], state: State
    ) -> Float[Tensor, "heads rows value_dim"]:
        """What each of the newest rows reads of the state behind it."""
        assert self.updates is not None
        from_rows = (left * (queries @ self.keys.mT)) @ self.updates
        return self.from_state(queries.shape[1]) * (queries @ state) + from_rows

    def behind(self, state: State, path: Int[Tensor, " path"]) -> State:
        """See `PendingRows.behind`."""
        assert self.updates is not None
        decays = self.decays[:, path]
        left = (decays[:, -1:] - decays).exp()[..., None]
        added = (left * self.keys[:, path]).mT @ self.updates[:, path]
        return decays[:, -1, None, None].exp() * state + added


class Levels(NamedTuple):
    """Pending rows by their depth."""

    rows: Int[Tensor, " columns"]
    """The rows, those of a level one behind the other."""
    above: Int[Tensor, " columns"]
    """Where each one's parent stands in the level above; 0 in the first."""
    back: Int[Tensor, " columns"]
    """Where each row stands in `rows`."""
    sizes: list[int]

    @classmethod
    def of(cls, parents: Int[np.ndarray, " columns"], device: torch.device) -> "Levels":
        """Take each row's parent, which comes before it; -1: none."""
        depths, place = np.zeros((2, len(parents)), dtype=np.int64)
        for row, parent in enumerate(parents.tolist()):
            depths[row] = 0 if parent < 0 else depths[parent] + 1
        order, sizes = np.argsort(depths, kind="stable"), np.bincount(depths)
        place[order] = np.arange(len(parents)) - np.repeat(sizes.cumsum() - sizes, sizes)
        above = np.where(parents < 0, 0, place[parents])[order]
        rows, above_them, back = send(np.stack((order, above, np.argsort(order))), device)
        return cls(rows, above_them, back, sizes.tolist())


def last_ancestors(visible: Bool[np.ndarray, "rows columns"], taps: int) -> Int[np.ndarray, "rows taps"]:
    """The last `taps` rows of each row's path, itself the last: places among taps - 1 of the context and the others.

    A row's ancestors are the columns that it sees, and a parent comes before its children.
    """
    behind = visible[:, ::-1].cumsum(1)[:, ::-1]  # how many that it sees are left, this one included
    own, window = behind[:, :1], np.empty((len(visible), taps), dtype=np.int64)
    for back in range(1, taps + 1):
        column = (visible & (behind == back)).argmax(1)
        context = taps - 1 - (back - own[:, 0])
        window[:, taps - back] = np.where(own[:, 0] >= back, taps - 1 + column, context)
    return window
