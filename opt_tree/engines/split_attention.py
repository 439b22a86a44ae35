"""Attention of few rows over many keys on CUDA, in Triton: keys are split over programs, whose parts are put together.

Owns the kernels of captured forwards that are not canonical. PyTorch's masked kernel has one program for some rows of a
head, however many keys these see: a tree's forward is then mostly waiting for a few of a GPU's processors. Sums as in
Flash-Decoding (Dao et al. 2023): each part brings its largest score, its sum of weights and its weighted values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from opt_tree.engines.grouped_attention import Grouped

QUERIES, KEYS, PART = 16, 64, 128
"""Of a tile of scores; and the keys of one part."""
LARGEST = 128
"""Rows of a forward from which on PyTorch's kernel has enough to do."""


@triton.jit
def _parts(
    query, key, value, mask, sums, tops, totals, scale, q_lane, q_head, q_row, k_lane, k_head, k_row, v_lane, v_head,
    v_row, m_lane, m_row, heads, group, rows, keys, parts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The part of a tile of queries that share a head of keys: weights below the part's largest score."""
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    place, d = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    there, row = place < group * rows, (place // group).to(tl.int64)
    asked = query + lane * q_lane + (head * group + place % group) * q_head + row * q_row
    q = tl.load(asked[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    found = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in tl.static_range(0, PART, KEYS):
        slot = tl.program_id(2) * PART + first + tl.arange(0, KEYS)
        at, known = slot.to(tl.int64), slot < keys
        inside = there[:, None] & known[None, :]
        given = key + lane * k_lane + head * k_head + at * k_row
        k = tl.load(given[None, :] + d[:, None], mask=(d < DIM)[:, None] & known[None, :], other=0.0)
        added = tl.load(mask + lane * m_lane + row[:, None] * m_row + at[None, :], mask=inside, other=-float("inf"))
        score = tl.dot(q, k, input_precision="ieee") * scale + added.to(tl.float32)
        # A key that is hidden has the dtype's most negative number: no score of a key that is seen is as low.
        score = tl.where(score > -1e30, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp(score - base[:, None]), tl.exp(top - base)
        v = tl.load(
            value + lane * v_lane + head * v_head + at[:, None] * v_row + d[None, :],
            mask=known[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        found = found * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total, top = total * kept + tl.sum(weight, 1), higher
    one = (tl.program_id(0).to(tl.int64) * group * rows + place) * parts + tl.program_id(2)
    tl.store(sums + one[:, None] * WIDTH + d[None, :], found, mask=there[:, None])
    tl.store(tops + one, top, mask=there)
    tl.store(totals + one, total, mask=there)


@triton.jit
def _together(
    sums, tops, totals, out, heads, group, rows, parts, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):
    """The output of one query: its parts, each by what its largest score is below that of all."""
    each, place, d = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    one, top = (each * group * rows + place) * parts, float("-inf")
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        top = tl.maximum(top, tl.max(tl.load(tops + one + part, mask=part < parts, other=float("-inf")), 0))
    top, total = tl.where(top == float("-inf"), 0.0, top), 0.0
    found = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        weight = tl.exp(tl.load(tops + one + part, mask=part < parts, other=float("-inf")) - top)
        total += tl.sum(weight * tl.load(totals + one + part, mask=part < parts, other=0.0), 0)
        more = tl.load(sums + (one + part)[:, None] * WIDTH + d[None, :], mask=(part < parts)[:, None], other=0.0)
        found += tl.sum(weight[:, None] * more, 0)
    at = ((each // heads * rows + place // group) * heads + each % heads) * group + place % group
    tl.store(out + at * DIM + d, (found / tl.where(total == 0, 1.0, total)).to(out.dtype.element_ty), mask=d < DIM)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Shapes as in `opt_tree.engines.canonical.attend`; sums in other orders. A row that sees no key is zero."""
    lanes, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group, each, parts = heads // kv_heads, lanes * kv_heads, triton.cdiv(keys, PART)
    width = max(16, triton.next_power_of_2(dim))
    sums = torch.empty(each, group * rows, parts, width, dtype=torch.float32, device=query.device)
    tops, totals = (torch.empty(each, group * rows, parts, dtype=torch.float32, device=query.device) for _ in "ml")
    out = torch.empty(lanes, rows, heads, dim, dtype=query.dtype, device=query.device)
    of_mask, sizes = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)), (kv_heads, group, rows)
    with torch.cuda.device_of(query):
        _parts[each, triton.cdiv(group * rows, QUERIES), parts](
            query, key, value, mask, sums, tops, totals, scale, *query.stride()[:3], *key.stride()[:3],
            *value.stride()[:3], *of_mask, *sizes, keys, parts,
            DIM=dim, WIDTH=width, QUERIES=QUERIES, KEYS=KEYS, PART=PART,
        )  # fmt: skip
        _together[each, group * rows](
            sums, tops, totals, out, *sizes, parts, DIM=dim, WIDTH=width, PARTS=8, num_warps=2
        )
    return out


class Split(Grouped):
    """The attention of one captured forward. What the kernels do not know is computed as by `Grouped`."""

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
        known = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[3] == value.shape[3]
        special = dropout or any(more.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
        if special or not known or query.shape[2] > LARGEST or query.dtype == torch.float64:
            return super().__call__(module, query, key, value, attention_mask, dropout, scaling, **more)
        assert attention_mask is not None
        given = query, key, value, attention_mask
        q, k, v, seen = (one if one.stride(-1) == 1 else one.contiguous() for one in given)
        return attend(q, k, v, seen, query.shape[-1] ** -0.5 if scaling is None else scaling), None
