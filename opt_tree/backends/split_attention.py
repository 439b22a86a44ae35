"""Attention of few rows over many keys on CUDA, in Triton: keys are split over programs, then the parts are combined.

Owns the kernels of captured forwards that are not canonical. PyTorch's kernel for masks has one program for a few rows
of a head, however many keys they see: in a tree's forward most of a GPU's processors would have nothing to do. Parts
are combined as in Flash-Decoding (Dao et al. 2023), by the largest score, the sum of weights and the weighted values of
each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from opt_tree.backends.grouped_attention import Grouped

QUERIES, KEYS = 16, 64
"""Of a tile of scores."""
PART = 128
"""Keys of one part, a multiple of `KEYS`."""
LARGEST = 128
"""Rows of a forward, at most. More rows are enough programs for PyTorch's kernel."""


@triton.jit
def _attend_part(
    query, key, value, mask, sums, tops, totals, scale, q_lane, q_head, q_row, k_lane, k_head, k_row, v_lane, v_head,
    v_row, m_lane, m_row, heads, group, rows, keys, parts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries, which share a head of keys, to one part of the keys.

    Stores for each query its largest score in the part (`tops`), the sum of its weights, e to how far a score is below
    that (`totals`), and the values times their weights (`sums`).
    """
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    # The `group` queries of a row come one after the other, then those of the next row.
    place, d = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    is_query, row = place < group * rows, (place // group).to(tl.int64)
    queries = query + lane * q_lane + (head * group + place % group) * q_head + row * q_row
    q = tl.load(queries[:, None] + d[None, :], mask=is_query[:, None] & (d < DIM)[None, :], other=0.0)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    summed = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in tl.static_range(0, PART, KEYS):
        slot = tl.program_id(2) * PART + first + tl.arange(0, KEYS)
        at, is_key = slot.to(tl.int64), slot < keys
        is_pair = is_query[:, None] & is_key[None, :]
        key_rows = key + lane * k_lane + head * k_head + at * k_row
        k = tl.load(key_rows[None, :] + d[:, None], mask=(d < DIM)[:, None] & is_key[None, :], other=0.0)
        added = tl.load(mask + lane * m_lane + row[:, None] * m_row + at[None, :], mask=is_pair, other=-float("inf"))
        score = tl.dot(q, k, input_precision="ieee") * scale + added.to(tl.float32)
        # The mask adds the dtype's most negative number where a key is hidden. In bfloat16 and float32 no score of a
        # key that is seen is as low; in float16 it can stay, since its weight is 0 beside any key that is seen.
        score = tl.where(score > -1e30, score, float("-inf"))
        # What is summed so far gets smaller where a larger score comes.
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp(score - base[:, None]), tl.exp(top - base)
        v = tl.load(
            value + lane * v_lane + head * v_head + at[:, None] * v_row + d[None, :],
            mask=is_key[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        summed = summed * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total, top = total * kept + tl.sum(weight, 1), higher
    part = (tl.program_id(0).to(tl.int64) * group * rows + place) * parts + tl.program_id(2)
    tl.store(sums + part[:, None] * WIDTH + d[None, :], summed, mask=is_query[:, None])
    tl.store(tops + part, top, mask=is_query)
    tl.store(totals + part, total, mask=is_query)


@triton.jit
def _combine_parts(
    sums, tops, totals, out, heads, group, rows, parts, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):
    """Combine the parts of one query: each counts e to how far its largest score is below the largest of all."""
    lane_head, place, d = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    begin, top = (lane_head * group * rows + place) * parts, float("-inf")
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        top = tl.maximum(top, tl.max(tl.load(tops + begin + part, mask=part < parts, other=float("-inf")), 0))
    top, total = tl.where(top == float("-inf"), 0.0, top), 0.0
    summed = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        weight = tl.exp(tl.load(tops + begin + part, mask=part < parts, other=float("-inf")) - top)
        total += tl.sum(weight * tl.load(totals + begin + part, mask=part < parts, other=0.0), 0)
        values = tl.load(sums + (begin + part)[:, None] * WIDTH + d[None, :], mask=(part < parts)[:, None], other=0.0)
        summed += tl.sum(weight[:, None] * values, 0)
    at = ((lane_head // heads * rows + place // group) * heads + lane_head % heads) * group + place % group
    tl.store(out + at * DIM + d, (summed / tl.where(total == 0, 1.0, total)).to(out.dtype.element_ty), mask=d < DIM)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention from tensors whose last stride is 1, with shapes as in `opt_tree.backends.canonical.attend`.

    Results differ from its by rounding. A row that sees no key is zero; in float16 it attends to the hidden ones.
    """
    lanes, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group, lane_heads, parts = heads // kv_heads, lanes * kv_heads, triton.cdiv(keys, PART)
    width = max(16, triton.next_power_of_2(dim))
    sums = torch.empty(lane_heads, group * rows, parts, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(lane_heads, group * rows, parts, dtype=torch.float32, device=query.device)
    totals = torch.empty_like(tops)
    out = torch.empty(lanes, rows, heads, dim, dtype=query.dtype, device=query.device)
    mask_strides = mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)  # one mask may be that of all lanes
    sizes = kv_heads, group, rows
    with torch.cuda.device_of(query):
        _attend_part[lane_heads, triton.cdiv(group * rows, QUERIES), parts](
            query, key, value, mask, sums, tops, totals, scale, *query.stride()[:3], *key.stride()[:3],
            *value.stride()[:3], *mask_strides, *sizes, keys, parts,
            DIM=dim, WIDTH=width, QUERIES=QUERIES, KEYS=KEYS, PART=PART,
        )  # fmt: skip
        _combine_parts[lane_heads, group * rows](
            sums, tops, totals, out, *sizes, parts, DIM=dim, WIDTH=width, PARTS=8, num_warps=2
        )
    return out


class SplitAttention(Grouped):
    """The attention of one captured forward. `Grouped` computes what these kernels are not made for."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        other_dims, many_rows = query.shape[3] != value.shape[3], query.shape[2] > LARGEST
        special = dropout or any(more.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
        unfit = special or other_dims or many_rows or query.dtype == torch.float64
        if unfit or attention_mask is None or attention_mask.shape[1] > 1:
            return super().__call__(module, query, key, value, attention_mask, dropout, scaling, **more)
        given = query, key, value, attention_mask
        q, k, v, mask = (one if one.stride(-1) == 1 else one.contiguous() for one in given)
        return attend(q, k, v, mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None
