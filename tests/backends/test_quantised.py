"""Quantised linear layers: what the kernel computes, bit by bit, and how weights are packed."""

import copy
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from test_canonical import bits as bits_of
from test_canonical import single
from torch import Tensor, nn

from opt_tree.backends import kernels, quantised
from opt_tree.backends.packed_weights import GROUP, PANEL, pack, unpack
from opt_tree.backends.quantised import QuantisedLinear, load_kernel, quantise

pytestmark = pytest.mark.usefixtures("quantised_kernel")


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return torch.ops.opt_tree.quantised_linear.default(x, packed, bias, outputs)


def problem(seed: int, bits: int, rows: int = 5, inputs: int = 72, outputs: int = 70) -> tuple[Tensor, Tensor]:
    """Rows with a few large numbers, and a packed weight."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=numbers)
    x[:, ::17] *= 30
    return x, pack(0.1 * torch.randn(outputs, inputs, generator=numbers), bits)


def as_defined(x: Tensor, packed: Tensor, outputs: list[int]) -> Tensor:
    """Some outputs of one row by the definition at the head of `quantised.cpp`, in exact arithmetic."""
    bits, groups = quantised.bits_of(packed), packed.shape[1]
    padded = nn.functional.pad(x.float(), (0, groups * GROUP - len(x))).view(groups, GROUP).numpy()
    y = {output: Fraction(0) for output in outputs}
    for group, numbers in enumerate(padded):
        most = np.abs(numbers).max()
        scaled = numbers * (np.float32(127) / most if most else np.float32(0))
        q = [int(one) for one in np.rint(scaled)]
        s = Fraction(float(most / np.float32(127)))
        for output in outputs:
            panel, place = divmod(output, PANEL)
            lies = packed[panel, group].numpy()
            step = lies[: PANEL * GROUP * bits // 8].reshape(-1, PANEL, 4)[:, place]
            u = step.reshape(-1) if bits == 8 else np.stack([step & 15, step >> 4], 1).reshape(-1)
            d, m = (
                Fraction(float(lies[begin : begin + 2 * PANEL].view(np.float16)[place])) if begin < len(lies) else None
                for begin in (PANEL * GROUP * bits // 8, PANEL * GROUP * bits // 8 + 2 * PANEL)
            )
            total = sum((int(a) - (128 if bits == 8 else 0)) * b for a, b in zip(u, q, strict=True))
            y[output] = single(Fraction(total) * single(s * d) + y[output])
            if m is not None:
                y[output] = single(single(s * sum(q)) * m + y[output])
    return torch.tensor([float(y[output]) for output in outputs])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_does_what_its_definition_says_bit_by_bit(bits: int) -> None:
    some = [0, 1, 37, 63, 64, 69]
    x, packed = problem(bits, bits)
    found = multiply(x, packed, None, 70)
    for row in (0, 4):
        assert torch.equal(bits_of(found[row, some]), bits_of(as_defined(x[row], packed, some)))


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["x86-64-v2 -mf16c -O0", "haswell"])
def test_a_processor_without_its_instructions_computes_the_same(tmp_path: Path, processor: str) -> None:
    """One without vectors of eight numbers, and one with these but without vectors of sixteen."""
    if processor == "haswell" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor does not run such code")
    name = f"portable_{processor[:3]}"
    file, made = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
    source = quantised.SOURCE.read_text().replace("FRAGMENT(opt_tree", f"FRAGMENT({name}")
    file.write_text(source.replace("IMPL(opt_tree", f"IMPL({name}"))
    subprocess.run([*kernels.command(file, made), *f"-march={processor}".split()], check=True)
    torch.ops.load_library(str(made))
    for bits in (8, 4):
        for rows in (1, 2, 5, 6, 7, 13):  # blocks of one to six rows, side by side
            x, packed = problem(rows, bits, rows)
            found = getattr(torch.ops, name).quantised_linear(x, packed, None, 70)
            assert torch.equal(bits_of(found), bits_of(multiply(x, packed, None, 70)))
            again = torch.empty_like(packed)
            getattr(torch.ops, name).quantise_weight(unpack(packed, 70, 72), again)
            assert torch.equal(again, pack(unpack(packed, 70, 72), bits))
            extreme = x.sign() * 1e3  # every number of a row is 127 or -127: the largest sums
            most = pack(extreme.new_ones(70, 72).where(torch.arange(72) % 32 > 0, -1), bits)
            assert torch.equal(
                bits_of(getattr(torch.ops, name).quantised_linear(extreme, most, None, 70)),
                bits_of(multiply(extreme, most, None, 70)),
            )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_and_threads_leave_no_trace(bits: int, dtype: torch.dtype) -> None:
    x, packed = problem(1, bits, rows=40, inputs=96, outputs=200)
    x = x.to(dtype)
    whole, threads = multiply(x, packed, None, 200), torch.get_num_threads()
    assert whole.dtype == dtype
    for begin in (0, 3, 17):
        for rows in range(1, 15):
            some = multiply(x[begin : begin + rows], packed, None, 200)
            assert torch.equal(bits_of(some), bits_of(whole[begin : begin + rows]))
    lanes = multiply(x.view(2, 20, 96).transpose(0, 1), packed, None, 200)
    assert torch.equal(bits_of(lanes.transpose(0, 1).reshape(40, 200)), bits_of(whole))
    try:
        torch.set_num_threads(2)
        assert torch.equal(bits_of(multiply(x, packed, None, 200)), bits_of(whole))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_these_bits_hold_are_kept(bits: int) -> None:
    """As those of a GGUF file: a group's d and m are half precision, and its largest levels are there."""
    numbers = torch.Generator().manual_seed(bits)
    low, high = (-127, 128) if bits == 8 else (0, 16)
    q = torch.randint(low, high, (70, 3, GROUP), generator=numbers)
    q[..., 0], q[..., 1] = low, high - 1
    d = (0.01 * torch.rand(70, 3, 1, generator=numbers) + 1e-3).half().float()
    m = torch.randn(70, 3, 1, generator=numbers).half().float() if bits == 4 else torch.zeros(())
    weight = (q * d + m).view(70, 96)
    found = unpack(pack(weight, bits), 70, 96)
    # m is the group's least number, exactly; d is the span by 15, which may round to a neighbour.
    assert torch.equal(found, weight) if bits == 8 else torch.allclose(found, weight, atol=2e-5)


def levels(group: np.ndarray, bits: int) -> np.ndarray:
    """What a group of 32 numbers is packed as, in the arithmetic of single precision."""
    w = group.astype(np.float32)
    m = np.float32(0) if bits == 8 else np.float32(np.float16(w.min()))
    span = np.abs(w).max() / np.float32(127) if bits == 8 else (w.max() - w.min()) / np.float32(15)
    d = np.float32(np.float16(span))
    q = np.rint((w - m) / (d or np.float32(1))).clip(*((-127, 127) if bits == 8 else (0, 15)))
    return q.astype(np.float32) * d + m


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_has_its_own_levels(bits: int, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 72, generator=torch.Generator().manual_seed(bits)).to(dtype)
    weight[3], weight[4], weight[5, :32] = 0, weight[4] * 1e-6, weight[5, :32] * 1e3
    found = unpack(pack(weight, bits), 70, 72)
    for row, groups in zip(found.numpy(), nn.functional.pad(weight.float(), (0, 24)).view(70, 3, GROUP), strict=True):
        assert np.array_equal(np.concatenate([levels(group.numpy(), bits) for group in groups])[:72], row)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 63])
def test_numbers_that_are_not_finite_are_refused(bad: float, place: int) -> None:
    weight = torch.randn(130, 64, generator=torch.Generator().manual_seed(0))
    weight[place, place] = bad
    for bits in (8, 4):
        with pytest.raises(ValueError, match="weights that are not finite numbers"):
            pack(weight, bits)


@pytest.mark.parametrize(("bits", "factor"), [(8, 1e-6), (8, 2.5e-5), (8, 1e8), (4, 1e-6), (4, -1e5), (4, 1e7)])
def test_weights_that_half_precision_scales_do_not_hold_are_refused(bits: int, factor: float) -> None:
    """A scale below 3e-8 is 0 and all weights with it, one above 65,504 infinite; just above 3e-8 it is coarse."""
    weight = torch.rand(70, 40, generator=torch.Generator().manual_seed(0)) * factor
    with pytest.raises(ValueError, match=rf"in {bits} bits a weight would be off by .*, and the largest is "):
        pack(weight, bits)
    model = Two().requires_grad_(False)
    model.layer.weight.copy_(1e-7)
    with pytest.raises(ValueError, match=rf"^layer: in {bits} bits a weight would be off by "):
        quantise(model, f"int{bits}")


@pytest.mark.parametrize("bits", [8, 4])
def test_small_weights_beside_large_ones_cost_less_than_a_step_of_these(bits: int) -> None:
    """A row of 1e-7 (of a token that nobody trained) becomes 0, as it may; a layer of zeros stays one."""
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-7
    assert (unpack(pack(weight, bits), 70, 40)[3]).abs().max() < 1e-6
    assert not unpack(pack(torch.zeros(70, 40), bits), 70, 40).any()


def test_zeros_stay_zeros_and_what_is_no_number_is_not_made_one() -> None:
    for bits in (8, 4):
        x, packed = problem(2, bits, rows=4)
        x[0], x[1, 3], x[2, 40] = 0, math.nan, -math.inf
        found = multiply(x, packed, None, 70)
        assert (found[0] == 0).all() and found[1:3].isnan().all() and found[3].isfinite().all()
    assert (unpack(pack(torch.zeros(64, 32), 8), 64, 32) == 0).all()
    assert (multiply(torch.ones(1, 32), pack(torch.zeros(64, 32), 4), None, 64) == 0).all()


def test_a_bias_is_added() -> None:
    x, packed = problem(3, 8)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(x, packed, bias, 70), multiply(x, packed, None, 70) + bias)


def test_what_does_not_fit_is_refused() -> None:
    x, packed = problem(4, 8)
    with pytest.raises(RuntimeError, match="does not fit rows and outputs"):
        multiply(x[:, :30], packed, None, 70)
    with pytest.raises(RuntimeError, match="does not fit rows and outputs"):
        multiply(x, packed, None, 129)
    for outputs, weight in ((0, packed[:0]), (-1, packed[:0]), (2**63 - 1, packed)):
        with pytest.raises(RuntimeError, match="does not fit rows and outputs"):
            multiply(x, weight, None, outputs)
    for bias in (torch.zeros(69), torch.zeros(7, 10)):
        with pytest.raises(RuntimeError, match="the bias does not fit"):
            multiply(x, packed, bias, 70)
    with pytest.raises(RuntimeError, match="does not fit rows and outputs"):
        multiply(torch.tensor(1.0), packed, None, 70)
    with pytest.raises(RuntimeError, match="for bfloat16 and float32"):
        multiply(x.double(), packed, None, 70)


def test_rows_of_no_numbers_give_the_bias() -> None:
    """As torch's layers do. What nobody writes holds what was there before."""
    bias, nothing = torch.arange(70.0), problem(0, 8)[1][:, :0].contiguous()
    for rows in (1, 7):
        torch.full((rows, 70), 7.0)  # memory that is free again at once
        assert torch.equal(multiply(torch.zeros(rows, 0), nothing, bias, 70), bias.expand(rows, -1))
    assert multiply(torch.zeros(0, 0), nothing, bias, 70).shape == (0, 70)


class Two(nn.Module):
    """An embedding, a layer that is tied to it, one with a bias, and one that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.output.weight = self.embedding.weight
        self.layer, self.router = nn.Linear(64, 96), nn.Linear(64, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.output


def test_a_models_layers_are_replaced() -> None:
    torch.manual_seed(0)
    model = Two().requires_grad_(False)
    before = copy.deepcopy(model)
    quantise(model, "int4")
    assert isinstance(model.output, QuantisedLinear) and isinstance(model.layer, QuantisedLinear)
    assert (model.output.bits, model.layer.bits) == (8, 4), "the output layer has eight bits in any case"
    assert type(model.router) is nn.Linear and model.embedding.weight.dtype == torch.float32
    assert model.output.tied and not model.output.numbers and model.layer.numbers == 64 * 96
    x = torch.randn(3, 64)
    assert (model.layer(x) - before.layer(x)).norm() < 0.15 * before.layer(x).norm()
    assert torch.equal(model.output.weight, unpack(model.output.packed, 100, 64))
    twin = copy.deepcopy(model)
    assert torch.equal(twin.layer(x), model.layer(x))
    few = model.output.rows(torch.tensor([5, 99, 0]))
    assert torch.equal(few(x), model.output(x)[:, [5, 99, 0]]), "the same numbers"
    assert torch.equal(few.weight, model.output.weight[[5, 99, 0]])
    assert model.bfloat16().layer.dtype == torch.bfloat16 == model.layer(x.bfloat16()).dtype
    assert model.float().output.weight.dtype == torch.float32
    several = torch.arange(95)
    assert torch.equal(model.layer.rows(several)(x), model.layer(x)[:, :95]), "of four bits, in two panels"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="a system without /proc")
def test_weights_lie_where_large_pages_can_be() -> None:
    """Shared memory seldom gets them."""
    model = Two().requires_grad_(False)
    quantise(model, "int8")
    place = model.layer.packed.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= place < end:
            assert line.split()[1] == "rw-p"
            break
    else:
        raise AssertionError("its weights lie nowhere")


def test_a_model_that_cannot_be_quantised_says_why() -> None:
    with pytest.raises(ValueError, match="quantised to int8 or int4, got 'int2'"):
        quantise(Two(), "int2")
    with pytest.raises(ValueError, match="these are float64"):
        quantise(Two().double(), "int8")
    with pytest.raises(ValueError, match="no plain linear layers"):
        quantise(nn.Sequential(nn.Linear(8, 8)), "int8")
    with pytest.raises(ValueError, match="on a CPU, and these are on meta"):
        quantise(Two().to("meta"), "int8")
    spoilt = Two().requires_grad_(False)
    spoilt.layer.weight[3, 4] = math.inf
    with pytest.raises(ValueError, match="layer: it has weights that are not finite"):
        quantise(spoilt, "int8")
    load_kernel()  # is there already
