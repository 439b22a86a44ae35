"""Linear layers whose weights have eight or four bits, on a CPU.

Owns what stands in the place of a model's layers; `packed_weights.py` has the form of the weights, `quantised.cpp`
multiplies. Weights are quantised in groups of 32 inputs, as GGUF's Q8_0 and Q4_1 are, and rows while a forward runs,
each group by itself: so a row's result has the same bits whatever is computed beside it.
"""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from opt_tree.backends import kernels
from opt_tree.backends.mapped import release
from opt_tree.backends.packed_weights import PANEL, bits_of, pack, size_of, some_of, unpack

SOURCE = Path(__file__).with_name("quantised.cpp")
BITS = {"int8": 8, "int4": 4}
"""Of a number, by the name that callers give."""
_HUGE = 1 << 21


def quantise(model: nn.Module, weights: str) -> None:
    """Replace a model's linear layers by quantised ones, in place. `weights`: "int8" or "int4".

    With "int4" the output layer gets eight bits, as in GGUF's files: its errors are the logits'. Layers of fewer than
    64 outputs (a router's) stay as they are. Raises ValueError for a model that cannot be quantised, and KernelError. A
    weight whose numbers cannot be held is met on the way: what was replaced before it stays so.
    """
    check_weights(weights)
    places: list[tuple[nn.Module, str, nn.Linear]] = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.out_features >= PANEL
    ]
    if not places:
        raise ValueError(f"{type(model).__name__} has no plain linear layers to quantise")
    if devices := {str(layer.weight.device) for *_, layer in places} - {"cpu"}:
        raise ValueError(
            f'weights are quantised to {weights} on a CPU, and these are on {", ".join(sorted(devices))}: device="cpu"'
        )
    if dtypes := {layer.weight.dtype for *_, layer in places} - {torch.bfloat16, torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"rows are multiplied by {weights} weights in bfloat16 or float32, and these are {names}")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("its weights are moved by hooks while it runs (offloading)")
    paths = {id(module): path for path, module in model.named_modules()}
    load_kernel()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    held = {id(one) for module in model.modules() if type(module) is not nn.Linear for one in module.parameters(False)}
    bits = [8 if layer is output else BITS[weights] for *_, layer in places]
    room = _room([size_of(layer.weight.shape, each) for (*_, layer), each in zip(places, bits, strict=True)])
    for (parent, name, layer), each, place in zip(places, bits, room, strict=True):
        try:
            packed = pack(layer.weight.detach(), each, place)
        except ValueError as error:
            raise ValueError(f"{paths[id(layer)]}: {error}") from None
        release(layer.weight)
        setattr(parent, name, QuantisedLinear(packed, layer, id(layer.weight) in held))


def check_weights(weights: str) -> None:
    """Raise ValueError for another name than those of `BITS`."""
    if weights not in BITS:
        raise ValueError(f"weights are quantised to {' or '.join(BITS)}, got {weights!r}")


def load_kernel() -> None:
    """Have the kernel, which is built once, in some seconds. Raises KernelError."""
    if kernels.load(SOURCE, "quantised_linear"):
        for name, shaped in (("linear", _fake), ("queries", _fake_queries), ("rest", _fake_rest)):
            torch.library.register_fake(f"opt_tree::quantised_{name}", shaped)


def _fake(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """The shape of what the kernel returns, for tracing."""
    return x.new_empty((*x.shape[:-1], outputs))


def _fake_queries(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of queries, keys and values, by the angles and the numbers of heads, which come last."""
    cos, heads, kv_heads = given[-4], *given[-2:]
    texts, rows, _ = x.shape
    query, key, value = (x.new_empty((texts, count, rows, cos.shape[2])) for count in (heads, kv_heads, kv_heads))
    return query, key, value


def _fake_rest(attended: Tensor, x: Tensor, *given: Any) -> Tensor:
    """The shape of a layer's rows."""
    return torch.empty_like(x)


class QuantisedLinear(nn.Module):
    """A linear layer of packed weights. It takes rows in bfloat16 or float32 and answers in kind."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, packed: UInt8[Tensor, "panels groups bytes"], layer: nn.Linear, tied: bool = False) -> None:
        """`layer`: what it stands for. `tied`: whether another module of the model keeps the weight as it was."""
        super().__init__()
        self.in_features, self.out_features, self.tied = layer.in_features, layer.out_features, tied
        self.dtype = layer.weight.dtype
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        """The weight that it computes with, unpacked anew at every call."""
        return unpack(self.packed, self.out_features, self.in_features).to(self.dtype)

    @property
    def bits(self) -> int:
        """Of each number."""
        return bits_of(self.packed)

    @property
    def numbers(self) -> int:
        """How many weights it has that nothing else keeps."""
        return 0 if self.tied else self.in_features * self.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedLinear":
        """What `to` calls: a model that is to compute in another dtype has this layer answer in it."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def rows(self, outputs: Int[Tensor, " columns"]) -> "QuantisedLinear":
        """The same layer over some of its outputs, with the same numbers."""
        few = nn.Linear(self.in_features, len(outputs), self.bias is not None, device="meta", dtype=self.dtype)
        if self.bias is not None:
            few.bias = nn.Parameter(self.bias[outputs], False)
        return QuantisedLinear(some_of(self.packed, outputs), few)

    def forward(self, rows: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        multiply: Any = torch.ops.opt_tree.quantised_linear
        return multiply.default(rows, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def _room(sizes: list[int]) -> list[Tensor]:
    """Return memory for packed weights in large pages, where the system has them.

    A forward reads all weights once. With pages of 4 KB the processor looks up addresses all the time, and fetches
    ahead to the end of a page at most.
    """
    # Private: a system seldom gives large pages to shared memory, which is what there is without the flags.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    held = mmap.mmap(-1, sum(sizes) + _HUGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(held, dtype=torch.uint8, count=1).data_ptr() % _HUGE
    found = []
    for size in sizes:
        found.append(torch.frombuffer(held, dtype=torch.uint8, count=size, offset=begin))
        begin += size
    return found
