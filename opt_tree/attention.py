"""A tree rendered for attention: one function turns "which rows may a row see" into the masks a model takes.

Owns the mask arithmetic, for full and for sliding-window layers. Knows no model and no cache.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def tree_mask(
    visible: Bool[Tensor, "rows columns"],
    prefix: int,
    keys: int,
    dtype: torch.dtype,
) -> Float[Tensor, "1 1 rows keys"]:
    """Return the additive mask of rows that see the whole prefix and, of the slots behind it, what `visible` says.

    Key slot k < prefix is a committed row, seen by all; slot prefix + c is column c of `visible`; slots past the last
    column are unused and hidden. Additive in the model's dtype because eager attention and every SDPA kernel take that
    form, while a boolean mask would be converted again in every layer.
    """
    rows, columns = visible.shape
    hidden = torch.finfo(dtype).min
    mask = torch.zeros(rows, keys, dtype=dtype, device=visible.device)
    if prefix + columns < keys:
        mask[:, prefix + columns :] = hidden
    mask.narrow(1, prefix, columns).masked_fill_(~visible, hidden)
    return mask.view(1, 1, rows, keys)


def windowed(
    mask: Float[Tensor, "1 1 rows keys"],
    positions: Int[Tensor, " rows"],
    key_positions: Int[Tensor, " keys"],
    window: int,
) -> Float[Tensor, "1 1 rows keys"]:
    """Hide keys that lie `window` or more positions back. By position, never by slot: siblings share a position."""
    far = positions[:, None] - key_positions[None, :] >= window
    return mask.masked_fill(far, torch.finfo(mask.dtype).min)
