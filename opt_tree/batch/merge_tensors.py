"""Forwards of several sequences as the tensors of one, padded side by side.

Owns padding, and which forwards are cheaper apart. Knows no model and no lane.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from opt_tree.engines import Inputs
from opt_tree.engines.base import Mask

T = TypeVar("T")


def cheapest_split(asked: Sequence[T], cost: Callable[[Sequence[T]], float]) -> list[list[T]]:
    """Split forwards, the longest first, into the parts that cost least together, each of neighbours.

    A prefill of 500 rows does not pad a tree of 10 to its size. In this order the best split is a shortest path over
    the places to split at.
    """
    best = [(0.0, 0)]
    for end in range(1, len(asked) + 1):
        best.append(min((best[begin][0] + cost(asked[begin:end]), begin) for begin in range(end)))
    parts, end = [], len(asked)
    while end:
        parts.append(list(asked[best[end][1] : end]))
        end = best[end][1]
    return parts


def in_lanes(
    forwards: Sequence[Inputs | None], rows: int, keys: int, scratch: int
) -> tuple[Int[Tensor, "3 lanes {rows}"], Mask | dict[str, Mask], list[Tensor]]:
    """A body's inputs, a batch row for each forward: padded on the left to `rows`, on the right to `keys`.

    Padding is written to the slot `scratch`; a lane without a forward is padding as a whole. The list has the features,
    where a head reads some.
    """
    first = next(forward for forward in forwards if forward is not None)
    if all(forward is not None and forward.ints.shape[1] == rows for forward in forwards):
        ints = torch.stack([forward.ints for forward in forwards], 1)  # type: ignore[union-attr]
    else:
        ints = first.ints.new_zeros((3, len(forwards), rows))
        ints[2] = scratch
        for lane, forward in enumerate(forwards):
            if forward is not None:
                ints[:, lane, rows - forward.ints.shape[1] :] = forward.ints
    if isinstance(first.mask, dict):
        masks = {kind: [one and one.mask[kind] for one in forwards] for kind in first.mask}  # type: ignore[index]
        mask: Any = {kind: _mask(own, rows, keys) for kind, own in masks.items()}  # type: ignore[arg-type]
    else:
        mask = _mask([one and one.mask for one in forwards], rows, keys)  # type: ignore[arg-type, misc]
    if first.features is None:
        return ints, mask, []
    features = first.features.new_zeros((len(forwards), rows, first.features.shape[1]))
    for own, forward in zip(features, forwards, strict=True):
        if forward is not None:
            own[rows - len(forward.features) :] = forward.features  # type: ignore[arg-type]
    return ints, mask, [features]


def _mask(
    masks: Sequence[Bool[Tensor, "1 1 _ _"] | None], rows: int, keys: int
) -> Bool[Tensor, "lanes 1 {rows} {keys}"]:
    """One mask for all lanes: what a lane has no rows or keys for is hidden, but a padding row sees the first key."""
    first = next(mask for mask in masks if mask is not None)
    whole = first.new_zeros((len(masks), 1, rows, keys))
    for lane, mask in zip(whole, masks, strict=True):
        empty = rows if mask is None else rows - mask.shape[2]
        if mask is not None:
            lane[:, empty:, : mask.shape[3]] = mask[0]
        if empty:
            lane[:, :empty, 0] = True
    return whole
