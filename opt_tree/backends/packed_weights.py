"""Weights of eight and four bits as `quantised.cpp` reads them: groups of 32 inputs, panels of 64 outputs.

Owns the bytes of such a weight, and refuses a weight that this form does not hold. It knows no layers.
"""

from math import isnan
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

PANEL, GROUP, STEP = 64, 32, 4  # outputs that lie together, inputs of a group, and those that are multiplied at once
_WORST = {8: 1 / 127, 4: 1 / 10}
"""The largest error that is admitted, as a share of a layer's largest weight. Half a step is 1/254 of it, and with four
bits at most 1/15. More is lost where d or m leave the range in which half precision is precise."""


def bits_of(packed: Tensor) -> int:
    """How many bits a packed weight's numbers have."""
    return next(bits for bits in (8, 4) if packed.shape[2] == _bytes(bits))


def pack(weight: Float[Tensor, "outputs inputs"], bits: int, place: Tensor | None = None) -> Tensor:
    """Quantise a weight; return it as the kernel reads it, `[panels, groups, bytes]`, in `place` where that is given.

    With eight bits w = d * q, where the largest |q| of a group is 127; with four w = d * q + m, where m is the least
    number of a group and the largest q is 15. d and m are half precision. The kernel is loaded (`load_kernel`).
    Raises ValueError for weights that this form does not hold: not finite, so small that a whole layer's d would be 0,
    or too large for d or m.
    """
    outputs, inputs = weight.shape
    form = -(-outputs // PANEL), -(-inputs // GROUP), _bytes(bits)
    packed = torch.empty(form, dtype=torch.uint8) if place is None else place.view(form)
    write: Any = torch.ops.opt_tree.quantise_weight
    error, largest = write.default(weight, packed).amax(0).tolist() if weight.numel() else (0.0, 0.0)
    if isnan(error):
        raise ValueError("it has weights that are not finite numbers")
    if not error <= _WORST[bits] * largest:  # infinite where d or m are
        raise ValueError(
            f"in {bits} bits a weight would be off by {error:.2g}, and the largest is {largest:.2g}: "
            "a group's scale is a number of half precision"
        )
    return packed


def some_of(packed: UInt8[Tensor, "panels groups bytes"], outputs: Int[Tensor, " columns"]) -> Tensor:
    """Some outputs of a packed weight, with their own bytes."""
    panels, groups, _ = packed.shape
    numbers, count = PANEL * GROUP * bits_of(packed) // 8, -(-len(outputs) // PANEL)
    chosen = nn.functional.pad(outputs, (0, count * PANEL - len(outputs)))  # behind the last one nobody looks
    parts = []
    for part, size in ((packed[..., :numbers], STEP), (packed[..., numbers:], torch.float16.itemsize)):
        of_outputs = part.reshape(panels, groups, -1, PANEL, size)[chosen // PANEL, :, :, chosen % PANEL]
        of_outputs = of_outputs.view(count, PANEL, groups, -1, size)
        parts.append(of_outputs.permute(0, 2, 3, 1, 4).reshape(count, groups, -1))
    return torch.cat(parts, -1)


def unpack(packed: UInt8[Tensor, "panels groups bytes"], outputs: int, inputs: int) -> Float[Tensor, "outputs inputs"]:
    """Return the numbers of a packed weight, in float32."""
    bits, (panels, groups, _) = bits_of(packed), packed.shape
    numbers = PANEL * GROUP * bits // 8
    q = packed[..., :numbers].view(panels, groups, -1, PANEL, STEP).permute(0, 3, 1, 2, 4)  # as `_packed` laid them
    ends = packed[..., numbers:].contiguous().view(torch.float16).view(panels, groups, -1, PANEL).float()
    d = ends[:, :, 0].transpose(1, 2)[..., None]
    if bits == 8:
        w = (q.float() - 128).reshape(panels, PANEL, groups, GROUP) * d
    else:
        q = torch.stack([q & 15, q >> 4], -2).reshape(panels, PANEL, groups, GROUP)
        w = q.float() * d + ends[:, :, 1].transpose(1, 2)[..., None]
    return w.reshape(panels * PANEL, groups * GROUP)[:outputs, :inputs]


def size_of(shape: torch.Size, bits: int) -> int:
    """How many bytes a weight of this shape is."""
    outputs, inputs = shape
    return -(-outputs // PANEL) * -(-inputs // GROUP) * _bytes(bits)


def _bytes(bits: int) -> int:
    """Of a panel's group: the numbers, d of each output, and m with four bits."""
    return PANEL * GROUP * bits // 8 + 2 * PANEL * (1 if bits == 8 else 2)
