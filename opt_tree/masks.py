"""From which rows a row may see to the masks of attention: boolean on their way to a model, additive inside it."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor


def tree_mask(
    visible: Bool[np.ndarray, "rows columns"],
    prefix: int,
    padded: int,
    keys: int,
    device: torch.device = torch.device("cpu"),
) -> Bool[Tensor, "1 1 padded keys"]:
    """Return the mask of rows that see the whole prefix and, of the slots behind it, what `visible` says.

    Slot prefix + c is column c of `visible`. Rows that are missing to `padded` stand in front: they see the prefix and
    their own slots, those behind the last column. All other slots are hidden.
    """
    (rows, columns), host = visible.shape, device.type == "cpu"
    # What is behind the prefix is all that travels to a device; on the host the whole is as cheap.
    seen = np.ones((1, 1, padded, keys if host else keys - prefix), dtype=bool)
    behind = seen[0, 0, :, prefix if host else 0 :]  # a view of the slots behind the prefix
    behind[padded - rows :, :columns] = visible
    if columns < behind.shape[1]:
        behind[:, columns:] = False
        behind[: padded - rows] = np.eye(padded - rows, behind.shape[1], columns, dtype=bool)  # its own slot alone
    mask = torch.from_numpy(seen)
    return mask if host else torch.constant_pad_nd(mask.to(device, non_blocking=True), (prefix, 0), 1)


def additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return what is added to scores: 0 where a key is seen, else the least number finite in `dtype` and in float32.

    In the model's dtype, as attention takes it: a boolean mask would be converted again in every layer.
    """
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return torch.full_like(mask, hidden, dtype=dtype).masked_fill_(mask, 0.0)
