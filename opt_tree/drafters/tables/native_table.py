"""A table in native code: the text at hand counted, a store read, and OPT-Tree grown over both, in one call a step.

Owns the life of what `native_tables.cpp` holds. Who may be asked this way is `ngram.Interpolated`'s to say.
"""

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opt_tree.core import native
from opt_tree.core.pool import CandidatePool
from opt_tree.core.tree import Tree

_NO_POOL = 0, *[None] * 5


class Elsewhere(NamedTuple):
    """What followed what in other texts, as a `Store` has it; as it stands, nothing at all."""

    arrays: Sequence[np.ndarray] = (np.zeros(0, np.uint8),) * 5
    """Keys, first, totals, tokens and counts."""
    bits: int = 0
    vocab: int = 0


class NativeTable:
    """One drafter's table, for one text: it is made anew for another one, and never copied."""

    def __init__(self, code: native.Code, beta: Sequence[float], weight: float, elsewhere: Elsewhere) -> None:
        self.code, self.order, self.counted = code, len(beta), 0
        self._kept, bits, vocab = elsewhere  # as long as they may be read
        places, widths = [each.ctypes.data for each in self._kept], [each.itemsize for each in self._kept]
        sizes = [len(self._kept[0]), len(self._kept[3]), bits, vocab]
        about = (array("q", numbers).tobytes() for numbers in (places, widths, sizes))
        self._table = code.new_table(array("d", beta).tobytes(), len(beta), weight, *about)
        weakref.finalize(self, code.free_table, self._table)

    def count(self, text: Sequence[int]) -> None:
        """Count what of the text is not counted yet."""
        if self.counted < len(text):
            tokens = array("q", text[self.counted :])
            self.code.count_text(self._table, tokens.tobytes(), len(tokens))
            self.counted = len(text)

    def grow(self, context: list[int], above: CandidatePool | None, most: int, *limits: float) -> Tree:
        """Return OPT-Tree's tree of `most` nodes behind a context, as `node_by_node.grow` does.

        `above` is what the layers above it have; `limits`: the threshold, the first depth that is asked about, and the
        one that is not any more.
        """
        tail = array("q", context[-self.order :])
        told, seen = np.empty((5, most + 1), dtype=np.int64), np.empty((most + 1) ** 2, dtype=bool)
        pool = _NO_POOL if above is None else _told(above)
        into = native.address(told), native.address(seen)
        rows = self.code.grow_over_table(self._table, tail.tobytes(), len(tail), *pool, most, *limits, *into)
        tokens, parents, depths, draft_rows, bits = told[:, :rows]
        return Tree.sound(
            tokens=tokens,
            parents=parents,
            path_log_probs=bits.view(np.float64),
            draft_rows=draft_rows,
            depths=depths,
            ancestors=seen[: rows * rows].reshape(rows, rows),
        )


def _told(pool: CandidatePool) -> tuple[int | bytes, ...]:
    arrays = pool.tokens, pool.parents, pool.depths, pool.draft_rows, pool.path_log_probs
    return pool.size, *(each.tobytes() for each in arrays)
