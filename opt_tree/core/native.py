"""Native code for what runs between two forwards: the same numbers as numpy's, in one call instead of dozens.

Owns the calls of `native.cpp`, which `opt_tree.models.compiling` has built where it builds packages. numpy is the
reference and does the same wherever nothing was built.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core.target import Laws

SOURCES = (Path(__file__).with_name("native.cpp"),)
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
"""Of the compiler: IEEE arithmetic to the letter, as numpy's is."""

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_STORAGE = [_ADDRESS, _NUMBER]  # of a pool: where its candidates are, and how many there is room for


class Code:
    """Its functions."""

    def __init__(self, file: Path) -> None:
        """Load them. Raises OSError where they do not load here."""
        library = ctypes.PyDLL(str(file))  # a call is too short to let other threads in

        def typed(name: str, returns: Any, *takes: Any) -> Any:
            call = getattr(library, name)
            call.restype, call.argtypes = returns, takes
            return call

        limits = (*[_NUMBER] * 3, ctypes.c_double, _NUMBER)
        self.grow = {
            dtype: typed(name, _NUMBER, *[_ADDRESS] * 3, *[_NUMBER] * 4, *_STORAGE, *limits)
            for dtype, name in ((torch.float32, "grow_float"), (torch.float64, "grow_double"))
        }
        """By the dtype of a drafter's answer."""
        known = (*_STORAGE, _NUMBER)  # of a pool: its candidates as well
        self.frontier = typed(
            "frontier", ctypes.c_bool, *known, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _NUMBER, _ADDRESS
        )
        self.best_of_pool = typed("best_of_pool", None, *known, _NUMBER, _ADDRESS)
        self.tree = typed("tree", ctypes.c_bool, *known, _ADDRESS, _NUMBER, _ADDRESS, _ADDRESS)
        line, real = [_ADDRESS, _ADDRESS, _NUMBER], ctypes.c_double
        about = [_NUMBER, real, _NUMBER, *line, real, real, *[_ADDRESS] * 3, _NUMBER, _ADDRESS]
        self.layer = typed("layer_that_pays", _NUMBER, *_STORAGE, *about)
        self.nodes = typed("nodes_that_pay", _NUMBER, *_STORAGE, _NUMBER, *line, _ADDRESS, _NUMBER, _ADDRESS)
        self.lay_out = typed(
            "lay_out",
            ctypes.c_bool,
            *[_ADDRESS] * 3,
            *[_NUMBER] * 7,
            *[_ADDRESS] * 3,
            _NUMBER,
            _ADDRESS,
            _NUMBER,
            _ADDRESS,
        )
        self.take = typed("take", ctypes.c_bool, _ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
        self.follow = typed("follow", _NUMBER, _ADDRESS, _ADDRESS, _NUMBER, _ADDRESS, _NUMBER)


code: Code | None = None
"""What is loaded; None: numpy does everything."""


def use(file: Path) -> None:
    """Take the built code from now on. Raises OSError where it does not load here."""
    global code
    code = Code(file)


def address(array: np.ndarray) -> int:
    """Where the numbers of an array begin. `array.ctypes` says so, too, in ten times the time."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


class Growing:
    """What native code does for a pool whose children are the `best` ones; its memory is named before it is used.

    Integers go in as bytes: that is sooner done than to find out where an array lies.
    """

    def __init__(self, code: Code, best: int) -> None:
        self.code, self.best = code, best
        self._storage = (0, 0)
        self._seen = (0, 0)

    def store(self, storage: Int[np.ndarray, "5 capacity"]) -> None:
        """Name the storage: four rows of integers, and one of path log-probabilities."""
        self._storage = address(storage), storage.shape[1]

    def see(self, seen: Bool[np.ndarray, "width width"]) -> None:
        """Name where it is kept what expanded nodes may see, by draft row and column."""
        self._seen = address(seen), len(seen)

    def grow(self, laws: Laws, frontier: int, *limits: float) -> int | None:
        """Add the best children of an answer about `frontier` nodes; return how many candidates there are then.

        `limits`: see `native.cpp`. None where it is not made for this answer, and nothing was done.
        """
        log_probs, tokens, peaks = laws
        call = self.code.grow.get(log_probs.dtype)
        if call is None or not all(given is None or (given.is_cpu and given.is_contiguous()) for given in laws):
            return None
        rows, columns = log_probs.shape
        if rows != frontier or not columns or (tokens is not None and tokens.dtype != torch.int64):
            return None
        begin = log_probs.data_ptr()
        peak, groups = (begin, columns) if peaks is None else (peaks.data_ptr(), peaks.shape[1])
        names, by_row = (None, 0) if tokens is None else (tokens.data_ptr(), tokens.ndim - 1)
        return call(begin, peak, names, by_row, rows, columns, groups, *self._storage, *limits, self.best)

    def frontier(self, size: int, rows: Int[np.ndarray, " rows"], first: int) -> Int[np.ndarray, "3 rows"] | None:
        """Number rows of `size` candidates as expanded, from `first` on; return tokens, parents' draft rows and depths.

        What each may see goes to its row of what `see` named. None where these are no candidates; nothing was done.
        """
        if rows.dtype != np.int64:
            return None
        count = len(rows)
        told = np.empty((3, count), dtype=np.int64)
        about = rows.tobytes(), count, first, *self._seen, address(told)
        return told if self.code.frontier(*self._storage, size, *about) else None

    def best_of(self, size: int, most: int) -> Int[np.ndarray, " best"]:
        """Return the `most` best of `size` candidates, the best first and of equals the first."""
        best = np.empty(min(most, size), dtype=np.int64)
        self.code.best_of_pool(*self._storage, size, len(best), address(best))
        return best

    def tree(
        self, size: int, rows: Int[np.ndarray, " rows"]
    ) -> tuple[Int[np.ndarray, "5 rows"], Bool[np.ndarray, "rows rows"]] | None:
        """Return a tree's tokens, parents, depths, draft rows, the bits of its path log-probabilities; and ancestors.

        None where `rows` are not all among `size` candidates, or a parent is missing.
        """
        if rows.dtype != np.int64:
            return None
        count = len(rows)
        told, seen = np.empty((5, count), dtype=np.int64), np.empty((count, count), dtype=bool)
        about = rows.tobytes(), count, address(told), address(seen)
        return (told, seen) if self.code.tree(*self._storage, size, *about) else None


class Paying:
    """What native code does for `Priced`: it finds the rows that pay, by a line of calibration and prices by rows."""

    def __init__(self, code: Code, line: tuple[Float[np.ndarray, " knots"], Float[np.ndarray, " knots"]]) -> None:
        self._code, self._kept = code, line
        self._line = address(line[0]), address(line[1]), len(line[0])

    def layer(
        self,
        paths: Float[np.ndarray, " pool"],
        limits: tuple[int, float, int],
        worth: tuple[float, float],
        prices: tuple[Float[np.ndarray, " rows"], ...],
    ) -> Int[np.ndarray, " frontier"] | None:
        """Return the newest candidates below which a layer pays; none where it does not.

        `limits`: the first of them, the floor that they exceed, and the most nodes of a tree. `worth`: `carry` and the
        price of a row. `prices`: of trees, of each further row, of layers. None where there are none of so many rows.
        """
        rows = np.empty(max(len(paths) - limits[0], 1), dtype=np.int64)
        about = *map(address, prices), len(prices[0]), address(rows)
        count = self._code.layer(address(paths), len(paths), *limits, *self._line, *worth, *about)
        return None if count < 0 else rows[:count]

    def nodes(
        self, paths: Float[np.ndarray, " pool"], most: int, prices: Float[np.ndarray, " rows"]
    ) -> Int[np.ndarray, " best"] | None:
        """Return the root and the best candidates that pay, at most so many. None where prices are too few."""
        rows = np.empty(min(len(paths), most + 1), dtype=np.int64)
        about = address(prices), len(prices), address(rows)
        count = self._code.nodes(address(paths), len(paths), most, *self._line, *about)
        return None if count < 0 else rows[:count]


def follow(
    tokens: Int[np.ndarray, " rows"], parents: Int[np.ndarray, " rows"], logits: Float[Tensor, "rows vocab"]
) -> tuple[list[int], int] | None:
    """Return the path that half-precision logits choose in a tree, and the token behind it: see `verifiers.follow`.

    None where nothing is loaded, or no logit of a row is above 0.
    """
    if code is None or not logits.is_contiguous() or not tokens.dtype == parents.dtype == np.int64:
        return None
    columns = logits.shape[1]
    found = code.follow(tokens.tobytes(), parents.tobytes(), len(tokens), logits.data_ptr(), columns)
    if found < 0:
        return None
    above, (row, token) = parents.tolist(), divmod(found, columns)
    path = [row]
    while row:
        row = above[row]
        path.append(row)
    return path[::-1], token
