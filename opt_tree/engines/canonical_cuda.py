"""Canonical attention on CUDA, in Triton: the definition at the head of `canonical.cpp`, for blocks of queries.

Owns the kernels. One accumulator for each output number takes key after key, by ascending slot; a hidden key is
skipped. Linear layers and norms are torch's, which choose a kernel by the number of rows: so every canonical forward on
CUDA has `canonical.ROWS` of them, and no product splits its sums. No GPU has run this yet; `models.canonical.check`
decides when a target is switched over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 16, 64
"""Of a block."""
INTEGERS = [f"{of}_{by}" for of in "qkv" for by in ("lane", "head", "row")]
INTEGERS += ["m_lane", "m_row", "heads", "group", "rows", "keys"]
"""Triton makes other machine code for sizes that are 1 or multiples of 16; the number of keys may choose none."""
OTHERS = ["query", "key", "value", "mask", "scores", "out"]
"""Nor may where a tensor begins. And nothing is fused (`enable_fp_fusion`) but what says so."""


@triton.jit(do_not_specialize=[*INTEGERS, "scale"], do_not_specialize_on_alignment=OTHERS)
def _score(
    query, key, mask, scores, scale, q_lane, q_head, q_row, k_lane, k_head, k_row, m_lane, m_row, heads, group, rows,
    keys, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries that share a head of keys, and of a block of keys: one chain over the dimensions."""
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    place = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    slot = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    there = place < group * rows
    row, inside = (place // group).to(tl.int64), there[:, None] & (slot < keys)[None, :]
    asked = query + lane * q_lane + (head * group + place % group) * q_head + row * q_row
    given = key + lane * k_lane + head * k_head + slot.to(tl.int64) * k_row
    total = tl.zeros((QUERIES, KEYS), tl.float32)
    for d in range(DIM):
        q = tl.load(asked + d, mask=there, other=0.0).to(tl.float32)
        k = tl.load(given + d, mask=slot < keys, other=0.0).to(tl.float32)
        total = tl.fma(tl.broadcast_to(q[:, None], total.shape), tl.broadcast_to(k[None, :], total.shape), total)
    added = tl.load(mask + lane * m_lane + row[:, None] * m_row + slot[None, :], mask=inside, other=0.0).to(tl.float32)
    hidden = tl.where(added < -1e30, float("-inf"), float("nan"))  # a mask that adds other numbers is no mask
    to = scores + (tl.program_id(0).to(tl.int64) * group * rows + place[:, None]) * keys + slot[None, :]
    tl.store(to, tl.where(added == 0, total * scale, hidden), mask=inside)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=OTHERS)
def _weigh(
    scores, value, out, v_lane, v_head, v_row, heads, group, rows, keys,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Outputs of a block of queries: the largest score, which is the same in any order, then key after key."""
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    place, column = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    there = place < group * rows
    own = scores + (tl.program_id(0).to(tl.int64) * group * rows + place) * keys
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    for first in range(0, keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = there[:, None] & (slot < keys)[None, :]
        top = tl.maximum(top, tl.max(tl.load(own[:, None] + slot[None, :], mask=inside, other=float("-inf")), 1))
    top = tl.where(top == float("-inf"), 0.0, top)
    sums, total = tl.zeros((QUERIES, COLUMNS), tl.float32), tl.zeros((QUERIES,), tl.float32)
    for slot in range(keys):
        weight = tl.exp(tl.load(own + slot, mask=there, other=float("-inf")) - top)
        from_ = value + lane * v_lane + head * v_head + slot * v_row + column
        v = tl.load(from_, mask=column < DIM, other=0.0).to(tl.float32)
        more = tl.fma(tl.broadcast_to(weight[:, None], sums.shape), tl.broadcast_to(v[None, :], sums.shape), sums)
        sums = tl.where(weight[:, None] == 0, sums, more)
        total += weight
    found = tl.where(total[:, None] == 0, 0.0, sums / tl.where(total == 0, 1.0, total)[:, None])
    at = ((lane * rows + place // group) * heads + head) * group + place % group
    inside = there[:, None] & (column < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + column[None, :], found.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `opt_tree.engines.canonical.attend`. The numbers of a row lie one after the other.

    Another mask than one that hides keys makes rows NaN.
    """
    lanes, heads, rows, dim = query.shape
    kv_heads, keys, columns = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    scores = torch.empty(lanes * kv_heads, group * rows, keys, dtype=torch.float32, device=query.device)
    out = torch.empty(lanes, rows, heads, columns, dtype=query.dtype, device=query.device)
    blocks = lanes * kv_heads, triton.cdiv(group * rows, QUERIES)
    of_mask = mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)
    sizes = kv_heads, group, rows, keys
    with torch.cuda.device_of(query):
        _score[(*blocks, triton.cdiv(keys, KEYS))](
            query, key, mask, scores, scale, *query.stride()[:3], *key.stride()[:3], *of_mask, *sizes,
            DIM=dim, QUERIES=QUERIES, KEYS=KEYS, enable_fp_fusion=False,
        )  # fmt: skip
        _weigh[blocks](
            scores, value, out, *value.stride()[:3], *sizes,
            DIM=columns, COLUMNS=triton.next_power_of_2(columns), QUERIES=QUERIES, KEYS=KEYS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
