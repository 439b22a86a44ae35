"""Forwards of several sequences as the tensors of one, padded side by side.

Owns padding, and which forwards are cheaper apart. Knows no model and no lane.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxtyping import Bool
from torch import Tensor

from opt_tree.backend import Inputs

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


def side_by_side(asked: Sequence[Inputs | None], rows: int, keys: int, scratch: int) -> Inputs:
    """The forwards of several texts as one: padded in front to `rows`, on the right to `keys`.

    Padding is written to the slot `scratch`; a lane without a forward is padding as a whole.
    """
    first = next(one for one in asked if one is not None)
    numbers = first.numbers.new_zeros((3, len(asked), rows))
    numbers[2] = scratch
    for lane, one in enumerate(asked):
        if one is not None:
            numbers[:, lane, rows - one.numbers.shape[2] :] = one.numbers[:, 0]
    if isinstance(first.mask, dict):
        masks = {kind: [one and one.mask[kind] for one in asked] for kind in first.mask}  # type: ignore[index]
        mask: Any = {kind: _mask(own, rows, keys) for kind, own in masks.items()}  # type: ignore[arg-type]
    else:
        mask = _mask([one and one.mask for one in asked], rows, keys)  # type: ignore[arg-type, misc]
    features = None
    if first.features is not None:
        features = first.features.new_zeros((len(asked), rows, first.features.shape[2]))
        for own, one in zip(features, asked, strict=True):
            if one is not None and one.features is not None:
                own[rows - one.features.shape[1] :] = one.features[0]
    last_only = all(one is None or one.last_only for one in asked)
    return Inputs(numbers, mask, features, last_only)


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
