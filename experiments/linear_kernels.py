"""Which kernel multiplies a few rows by a model's weights fastest on this CPU: torch's, and the library's own.

    python -m experiments.linear_kernels [--shapes smollm2|344m|qwen]

Each product of a model is timed over copies of its weight that do not fit into the caches, as a forward finds them; a
column is the sum over all products of a forward. Quantised rows are at hand where a kernel takes them so, scales of its
result are left to the caller: both are in its favour.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import check_bounds, main_of, option

SHAPES = {
    "smollm2": [(576, 576, 60), (192, 576, 60), (1536, 576, 60), (576, 1536, 30), (49152, 576, 1)],
    "344m": [(1024, 1024, 96), (3072, 1024, 48), (1024, 3072, 24), (4096, 1024, 2)],
    "qwen": [(1536, 1536, 56), (256, 1536, 56), (8960, 1536, 56), (1536, 8960, 28), (151936, 1536, 1)],
}
"""Outputs, inputs, and how many such products a forward has; "qwen": of Qwen2.5-Coder-1.5B."""


@dataclass(frozen=True)
class Options:
    """The products, the rows, and the machine's limits."""

    shapes: str = option("smollm2", "whose products", choices=tuple(SHAPES))
    rows: str = option("1,6,8,16,61", "comma list: rows of the products")
    rounds: int = option(3, "over all copies; the fastest one counts", least=1)
    bandwidth: float = option(24.0, "of the memory to one core, in GB a second")
    peak: float = option(116.0, "products of bfloat16 a second, in 10^9; of bytes there are twice as many")
    threads: int = option(1, "CPU threads", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)


main = main_of("experiments.linear_kernels", Options, __doc__, "experiments.linear_kernels:run")

if __name__ == "__main__":
    sys.exit(main())

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.command_line import Value, table, whole_numbers
from evaluation.timing import environment, schedule
from opt_tree.backends.packed_weights import pack
from opt_tree.backends.prepacked import _works
from opt_tree.backends.quantised import load_kernel

Product = Callable[[Tensor], Tensor]
_COLD = 120e6
"""Bytes of the copies of a weight: several times the last cache."""


def _own(bits: int) -> Callable[[Tensor], Product]:
    def make(weight: Tensor) -> Product:
        packed, multiply = pack(weight, bits), torch.ops.opt_tree.quantised_linear.default
        return lambda x: multiply(x, packed, None, len(weight))

    return make


def _bfloat16(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _int8pack(weight: Tensor) -> Product:
    q, scale = _rounded(weight)
    half = scale.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, q, half)


def _int4pack(weight: Tensor) -> Product:
    outputs, group = len(weight), 64
    some = weight.view(outputs, -1, group)
    scale = (some.amax(-1) - some.amin(-1)) / 15
    q = ((some - some.amin(-1, True)) / scale[..., None]).round().clamp(0, 15).to(torch.int32).view_as(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2)
    ends = torch.stack([scale, some.amin(-1) + 8 * scale], -1).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, ends)


def _qlinear(weight: Tensor) -> Product:
    q, scale = _rounded(weight)
    packed, zeros = torch.ops.onednn.qlinear_prepack(q, None), torch.zeros(len(q), dtype=torch.int32)
    multiply: Any = torch.ops.onednn.qlinear_pointwise.default
    given: Any = (packed, scale, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
    return lambda x: multiply(x, 1.0, 128, *given)


def _int_mm(weight: Tensor) -> Product:
    q = _rounded(weight)[0].t()
    return lambda x: torch._int_mm(x, q)


def _fbgemm(weight: Tensor) -> Product:
    torch.backends.quantized.engine = "fbgemm"
    zeros = torch.zeros(len(weight), dtype=torch.long)
    q = torch.quantize_per_channel(weight, weight.abs().amax(1) / 127, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(q, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed, False)


KERNELS: dict[str, tuple[Callable[[Tensor], Product], torch.dtype, float, int]] = {
    "bfloat16, oneDNN, packed": (_bfloat16, torch.bfloat16, 2, 1),
    "int8, `_weight_int8pack_mm`": (_int8pack, torch.bfloat16, 1, 1),
    "int4, `_weight_int4pack_mm_for_cpu`": (_int4pack, torch.bfloat16, 0.5625, 1),
    "int8, `onednn.qlinear_pointwise`": (_qlinear, torch.uint8, 1, 2),
    "int8, `_int_mm`": (_int_mm, torch.int8, 1, 2),
    "int8, `quantized.linear_dynamic`": (_fbgemm, torch.bfloat16, 1, 2),
    "int8, this library's": (_own(8), torch.bfloat16, 1.0625, 2),
    "int4, this library's": (_own(4), torch.bfloat16, 0.625, 2),
}
"""Each kernel: how a product is made, what rows it takes, bytes a weight, and products an instruction (times
bfloat16's)."""


@torch.inference_mode()
def microseconds(kernel: str, shape: tuple[int, int, int], rows: list[int], rounds: int) -> list[float]:
    """Time one product of each number of rows, the weight not in the caches."""
    make, dtype, size, _ = KERNELS[kernel]
    outputs, inputs, _ = shape
    weight = 0.02 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    products = [make(weight) for _ in range(max(2, int(_COLD / (outputs * inputs * size))))]
    found = []
    for count in rows:
        x = torch.randn(count, inputs)
        x = x.bfloat16() if dtype.is_floating_point else (20 * x).round().clamp(-90, 90).abs().to(dtype)
        best = float("inf")
        for _ in range(rounds):
            begin = time.perf_counter()
            for product in products:
                product(x)
            best = min(best, (time.perf_counter() - begin) / len(products))
        found.append(1e6 * best)
    return found


def run(options: Options) -> dict[str, Any]:
    """Time every kernel on every product, print the sums and return them."""
    if not _works(torch.bfloat16):
        raise ValueError(
            "this CPU multiplies no packed bfloat16 (AVX-512 or avx_ne_convert does), which is compared with"
        )
    torch.set_num_threads(options.threads)
    load_kernel()
    rows, shapes = whole_numbers(options.rows), SHAPES[options.shapes]
    total = {kernel: [0.0] * len(rows) for kernel in KERNELS}
    for kernel, shape in schedule(list(KERNELS), tqdm(shapes, desc="products", disable=None)):
        times = microseconds(kernel, shape, rows, options.rounds)
        total[kernel] = [sum_ + shape[2] * one / 1000 for sum_, one in zip(total[kernel], times, strict=True)]
    numbers = sum(outputs * inputs * count for outputs, inputs, count in shapes)
    lines: list[dict[str, Value]] = []
    for kernel, sums in total.items():
        line: dict[str, Value] = {"kernel": kernel}
        _, _, size, faster = KERNELS[kernel]
        for count, ms in zip(rows, sums, strict=True):
            limit = max(numbers * size / options.bandwidth, count * numbers / (options.peak * faster)) / 1e6
            line |= {f"{count} rows, ms": ms, f"{count}: times the limit": ms / limit}
        lines.append(line)
    print(table(lines))
    return {"environment": environment(torch.device("cpu")), "kernels": lines}
