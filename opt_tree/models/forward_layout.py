"""The tensors of one forward after the other, on the host: laid out by native code, in memory that stays.

Owns how rows that are asked for (`Wanted`) become integers, a mask and features, and the copies of states around a
forward. `lm.py` does the same by numpy and torch, which is the reference, and on devices.
"""

import ctypes
from array import array
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core import native
from opt_tree.engines.base import Mask


class Wanted(NamedTuple):
    """The rows of a forward, as they are asked for."""

    tokens: Int[np.ndarray, " rows"]
    positions: Int[np.ndarray, " rows"]
    visible: Bool[np.ndarray, "rows columns"]
    """The columns are all pending rows, these included; every row sees the whole committed context."""
    features: Float[Tensor, "states hidden"] | None = None
    """Inputs of a head that drafts in the target's feature space."""
    places: Int[np.ndarray, " rows"] | None = None
    """Columns of the rows, where other layers ran these rows before; None: they are the last ones, and new."""
    scale: float | None = None
    """Laws are wanted: of the logits times this."""
    behind: int = 0
    """What is added to the positions."""
    taken: Int[np.ndarray, " rows"] | None = None
    """Which rows of `features` these take; None: they are as many, in their order."""


class Staged(NamedTuple):
    """A forward as it was laid out: see `Forward`."""

    ints: Int[Tensor, "3 padded"]
    slots: Int[Tensor, " padded"]
    mask: Mask | dict[str, Mask]
    features: Float[Tensor, "padded hidden"] | None


class Staging:
    """Tensors on the host that one forward after the other is laid out in. New ones cost more than to fill them.

    What is there is valid until the next forward. A copy has tensors of its own.
    """

    def __init__(self) -> None:
        self._ints: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._inputs: dict[tuple[int, int, torch.dtype], tuple[Tensor, int]] = {}
        self._mask, self._begin, self._room = torch.empty(0, dtype=torch.bool), 0, 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Staging, ()

    def lay_out(self, wanted: Wanted, prefix: int, padded: int, keys: int, far: int) -> Staged | None:
        """Return the tensors of a forward behind `prefix` committed rows, padded at position `far`.

        None where no native code is loaded, or it is not made for what is there.
        """
        code, (tokens, positions, visible, states, _, _, behind, taken) = native.code, wanted
        if code is None or not tokens.dtype == positions.dtype == np.int64:
            return None
        rows, columns = visible.shape
        found = self._ints.get(padded)
        if found is None:
            ints = torch.empty((3, padded), dtype=torch.int64)
            found = self._ints[padded] = ints, ints[2], ints.data_ptr()
        ints, slots, begin = found
        if padded * keys > self._room:
            self._room = 2 * padded * keys
            self._mask = torch.empty(self._room, dtype=torch.bool)
            self._begin = self._mask.data_ptr()
        mask = self._mask.resize_(1, 1, padded, keys)
        features = states
        about: tuple[int | None, int, bytes | None, int, int | None] = None, 0, None, 0, None
        if states is not None and (taken is not None or padded > rows):
            if not (states.is_cpu and states.is_contiguous()) or (taken is not None and taken.dtype != np.int64):
                return None
            (size, hidden), kind = states.shape, states.dtype
            if (padded, hidden, kind) not in self._inputs:
                features = torch.empty((padded, hidden), dtype=kind)
                self._inputs[padded, hidden, kind] = features, features.data_ptr()
            features, inputs = self._inputs[padded, hidden, kind]
            index = None if taken is None else taken.tobytes()
            about = states.data_ptr(), size, index, hidden * states.itemsize, inputs
        limits = rows, columns, prefix, padded, keys, behind, far, begin, self._begin, *about
        done = code.lay_out(tokens.tobytes(), positions.tobytes(), visible.tobytes(), *limits)
        return Staged(ints, slots, mask, features) if done else None


def take(states: Float[Tensor, "rows hidden"], rows: list[int]) -> Float[Tensor, "taken hidden"]:
    """Return a copy of some rows: `index_select`, which costs several times as much behind a forward."""
    code = native.code
    if code is None or not states.is_cpu or not states.is_contiguous():
        return states.index_select(0, torch.tensor(rows, dtype=torch.int64, device=states.device))
    (size, hidden), count = states.shape, len(rows)
    taken = torch.empty((count, hidden), dtype=states.dtype)
    index = array("q", rows).tobytes()
    if not code.take(states.data_ptr(), size, index, count, hidden * states.itemsize, taken.data_ptr()):
        raise IndexError(f"rows {rows} of {size}")
    return taken


def put(states: Float[Tensor, "rows hidden"], into: Float[Tensor, "room hidden"], row: int, first: int = 0) -> None:
    """Copy rows, from the `first` on, to those from `row` on of another tensor of the same dtype."""
    (end, hidden), size = states.shape, states.itemsize
    if into.shape[0] - row >= end - first and states.is_cpu and states.is_contiguous() and into.is_contiguous():
        size *= hidden
        ctypes.memmove(into.data_ptr() + row * size, states.data_ptr() + first * size, (end - first) * size)
    else:
        into[row : row + end - first] = states[first:]
