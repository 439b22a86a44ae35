"""A store of what followed what, in text known beforehand: the target's own answers, or any other.

Owns the reading of a store (`Store`; `opt_tree.training.fitting.store` builds one) and the drafter that joins its
counts with those of the text at hand (`StoreDrafter`).

A store has, for runs of 1 to `order` tokens, how often they were followed (`totals`) and by what (`tokens`, `counts`:
`sizes[i]` entries of run i, one run after the other). Runs are found by a hash of their tokens, among the sorted
`keys`. A false match costs a draft and never a text: the target judges all the same.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.tables.file_format import Table, fingerprint, load_table, whole_number
from opt_tree.methods.drafters.tables.lookup import Tail
from opt_tree.methods.drafters.tables.ngram import Interpolated, RunFollowers
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError

FILE = "store.safetensors"
BETA = (30.0, 20.0, 10.0, 6.0, 4.0)
"""See `interpolate`. A store may have its own, in its header (`store --beta`)."""
WEIGHT = 8.0
"""How many observations in other texts one in the text at hand is worth."""
FOLLOWERS = 24
"""Kept of each run at most: a tree of 60 nodes has hardly more than that below its root."""

_ARRAYS = "keys", "sizes", "totals", "tokens", "counts"
_LONGEST = 64
"""Tokens of the longest runs: a store of more is none of this library's."""
FACTOR = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1
_REMEMBERED = 1 << 17
"""Rows kept in Python's own shape; the frequent short runs are asked for again and again."""


def hashes(tail: Tail, bits: int) -> list[int]:
    """Return the keys of the last 1, 2, ... tokens of a tail."""
    state, keys = 0, []
    for token in reversed(tail):
        # The high bits of the product depend on all tokens so far; the low ones do not.
        state = (state + token + 1) * FACTOR & _ALL
        keys.append(state >> 64 - bits)
    return keys


def extend_hashes(states: UInt[np.ndarray, " runs"], tokens: UInt[np.ndarray, " runs"]) -> UInt[np.ndarray, " runs"]:
    """Return the 64-bit states of runs with one more token before them: `hashes`, of many runs at once."""
    return (states + tokens + np.uint64(1)) * np.uint64(FACTOR)


_NOTHING = RunFollowers(0, [])


class Store:
    """A store as it lies on disk. Read-only: several drafters and processes may share one."""

    def __init__(self, table: Table, name: str | Path = "this store") -> None:
        """Read a table from now on.

        Raises CheckpointError where its header is not a store's or its arrays do not fit each other; `name` is the
        store's in the message.
        """
        header, arrays = table
        self.order = whole_number(name, header, "order", 1, _LONGEST)
        self.bits = whole_number(name, header, "bits", 1, 64)
        self.vocab = whole_number(name, header, "vocab", 1, 2**32)
        _check_beta(name, header.get("beta"), self.order)
        self.header, self.nbytes = header, table.nbytes
        for one in _ARRAYS:
            array = arrays.get(one)
            if array is None or array.dtype.kind != "u" or array.ndim != 1:
                found = "missing" if array is None else f"of {array.dtype} and shape {array.shape}"
                raise CheckpointError(f"{name} is corrupt: its array {one} is {found}")
        keys, sizes, totals, tokens, counts = (np.ascontiguousarray(arrays[name]) for name in _ARRAYS)
        first = np.append(np.uint64(0), np.cumsum(sizes, dtype=np.uint64))
        if not len(keys) == len(sizes) == len(totals) or not first[-1] == len(tokens) == len(counts):
            raise CheckpointError(
                f"{name} is corrupt: its arrays have {[len(arrays[one]) for one in _ARRAYS]} numbers and its sizes add "
                f"up to {first[-1]}, which do not fit each other"
            )
        self.arrays = [keys, first, totals, tokens, counts]
        self._rows: dict[int, RunFollowers] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Store":
        """Itself: a copy of a drafter shares what it only reads."""
        return self

    @classmethod
    def load(cls, folder: str | Path, vocab: int, tokenizer: str | None = None) -> "Store":
        """Open the store in a folder; CheckpointError says in one line why it cannot be used."""
        path = Path(folder) / FILE
        return cls(load_table(path, "store", vocab, tokenizer), path)

    def rows(self, tail: Tail) -> Sequence[RunFollowers]:
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

    def _read(self, key: int) -> RunFollowers:
        """Look a row up."""
        keys, first, totals, tokens, counts = self.arrays
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            return _NOTHING
        begin, vocab = int(first[place]), self.vocab
        # A run of this library's stores has no more, and a file that claims more would hold up every step.
        end = min(int(first[place + 1]), begin + FOLLOWERS)
        seen = counts[begin:end].tolist()
        entries = [entry for entry in zip(tokens[begin:end].tolist(), seen, strict=True) if entry[0] < vocab]
        return RunFollowers(max(int(totals[place]), sum(seen)), entries)


def _check_beta(name: str | Path, beta: Any, order: int) -> None:
    """Raise CheckpointError unless a header's beta is left out or one number of 0 or more for each length of a run."""
    if beta is None:
        return
    numbers = isinstance(beta, list) and all(
        isinstance(one, int | float) and 0 <= one <= sys.float_info.max for one in beta
    )
    if not numbers or len(beta) != order:
        raise CheckpointError(f"{name} is corrupt: its beta is {beta!r:.60}, not {order} numbers of 0 or more")


class StoreDrafter(Interpolated):
    """Drafts from a store and from the text at hand, by `interpolate`: calibrated as it is, E(A) comes out as A.

    `longest=True` trusts the longest match alone (beta 0), which is how REST (arXiv:2311.08252) uses a store, and
    on the whole SuffixDecoding (arXiv:2411.04975): what lies below a node are whole continuations, by their relative
    frequency. REST's matches have up to 16 tokens, these at most the store's order.
    """

    weight = WEIGHT

    def __init__(self, store: Store, beta: Sequence[float] | None = None, longest: bool = False) -> None:
        beta = (0.0,) * store.order if longest else tuple(beta or store.header.get("beta") or BETA)
        if len(beta) != store.order:
            raise ValueError(f"a store of order {store.order} needs as many beta, got {len(beta)}")
        super().__init__(beta)
        self.store = store

    def rows(self, tail: Tail) -> Sequence[RunFollowers]:
        return self.store.rows(tail)

    def describe(self) -> str:
        return f"a store of {self.store.header.get('text_tokens', 'unknown')} tokens and the text at hand"


@register(
    "store",
    about="what followed the same tokens in a store of the target's answers, and in this text",
    paper="2311.08252",
    part="store",
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> StoreDrafter:
    known = None if options.tokenizer is None else fingerprint(options.tokenizer)
    return StoreDrafter(Store.load(path, target.vocab, known))
