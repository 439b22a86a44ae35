"""Canonical attention on CUDA, in Triton: an output number is the sum of one key after the other, by ascending slot.

Owns the kernels. A hidden key is skipped, so that neither its place nor what lies there leaves a trace. A score is a
product of one query and one key by tiles that do not depend on how many there are. Linear layers and norms are
libraries', which choose a kernel by the number of rows: so every canonical forward on CUDA has `canonical.ROWS` of
them. `models.canonical.check` decides when a target is switched over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 16, 64
"""Of a tile of scores."""
SUMMED, UNROLL = 2, 8
"""Queries that a program sums values for, and the keys whose loads are under way at once."""
INTEGERS = [f"{of}_{by}" for of in "qkv" for by in ("lane", "head", "row")]
INTEGERS += ["m_lane", "m_row", "heads", "group", "rows", "keys"]
"""Triton makes other machine code for sizes that are 1 or multiples of 16; the number of keys may choose none."""
OTHERS = ["query", "key", "value", "mask", "scores", "out"]
"""Nor may where a tensor begins. And nothing is fused (`enable_fp_fusion`) but what says so."""


@triton.jit(do_not_specialize=[*INTEGERS, "scale"], do_not_specialize_on_alignment=OTHERS)
def _score(
    query, key, mask, scores, scale, q_lane, q_head, q_row, k_lane, k_head, k_row, m_lane, m_row, heads, group, rows,
    keys, DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of queries that share a head of keys, and of keys: -inf where hidden."""
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    place = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    slot, d = tl.program_id(2) * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there = place < group * rows
    row, inside = (place // group).to(tl.int64), there[:, None] & (slot < keys)[None, :]
    asked = query + lane * q_lane + (head * group + place % group) * q_head + row * q_row
    given = key + lane * k_lane + head * k_head + slot.to(tl.int64) * k_row
    q = tl.load(asked[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    k = tl.load(given[None, :] + d[:, None], mask=(d < DIM)[:, None] & (slot < keys)[None, :], other=0.0)
    total = tl.dot(q, k, input_precision="ieee") * scale
    added = tl.load(mask + lane * m_lane + row[:, None] * m_row + slot[None, :], mask=inside, other=0.0).to(tl.float32)
    hidden = tl.where(added < -1e30, float("-inf"), float("nan"))  # a mask that adds other numbers is no mask
    to = scores + (tl.program_id(0).to(tl.int64) * group * rows + place[:, None]) * keys + slot[None, :]
    tl.store(to, tl.where(added == 0, total, hidden), mask=inside)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=OTHERS)
def _weigh(scores, group, rows, keys, SUMMED: tl.constexpr, KEYS: tl.constexpr):
    """Replace a row's scores by weights: e to how far each is below the largest, which is the same in any order."""
    place = tl.program_id(1) * SUMMED + tl.arange(0, SUMMED)
    own = scores + (tl.program_id(0).to(tl.int64) * group * rows + place) * keys
    there, top = place < group * rows, tl.full((SUMMED,), float("-inf"), tl.float32)
    for first in range(0, keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = there[:, None] & (slot < keys)[None, :]
        top = tl.maximum(top, tl.max(tl.load(own[:, None] + slot[None, :], mask=inside, other=float("-inf")), 1))
    top = tl.where(top == float("-inf"), 0.0, top)
    for first in range(0, keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = there[:, None] & (slot < keys)[None, :]
        score = tl.load(own[:, None] + slot[None, :], mask=inside, other=float("-inf"))
        tl.store(own[:, None] + slot[None, :], tl.exp(score - top[:, None]), mask=inside)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=OTHERS)
def _sum(
    scores, value, out, v_lane, v_head, v_row, heads, group, rows, keys,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SUMMED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Outputs of some queries: one chain over the keys for each number, and one for the sum of weights."""
    lane, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    place, column = tl.program_id(1) * SUMMED + tl.arange(0, SUMMED), tl.arange(0, WIDTH)
    there = place < group * rows
    own = scores + (tl.program_id(0).to(tl.int64) * group * rows + place) * keys
    given = value + lane * v_lane + head * v_head + column
    sums, total = tl.zeros((SUMMED, WIDTH), tl.float32), tl.zeros((SUMMED,), tl.float32)
    for slot in tl.range(0, keys, loop_unroll_factor=UNROLL):
        weight = tl.load(own + slot, mask=there, other=0.0)
        v = tl.load(given + slot * v_row, mask=column < DIM, other=0.0).to(tl.float32)
        more = tl.fma(tl.broadcast_to(weight[:, None], sums.shape), tl.broadcast_to(v[None, :], sums.shape), sums)
        sums = tl.where(weight[:, None] == 0, sums, more)
        total += weight
    found = tl.where(total[:, None] == 0, 0.0, sums / tl.where(total == 0, 1.0, total)[:, None])
    at = ((lane * rows + place // group) * heads + head) * group + place % group
    inside = there[:, None] & (column < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + column[None, :], found.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `opt_tree.backends.canonical.attend`. The numbers of a row lie one after the other.

    Another mask than one that hides keys makes rows NaN.
    """
    lanes, heads, rows, dim = query.shape
    kv_heads, keys, columns = key.shape[1], key.shape[2], value.shape[3]
    group, each = heads // kv_heads, lanes * kv_heads
    scores = torch.empty(each, group * rows, keys, dtype=torch.float32, device=query.device)
    out = torch.empty(lanes, rows, heads, columns, dtype=query.dtype, device=query.device)
    of_mask, sizes = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)), (kv_heads, group, rows, keys)
    tiles, some = triton.cdiv(group * rows, QUERIES), triton.cdiv(group * rows, SUMMED)
    with torch.cuda.device_of(query):
        _score[each, tiles, triton.cdiv(keys, KEYS)](
            query, key, mask, scores, scale, *query.stride()[:3], *key.stride()[:3], *of_mask, *sizes,
            DIM=dim, WIDTH=_width(dim), QUERIES=QUERIES, KEYS=KEYS, enable_fp_fusion=False,
        )  # fmt: skip
        _weigh[each, some](scores, group, rows, keys, SUMMED=SUMMED, KEYS=KEYS, enable_fp_fusion=False)
        _sum[each, some](
            scores, value, out, *value.stride()[:3], *sizes,
            DIM=columns, WIDTH=_width(columns), SUMMED=SUMMED, UNROLL=UNROLL, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _width(numbers: int) -> int:
    """Of a tile that holds so many numbers: a product of tiles takes 16 at least."""
    return max(16, triton.next_power_of_2(numbers))
