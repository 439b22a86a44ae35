"""A tree rendered for attention: one function turns "which rows may a row see" into the masks a model takes.

Owns the mask arithmetic, for full and for sliding-window layers. Knows no model and no cache.
"""

import functools

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@functools.cache
def hiding(dtype: torch.dtype) -> np.float32:
    """What hides a key: the most negative finite number of both the dtype and float32."""
    return np.float32(max(torch.finfo(dtype).min, torch.finfo(torch.float32).min))


_SHOWN = np.float32(0)


def tree_mask(
    visible: Bool[np.ndarray, "rows columns"],
    prefix: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "1 1 rows keys"]:
    """Return the additive mask of rows that see the whole prefix and, of the slots behind it, what `visible` says.

    Key slot k < prefix is a committed row, seen by all; slot prefix + c is column c of `visible`; slots past the last
    column are unused and hidden. Additive in the model's dtype because eager attention and every SDPA kernel take that
    form, while a boolean mask would be converted again in every layer.
    """
    hidden = hiding(dtype)
    # Few operations, because they run in cold caches; and only the pending rows' block travels to the device.
    block = torch.from_numpy(np.where(visible, _SHOWN, hidden)[None, None]).to(device, dtype, non_blocking=True)
    mask = torch.constant_pad_nd(block, (prefix, 0))
    unused = keys - mask.shape[-1]
    return torch.constant_pad_nd(mask, (0, unused), float(hidden)) if unused else mask


def windowed(
    mask: Float[Tensor, "1 1 rows keys"],
    positions: Int[Tensor, " rows"],
    key_positions: Int[Tensor, " keys"],
    window: int,
) -> Float[Tensor, "1 1 rows keys"]:
    """Hide keys that lie `window` or more positions back. By position, never by slot: siblings share a position."""
    far = positions[:, None] - key_positions[None, :] >= window
    return mask.masked_fill(far, float(hiding(mask.dtype)))


def chunked(
    mask: Float[Tensor, "1 1 rows keys"],
    positions: Int[Tensor, " rows"],
    key_positions: Int[Tensor, " keys"],
    chunk: int,
) -> Float[Tensor, "1 1 rows keys"]:
    """Hide keys whose position lies in another chunk of `chunk` tokens (Llama 4)."""
    far = positions[:, None] // chunk != key_positions[None, :] // chunk
    return mask.masked_fill(far, float(hiding(mask.dtype)))
