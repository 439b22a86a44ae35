"""Linear layers whose weights are packed for this CPU once, not anew in every eager forward.

Owns the packed copies and where they stand in for the layers. A product of a few rows, which a tree is, packs all of
the weights to use them once: with float32 weights that takes as long as the product, or longer. One row of those needs
none of it, and is left as it is, so that plain decoding is not slower. Results differ by rounding.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from opt_tree.engines.canonical import Canonical, NotCanonicalError, at_least_two
from opt_tree.engines.grouped_attention import attention_by

_LEAST = {torch.float32: 1 << 17, torch.bfloat16: 1}
"""Numbers in a weight from which on it is packed: a call takes 10 us more, which in float32 the least ones do not win
back (measured in the demo target's forwards and in one of 344M, of 1 to 61 rows)."""
_SHARE = 2
"""Packed weights may take one part in so many of the memory that is free."""
_SAMPLE = 16
"""Numbers of a weight that are compared before a text, to notice what was changed behind PyTorch's back (`.data`)."""
_copies: "weakref.WeakValueDictionary[int, _Copy]" = weakref.WeakValueDictionary()
"""By the weight's id: a head that borrows the target's output layer takes its copy as well."""


class PackedWeights:
    """The packed linear layers of a model. As a context, they stand in for its own, for one forward.

    Weights are packed when a forward first needs them. What is not a plain `nn.Linear` with its weight on the CPU stays
    as it is, and so does a model for whose copies there is no room, which a warning says.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.wanted = model, True
        """What `pack` was last told."""
        self.canonical = False
        """Whether linear layers and attention are computed so that a row's bits do not depend on other rows."""
        self._linears: list[_Linear] | None = None
        self._here = threading.local()

    def __bool__(self) -> bool:
        """Whether forwards take packed weights."""
        return any(linear.packs for linear in self._layers())

    def pack(self, wanted: bool = True) -> None:
        """Have forwards take packed weights, or the model's own; that gives the copies' memory back."""
        self.wanted, self._linears = wanted, None

    def make_canonical(self, on: bool = True) -> None:
        """Compute one row as two equal ones, and attention by the canonical kernel, which is loaded; or as before."""
        self.canonical, self._linears = on, None

    def attention(self) -> AbstractContextManager[None]:
        """Inside, this thread's bodies compute attention as this model's are to."""
        return attention_by(Canonical if self.canonical else None)

    def check(self) -> None:
        """Pack anew what was changed since, as far as a sample of each weight shows."""
        for linear in self._linears or ():
            linear.check()

    def __enter__(self) -> None:
        for linear in self._layers():
            linear.names.setdefault("forward", linear.call)
        self._here.attention = [*getattr(self._here, "attention", ()), self.attention()]
        self._here.attention[-1].__enter__()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._here.attention.pop().__exit__(None, None, None)
        missing = 0
        for linear in self._layers():
            if linear.names.get("forward") is linear.call:
                linear.names.pop("forward", None)
            else:
                missing += 1
        if missing and self.canonical and error is None:
            raise RuntimeError(
                f"{missing} linear layers of {type(self.model).__name__} were not computed canonically: another thread "
                "ran it at the same time, or something was put in their place. Give each thread a copy of the model"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The model and what was wanted: a copy packs its own weights."""
        return {"model": self.model, "wanted": self.wanted, "canonical": self.canonical}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]
        self.wanted, self.canonical = state["wanted"], state["canonical"]

    def _layers(self) -> "list[_Linear]":
        if self._linears is None:
            self._linears = _found(self.model, self.wanted, self.canonical)
        return self._linears


class _Copy:
    """A weight as it was at some time, and packed."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.version, self.sample = weight, weight._version, _sample(weight)
        with torch.inference_mode():
            self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def fits(self, weight: Tensor) -> bool:
        """Whether it is this weight, unchanged as far as PyTorch knows."""
        return weight is self.weight and weight._version == self.version


class _Linear:
    """One layer and its packed weight, where it `packs`."""

    def __init__(self, module: nn.Linear, packs: bool, canonical: bool) -> None:
        self.packs, self.canonical = packs, canonical
        self.names: dict[str, Any] = module.__dict__
        self.parameters = module._parameters
        self.copy: _Copy | None = None
        self.call: Callable[[Tensor], Tensor] = self._call
        """One object, to know it again: a method is made anew whenever it is asked for."""

    def _call(self, rows: Tensor) -> Tensor:
        return at_least_two(self._compute, rows) if self.canonical else self._compute(rows)

    def _compute(self, rows: Tensor) -> Tensor:
        weight, bias = self.parameters["weight"], self.parameters["bias"]
        assert weight is not None
        if not self.packs:
            return nn.functional.linear(rows, weight, bias)
        if rows.numel() == rows.shape[-1] and weight.dtype == torch.float32:
            return nn.functional.linear(rows, weight, bias)  # nothing is packed for one row, and a call is cheaper
        if self.copy is None or not self.copy.fits(weight):
            self.copy = _copy_of(weight)
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.copy.packed, bias, "none", [], "")

    def check(self) -> None:
        if self.copy is not None and not torch.equal(self.copy.sample, _sample(self.copy.weight)):
            _copies.pop(id(self.copy.weight), None)
            self.copy = None


def _copy_of(weight: Tensor) -> _Copy:
    known = _copies.get(id(weight))
    if known is None or not known.fits(weight):
        known = _copies[id(weight)] = _Copy(weight)
    return known


def _sample(weight: Tensor) -> Tensor:
    return weight.detach().flatten()[:: weight.numel() // _SAMPLE + 1].clone()


def _found(model: Any, wanted: bool, canonical: bool) -> list[_Linear]:
    """The layers that can be packed, if there is room for it; with `canonical` all that are plain."""
    if not wanted and not canonical:
        return []
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = {id(module): module for module in (*model.modules(), output)}.values()
    plain = [module for module in modules if type(module) is nn.Linear and _is_plain(module)]
    if any(hasattr(module, "_hf_hook") for module in modules):
        return []
    linears = [module for module in plain if module.weight.numel() >= (1 if canonical else _least(module.weight))]
    packs = wanted and torch.backends.mkldnn.is_available()
    packs = packs and all(_works(dtype) for dtype in {module.weight.dtype for module in linears})
    size = sum(weight.numel() * weight.element_size() for weight in _apart(module.weight for module in linears))
    free = psutil.virtual_memory().available
    if packs and size * _SHARE > free:
        warnings.warn(
            f"{type(model).__name__}: its weights are not packed for this CPU, which makes forwards of a tree faster: "
            f"that takes {size / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free",
            stacklevel=5,
        )
        packs = False
    if canonical:
        if not packs and any(module.weight.dtype == torch.float32 for module in plain):
            raise NotCanonicalError(f"{type(model).__name__} is canonical in float32 with packed weights only")
        return [_Linear(module, packs and _least(module.weight) < inf, True) for module in plain]
    return [_Linear(module, True, False) for module in linears] if packs else []


def _least(weight: Tensor) -> float:
    return _LEAST.get(weight.dtype, inf)


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and not ("forward" in module.__dict__ and not _is_ours(module.forward))


def _is_ours(forward: Any) -> bool:
    """Whether it stands in for a layer's own just now: another thread is in a forward."""
    return isinstance(getattr(forward, "__self__", None), _Linear)


def _apart(weights: Iterable[Tensor]) -> list[Tensor]:
    """Each weight once, without those that are packed already."""
    return [weight for key, weight in {id(weight): weight for weight in weights}.items() if key not in _copies]


def _works(dtype: torch.dtype) -> bool:
    """Whether this CPU can multiply by packed weights of this dtype."""
    few = torch.ones(16, 16, dtype=dtype)
    try:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(few, None)
            found = torch.ops.mkldnn._linear_pointwise(few, packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool((found == 16).all())
