"""A store of what followed what, in text known beforehand: the target's own answers, or any other.

Owns the reading of a store (`Store`; `opt_tree.training.fitting.store` builds one) and the drafter that joins its
counts with those of the text at hand (`StoreDrafter`).

A store has, for runs of 1 to `order` tokens, how often they were followed (`totals`) and by what (`tokens`, `counts`;
the entries of run i are those from `first[i]` to `first[i + 1]`). Runs are found by a hash of their tokens, among the
sorted `keys`. A false match costs a draft and never a text: the target judges all the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from opt_tree.core.continuations import Tail
from opt_tree.drafters.registry import DrafterOptions, register
from opt_tree.drafters.tables.file_format import Table, fingerprint, load_table
from opt_tree.drafters.tables.ngram import Interpolated, Row
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError

FILE = "store.safetensors"
BETA = (30.0, 20.0, 10.0, 6.0, 4.0)
"""See `interpolate`. A store may have its own, under which E(A) comes out as A for its target (`--fit`)."""
WEIGHT = 8.0
"""How many observations in other texts one in the text at hand is worth."""

_FACTOR = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1
_REMEMBERED = 1 << 17
"""Rows kept in Python's own shape; the frequent short runs are asked for again and again."""


def hashes(tail: Tail, bits: int) -> list[int]:
    """Return the keys of the last 1, 2, ... tokens of a tail."""
    state, keys = 0, []
    for token in reversed(tail):
        # The high bits of the product depend on all tokens so far; the low ones do not.
        state = (state + token + 1) * _FACTOR & _ALL
        keys.append(state >> 64 - bits)
    return keys


def extend_hashes(states: UInt[np.ndarray, " runs"], tokens: UInt[np.ndarray, " runs"]) -> UInt[np.ndarray, " runs"]:
    """Return the 64-bit states of runs with one more token before them: `hashes`, of many runs at once."""
    return (states + tokens + np.uint64(1)) * np.uint64(_FACTOR)


_NOTHING = Row(0, [])


class Store:
    """A store as it lies on disk. Read-only: several drafters and processes may share one."""

    def __init__(self, table: Table) -> None:
        """Read a table from now on. Raises CheckpointError where its arrays do not fit each other."""
        header, arrays = table
        self.order, self.bits, self.vocab = int(header["order"]), int(header["bits"]), int(header["vocab"])
        self.header, self.nbytes = header, table.nbytes
        names = "keys", "first", "totals", "tokens", "counts"
        # Where a number may begin: a file's arrays may begin anywhere.
        self.arrays = [np.require(arrays[name], requirements="A") for name in names if name in arrays]
        if not self._fits():
            raise CheckpointError("this is no store: its arrays do not fit each other")
        self._keys, *self._values = (array.data for array in self.arrays)
        self._rows: dict[int, Row] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Store":
        """Itself: a copy of a drafter shares what it only reads."""
        return self

    @classmethod
    def load(cls, folder: str | Path, vocab: int, tokenizer: str | None = None) -> "Store":
        """Open the store in a folder; CheckpointError says in one line why it cannot be used."""
        table = load_table(Path(folder) / FILE, "store", vocab, tokenizer)
        try:
            return cls(table)
        except CheckpointError as why:
            raise CheckpointError(f"{folder}: {why}") from None

    def rows(self, tail: Tail) -> Sequence[Row]:
        """What followed the last 1, 2, ... `order` tokens of a tail."""
        known = self._rows
        if len(known) > _REMEMBERED:
            known.clear()
        found = []
        for key in hashes(tail, self.bits):
            if (row := known.get(key)) is None:
                row = known[key] = self._read(key)
            found.append(row)
        return found

    def _fits(self) -> bool:
        """Whether rows can be read: all arrays are there, of unsigned integers, and as long as each other."""
        if any(array.ndim != 1 or array.dtype.kind != "u" or not array.flags.c_contiguous for array in self.arrays):
            return False
        lengths, runs = [len(array) for array in self.arrays], len(self.arrays[0]) if self.arrays else 0
        fit = len(lengths) == 5 and lengths == [runs, runs + 1, runs, lengths[3], lengths[3]]
        return fit and 0 < self.bits <= 64 and self.vocab >= 0

    def _read(self, key: int) -> Row:
        """Fetch a row from disk. A step reads some twenty: one by one through views, which is faster than by arrays."""
        keys, (first, totals, tokens, counts) = self._keys, self._values
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            return _NOTHING
        begin, end, vocab = first[place], first[place + 1], self.vocab
        entries = zip(tokens[begin:end].tolist(), counts[begin:end].tolist(), strict=True)
        return Row(totals[place], [entry for entry in entries if entry[0] < vocab])


class StoreDrafter(Interpolated):
    """Drafts from a store and from the text at hand, by `interpolate`: calibrated as it is, E(A) comes out as A.

    `longest=True` trusts the longest match alone (beta 0), which is how REST (arXiv:2311.08252) and SuffixDecoding
    (arXiv:2411.04975) use a store: what lies below a node are whole continuations, by their relative frequency.
    `weight=0` leaves the text at hand out.
    """

    def __init__(
        self, store: Store, beta: Sequence[float] | None = None, weight: float = WEIGHT, longest: bool = False
    ) -> None:
        beta = (0.0,) * store.order if longest else tuple(beta or store.header.get("beta") or BETA)
        if len(beta) != store.order:
            raise ValueError(f"a store of order {store.order} needs as many beta, got {len(beta)}")
        super().__init__(beta, weight)
        self.store = store

    def rows(self, tail: Tail) -> Sequence[Row]:
        return self.store.rows(tail)

    def describe(self) -> str:
        text = " and the text at hand" if self.weight else ""
        return f"a store of {self.store.header['text_tokens']} tokens{text}"


@register(
    "store", about="what followed the same tokens in a store of the target's answers, and in this text", part="store"
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> StoreDrafter:
    known = None if options.tokenizer is None else fingerprint(options.tokenizer)
    return StoreDrafter(Store.load(path, target.vocab, known))
