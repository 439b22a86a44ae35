"""Native code for what runs between two forwards: the same numbers as numpy's, in one call instead of dozens.

Owns the calls of `native.cpp`, which `opt_tree.compiling` has built where it builds packages. numpy is the reference
and does the same wherever nothing was built.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opt_tree.target import Laws

SOURCE = Path(__file__).with_name("native.cpp")
OPTIONS = ("-O2", "-std=c++17", "-shared", "-fPIC")
"""Of the compiler: IEEE arithmetic to the letter, as numpy's is."""

_CALLS: dict[torch.dtype, Any] = {}
"""By the dtype of a drafter's answer; empty until `use`."""


def use(file: Path) -> None:
    """Load the built code. Raises OSError where it does not load here."""
    library = ctypes.PyDLL(str(file))  # a call is too short to let other threads in
    address, number = ctypes.c_void_p, ctypes.c_int64
    for dtype, call in ((torch.float32, library.grow_float), (torch.float64, library.grow_double)):
        call.argtypes = [address] * 3 + [number] * 4 + [address] * 2 + [number] * 4 + [ctypes.c_double, number]
        call.restype = number
        _CALLS[dtype] = call


def in_use() -> bool:
    """Whether built code is loaded."""
    return bool(_CALLS)


def addresses(*arrays: np.ndarray) -> list[int]:
    """Where the numbers of some arrays begin."""
    return [array.__array_interface__["data"][0] for array in arrays]


def grow(laws: Laws, frontier: int, *pool: float) -> int | None:
    """Add the best children of an answer about `frontier` nodes to a pool; return how many candidates it has then.

    `pool`: see `native.cpp`. None where there is no native code for this, and nothing was done.
    """
    log_probs, tokens, peaks = laws
    call = _CALLS.get(log_probs.dtype)
    if call is None or not all(given is None or (given.is_cpu and given.is_contiguous()) for given in laws):
        return None
    rows, columns = log_probs.shape
    if rows != frontier or not columns or (tokens is not None and tokens.dtype != torch.int64):
        return None
    begin = log_probs.data_ptr()
    peak, groups = (begin, columns) if peaks is None else (peaks.data_ptr(), peaks.shape[1])
    names, by_row = (None, 0) if tokens is None else (tokens.data_ptr(), tokens.ndim - 1)
    return call(begin, peak, names, by_row, rows, columns, groups, *pool)
