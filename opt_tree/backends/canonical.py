"""Canonical arithmetic: a token's logits are a function of the tokens before it alone, bit for bit.

Owns the attention kernel (`canonical.cpp`), what stands in the place of transformers' attention function while a body
runs, the rules for one row and for many on a CPU, and that for all rows on CUDA. `opt_tree.models.canonical` switches a
model over and checks it.
"""

import functools
import importlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opt_tree.backends import kernels

SOURCE = Path(__file__).with_name("canonical.cpp")
DTYPES = (torch.bfloat16, torch.float32)
ROWS = 64
"""Of each canonical forward on CUDA, where libraries choose their kernels by the number of rows."""

_here = threading.local()
Compute = Callable[[Float[Tensor, "rows inputs"]], Float[Tensor, "rows outputs"]]
"""A linear layer."""


class NotCanonicalError(ValueError):
    """A model's forwards cannot be canonical here; the message says why in one line."""


def load_kernel(device: str = "cpu") -> None:
    """Have the attention kernel. On a CPU it is built once for it and this torch, then loaded; on CUDA it is in Triton.

    Raises NotCanonicalError where there is no C++ compiler or no Triton, and where the kernel does not build or load.
    """
    if device == "cuda":
        try:
            importlib.import_module("opt_tree.backends.canonical_cuda")
        except ImportError as error:
            raise NotCanonicalError(f"its attention kernel on CUDA is written in Triton: {error}") from error
        return
    try:
        if kernels.load(SOURCE, "canonical_attention"):
            torch.library.register_fake("opt_tree::canonical_attention", _fake)
    except kernels.KernelError as error:
        raise NotCanonicalError(str(error)) from error


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The shape of what the kernel returns, for tracing."""
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def attend(
    query: Float[Tensor, "lanes heads rows dim"],
    key: Float[Tensor, "lanes kv_heads keys dim"],
    value: Float[Tensor, "lanes kv_heads keys value_dim"],
    mask: Float[Tensor, "_ 1 rows keys"],
    scale: float,
) -> Float[Tensor, "lanes rows heads value_dim"]:
    """Attention in bfloat16 or float32 whose sums go key after key, in the order of slots; see `canonical.cpp`.

    Arguments:
        query: Each `heads / kv_heads` heads in turn attend to one head of keys.
        mask: Of one lane or of all; 0 where a row sees a key, the dtype's most negative number or -inf where not.
        scale: Of the products of queries and keys.

    Raises RuntimeError for shapes, dtypes and masks that it is not made for.
    """
    q, k, v, seen = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value, mask))
    if query.device.type == "cuda":
        from opt_tree.backends import canonical_cuda

        return canonical_cuda.attend(q, k, v, seen, scale)
    return cast(Any, torch.ops.opt_tree.canonical_attention).default(q, k, v, seen, scale)


class Canonical:
    """The attention of one forward, in the place of transformers' `sdpa`."""

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
        others = [name for name in ("softcap", "position_bias", "s_aux", "cache") if more.get(name) is not None]
        if attention_mask is None or attention_mask.shape[1] > 1 or dropout or others:
            what = ", ".join(others) or ("a mask for each head" if attention_mask is not None else "no mask")
            raise NotCanonicalError(f"there is no canonical attention for {type(module).__name__} with {what}")
        _here.layers = layers_seen() + 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, scale), None


def layers_seen() -> int:
    """How many layers this thread has computed by canonical attention."""
    return getattr(_here, "layers", 0)


def as_two(compute: Compute, row: Float[Tensor, "1 inputs"]) -> Float[Tensor, "1 outputs"]:
    """Compute a linear layer of one row as that of two equal ones.

    From two rows on the library sums a row's products in the same order, as far as `rows_alike` says.
    """
    return compute(torch.cat([row, row]))[:1]


COUNTS = 2, 7, 16, 33, 48, 64, 130
"""Numbers of rows that are tried: below, at and above where libraries change their way."""
_BLOCKS = 32, 16, 8, 4, 2


def rows_alike(compute: Compute, weight: Float[Tensor, "outputs inputs"]) -> int | None:
    """How many rows a linear layer without a bias sums in one order, be they two or more; None: any of `COUNTS`."""
    if sums_alike(compute, weight, COUNTS):
        return None
    return next((most for most in _BLOCKS if sums_alike(compute, weight, range(2, most + 1))), min(_BLOCKS))


@functools.cache
def many_rows_differ(threads: int) -> bool:
    """Whether the library sums products of many rows in bfloat16 in another order than those of few, in some layers.

    On a CPU with AMX it does so from 33 rows on in most layers of 512 inputs or more. `threads`: those of this process;
    the library divides its work among them.
    """
    numbers = torch.Generator().manual_seed(0)
    weights = (torch.randn(*shape, generator=numbers).bfloat16() for shape in ((192, 576), (64, 4096)))
    return any(rows_alike(functools.partial(nn.functional.linear, weight=one), one) is not None for one in weights)


def sums_one_otherwise(compute: Compute, weight: Tensor) -> bool:
    """Whether a linear layer without a bias computes one row by another kernel than several."""
    return not sums_alike(compute, weight, [1])


def sums_alike(compute: Compute, weight: Float[Tensor, "outputs inputs"], counts: Iterable[int]) -> bool:
    """Whether a linear layer without a bias sums a row's products in one order in forwards of so many rows.

    It is asked for sums that are exactly zero. What comes out is rounding alone, which the order of a sum decides, in
    all its bits.
    """
    rows = _zero_sums(weight)
    expected = torch.cat([compute(pair) for pair in rows.split(2)])
    for count in counts:
        if count == 1:
            found = torch.cat([compute(row[None]) for row in rows])
        else:
            found = compute(rows.repeat(-(-count // len(rows)), 1)[:count])
        wanted = expected.repeat(-(-len(found) // len(rows)), 1)[: len(found)]
        if not same_bits(found, wanted):
            return False
    return True


def _zero_sums(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "6 inputs"]:
    """Rows whose products with some of a weight's outputs are exactly zero, but for rounding.

    A row takes a weight's numbers with those of each random pair swapped, and one of the two negated.
    """
    outputs, inputs = weight.shape
    numbers = torch.Generator().manual_seed(0)
    pairs = torch.randperm(inputs, generator=numbers)[: inputs // 2 * 2].view(-1, 2)
    rows = torch.randn(6, inputs, generator=numbers).to(weight.dtype)  # the last one stays as it is
    for row, output in enumerate((0, outputs // 4, outputs // 2, 3 * outputs // 4, outputs - 1)):
        rows[row, pairs.T] = torch.stack([weight[output, pairs[:, 1]], -weight[output, pairs[:, 0]]])
    return rows


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether these are the same bits: +0.0 and -0.0 are not, and a NaN is like itself."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
