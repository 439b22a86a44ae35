"""A store on a device: what followed the last tokens of many tails, at no read.

Owns its arrays there, and the hash by which they are searched, the host's.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from opt_tree.methods.drafters.tables.store import FACTOR, FOLLOWERS, Store
from opt_tree.tree import send

_SIGN = -(1 << 63)
LATE = 1 << 32
"""More than a text has tokens, and a row followers."""


class Followers(NamedTuple):
    """Of some tails, what followed their last tokens in a store, the longest run of these first."""

    totals: Int[Tensor, "tails order"]
    tokens: Int[Tensor, "tails order followers"]
    counts: Int[Tensor, "tails order followers"]
    there: Bool[Tensor, "tails order followers"]


class StoreTensors:
    """A store on the device: a row a run of tokens, with its followers in one array behind those of the row before."""

    def __init__(self, store: Store, device: torch.device) -> None:
        keys, first, totals, tokens, counts = (array.astype(np.uint64).view(np.int64) for array in store.arrays)
        sizes, summed = np.diff(first).clip(max=FOLLOWERS), np.append(0, counts.cumsum())
        totals = np.maximum(totals, summed[first[:-1] + sizes] - summed[first[:-1]])
        row = np.arange(len(keys)).repeat(np.diff(first))
        kept = (np.arange(len(row)) - first[row] < FOLLOWERS) & (tokens < store.vocab)
        sizes = np.bincount(row[kept], minlength=len(keys))
        self.bits, self._flip = store.bits, _SIGN if store.bits == 64 else 0
        rows = np.stack([keys ^ self._flip, sizes.cumsum() - sizes, sizes, totals], 1)
        # A search may end behind the last row, and a row's followers are read as if there were as many as may be.
        self._rows = send(np.pad(rows, ((0, 1), (0, 0))), device)
        self._keys = self._rows[:-1, 0].contiguous()
        entries = np.pad(np.stack([tokens[kept], counts[kept]], 1), ((0, FOLLOWERS), (0, 0)))
        small = entries.max() < 1 << 31
        self._entries = send(entries.astype(np.int32 if small else np.int64), device)
        self._each, order = torch.arange(FOLLOWERS, device=device), store.order
        self.ranks = torch.arange(order, device=device)[:, None] * (2 * LATE) + self._each
        """In the host's order; a match's followers in the text come behind them."""
        # A run's hash is a sum modulo 2^64: its newest token times FACTOR as often as the run is long, and so on.
        power = [0] * order + [pow(FACTOR, times, 1 << 64) for times in range(1, order + 1)]
        powers = np.array([power[order - begin :][:order] for begin in range(order)], dtype=np.uint64)
        self._powers = send(powers.view(np.int64), device)

    def read(self, tails: Int[Tensor, "tails order"]) -> Followers:
        """What followed the last `order`, ..., 2, 1 tokens of each tail; a number below 0 stands before a text.

        Keys are those of `hashes`.
        """
        states = ((tails + 1)[:, None] * self._powers).sum(2)
        keys = (states >> 64 - self.bits & (1 << self.bits) - 1) if self.bits < 64 else states ^ self._flip
        rows = self._rows[torch.searchsorted(self._keys, keys)]
        known = (rows[..., 0] == keys) & (tails >= 0)
        first, sizes, totals = (rows[..., 1:] * known[..., None]).unbind(-1)
        tokens, counts = self._entries[first[..., None] + self._each].unbind(-1)
        return Followers(totals, tokens, counts, self._each < sizes[..., None])
