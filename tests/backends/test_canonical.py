"""Canonical arithmetic: what the attention kernel computes, bit by bit, and what leaves no trace in it."""

import functools
import math
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from opt_tree.backends import canonical, kernels
from opt_tree.backends.canonical import attend, many_rows_differ, rows_alike, sums_alike, sums_one_otherwise

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
DTYPES = [torch.float32, torch.bfloat16]
HIDDEN = -3e38


pytestmark = pytest.mark.usefixtures("kernel")


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int16 if numbers.dtype == torch.bfloat16 else torch.int32)


def problem(
    seed: int,
    dtype: torch.dtype,
    lanes: int = 1,
    groups: int = 2,
    shared: int = 2,
    rows: int = 5,
    keys: int = 37,
    dim: int = 16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask in which every row sees its first key and two thirds of the others."""
    numbers = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return (2 * torch.randn(*size, generator=numbers)).to(dtype)

    seen = torch.rand(lanes, 1, rows, keys, generator=numbers) < 0.7
    seen[..., 0] = True
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, HIDDEN)
    query = normal(lanes, groups * shared, rows, dim)
    return query, normal(lanes, groups, keys, dim), normal(lanes, groups, keys, dim), mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 1, "keys": 1},
        {"lanes": 3, "groups": 3, "shared": 3, "rows": 7, "keys": 133, "dim": 64},
        {"lanes": 2, "groups": 1, "shared": 5, "rows": 3, "keys": 16, "dim": 40},
        {"groups": 4, "shared": 1, "rows": 30, "keys": 61, "dim": 5},
        {"groups": 1, "shared": 2, "rows": 2, "keys": 300, "dim": 256},
    ],
)
def test_the_kernel_against_float64(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    query, key, value, mask = problem(0, dtype, **sizes)
    value = value[..., : max(1, value.shape[-1] - 3)]  # a head of values may have another size
    groups = query.shape[1] // key.shape[1]
    keys, values = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scale = query.shape[-1] ** -0.5
    scores = scale * query.double() @ keys.transpose(2, 3)
    expected = (scores.masked_fill(mask != 0, -math.inf).softmax(-1) @ values).transpose(1, 2)
    error = (attend(query, key, value, mask, scale).double() - expected).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 4e-2)


def single(exact: Fraction) -> Fraction:
    """The float32 next to an exact number, of two the even one."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    best = min(candidates, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.int32)) & 1))
    return Fraction(float(best))


def exponential(x: Fraction) -> Fraction:
    """The kernel's polynomial, in exact arithmetic rounded where the kernel rounds."""
    if x < -87:
        return Fraction(0)
    literal = [Fraction(float(np.float32(one))) for one in (1.44269504088896341, -0.693359375, 2.12194440e-4)]
    n = single(x * literal[0] + Fraction(12582912)) - 12582912
    r = single(n * literal[2] + single(n * literal[1] + x))
    terms = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    y = Fraction(float(np.float32(1.9875691500e-4)))
    for term in terms:
        y = single(y * r + Fraction(float(np.float32(term))))
    y = single(single(y * single(r * r) + r) + 1)
    return y * Fraction(2) ** int(n)


def as_defined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One row and one head by the definition at the head of `canonical.cpp`."""
    scale = Fraction(float(np.float32(scale)))
    asked, keys, values = (
        [[Fraction(x) for x in row] for row in one.double().tolist()] for one in (query[0, 0], key[0, 0], value[0, 0])
    )
    seen = [number for number, hidden in enumerate(mask[0, 0, 0].tolist()) if hidden == 0]
    scores = {}
    for k in seen:
        chain = Fraction(0)
        for a, b in zip(asked[0], keys[k], strict=True):
            chain = single(a * b + chain)
        scores[k] = single(chain * scale)
    top = max(scores.values())
    total, sums = Fraction(0), [Fraction(0)] * len(values[0])
    for k in seen:
        weight = exponential(single(scores[k] - top))
        total = single(total + weight)
        sums = [single(weight * v + one) for v, one in zip(values[k], sums, strict=True)]
    return torch.tensor([[[[float(single(one / total)) for one in sums]]]]).to(query.dtype)


def leaves_no_trace(attend: Attend, dtype: torch.dtype) -> bool:
    """Whether rows keep their bits in other company: other rows, lanes and slots, and junk in the hidden ones."""
    query, key, value, mask = given = problem(3, dtype, rows=9, keys=83)
    whole = bits(attend(*given, 0.25))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    if not torch.equal(bits(attend(query[:, :, order], key, value, mask[:, :, order], 0.25)), whole[:, order]):
        return False
    for rows in (slice(0, 1), slice(1, 6), slice(6, 9)):
        if not torch.equal(bits(attend(query[:, :, rows], key, value, mask[:, :, rows], 0.25)), whole[:, rows]):
            return False
    # The same keys in other slots, in the same order, with junk between and behind them.
    slots, apart = torch.arange(83) + torch.arange(83) // 5 * 3 + 1, 160
    for junk in (0.0, 7e3, math.inf, math.nan):
        far_key, far_value = (torch.full((*one.shape[:2], apart, 16), junk, dtype=dtype) for one in (key, value))
        hidden = torch.full((1, 1, 9, apart), HIDDEN, dtype=dtype)
        far_key[:, :, slots], far_value[:, :, slots], hidden[..., slots] = key, value, mask
        lanes = (torch.cat([torch.zeros_like(one), one]) for one in (query, far_key, far_value, hidden))
        if not torch.equal(bits(attend(*lanes, 0.25))[1:], whole):
            return False
    return True


@pytest.mark.parametrize("seed, dtype", enumerate(DTYPES))
def test_the_kernel_does_what_its_definition_says_bit_by_bit(seed: int, dtype: torch.dtype) -> None:
    given = problem(seed, dtype, groups=1, shared=1, rows=1, keys=45, dim=16)
    assert torch.equal(bits(attend(*given, 0.06)), bits(as_defined(*given, 0.06)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_rows_lanes_slots_and_junk_leave_no_trace(dtype: torch.dtype) -> None:
    assert leaves_no_trace(attend, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_leave_no_trace(dtype: torch.dtype) -> None:
    given = problem(4, dtype, lanes=2, groups=3, rows=6)
    whole, threads = attend(*given, 0.25), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(bits(attend(*given, 0.25)), bits(whole))
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_is_not_made_one() -> None:
    """In a key that is seen; a row that sees no key is 0."""
    query, key, value, mask = problem(5, torch.float32, rows=3)
    mask[0, 0, 0], mask[0, 0, 1, 1:] = -math.inf, -math.inf
    key[..., 4, :] = math.nan
    mask[0, 0, 2, 4] = 0
    found = attend(query, key, value, mask, 0.25)
    assert (found[0, 0] == 0).all() and found[0, 1].isfinite().all() and found[0, 2].isnan().all()


def test_other_masks_and_shapes_are_refused() -> None:
    query, key, value, mask = problem(6, torch.float32)
    with pytest.raises(RuntimeError, match="adds other numbers to scores"):
        attend(query, key, value, torch.full_like(mask, -1.0), 0.25)
    with pytest.raises(RuntimeError, match="shapes"):
        torch.ops.opt_tree.canonical_attention(query, key, value[:, :1], mask, 0.25)
    with pytest.raises(RuntimeError, match="shapes"):  # a division by their number would end the process
        torch.ops.opt_tree.canonical_attention(query, key[:, :0], value[:, :0], mask, 0.25)
    with pytest.raises(RuntimeError, match="four dimensions"):
        torch.ops.opt_tree.canonical_attention(query[0], key[0], value[0], mask[0], 0.25)
    with pytest.raises(RuntimeError, match="different dtypes"):
        attend(query, key.bfloat16(), value, mask, 0.25)
    with pytest.raises(RuntimeError, match="for bfloat16 and float32"):
        attend(query.double(), key.double(), value.double(), mask.double(), 0.25)


@pytest.mark.slow
def test_the_width_of_vectors_decides_nothing(tmp_path: Path) -> None:
    """Not even their fused multiply-adds, which are functions of the library without the processor's."""
    file, made = tmp_path / "narrow.cpp", tmp_path / "narrow.so"
    file.write_text(canonical.SOURCE.read_text().replace("(opt_tree", "(narrow"))
    subprocess.run([*kernels.command(file, made), "-march=x86-64", "-O0"], check=True)
    torch.ops.load_library(str(made))
    other = torch.ops.narrow.canonical_attention.default
    for dtype in DTYPES:
        given = problem(7, dtype, groups=1, rows=6, keys=70, dim=72)
        assert torch.equal(bits(other(*given, 0.25)), bits(attend(*given, 0.25)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_sums_is_seen_for_one_row(dtype: torch.dtype) -> None:
    """Where a row of random numbers shows it in few of its outputs, or in none."""
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1)).to(dtype)

    def added(products: Tensor) -> Tensor:
        """One column after the other: no library's order, which is another one on another CPU."""
        return functools.reduce(torch.add, products.unbind(-1))

    def whole(rows: Tensor) -> Tensor:
        return added(rows.float()[:, None] * weight.float()).to(dtype)

    def halved(rows: Tensor) -> Tensor:
        if len(rows) > 1:
            return whole(rows)
        products = rows.float()[:, None] * weight.float()
        return (added(products[..., :48]) + added(products[..., 48:])).to(dtype)

    assert sums_one_otherwise(halved, weight) and not sums_one_otherwise(whole, weight)


def test_another_order_of_sums_is_seen_for_many_rows() -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))

    def added(rows: Tensor) -> Tensor:
        products = rows[:, None] * weight
        if len(rows) <= 8:
            return functools.reduce(torch.add, products.unbind(-1))
        return functools.reduce(torch.add, products.flip(-1).unbind(-1))

    assert sums_alike(added, weight, range(1, 9)) and not sums_alike(added, weight, [9])


def test_how_many_rows_are_alike_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that sums more than 20 rows of 512 inputs and more in two halves."""

    def special(rows: Tensor, weight: Tensor) -> Tensor:
        halves = [slice(None)] if len(rows) <= 20 or weight.shape[1] < 512 else [slice(256), slice(256, None)]
        products = [(rows.double()[:, None, half] * weight.double()[:, half]).sum(-1).float() for half in halves]
        return sum(products[1:], products[0])

    monkeypatch.setattr(torch.nn.functional, "linear", special)
    assert many_rows_differ.__wrapped__(1)
    for inputs, most in ((64, None), (512, 16)):
        weight = torch.randn(24, inputs, generator=torch.Generator().manual_seed(3))
        assert rows_alike(functools.partial(special, weight=weight), weight) == most
