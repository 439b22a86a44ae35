"""Linear layers whose weights are packed for this CPU once, not anew in every eager forward.

Owns the packed copies and where they stand in for the layers. A product of a few rows, which a tree is, packs all of
the weights to use them once: with float32 weights that takes as long as the product, or longer. One row of those needs
none of it, and is left as it is, so that plain decoding is not slower. Results differ by rounding.
"""

import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any

import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn

from opt_tree.backends.canonical import (
    COUNTS,
    Canonical,
    NotCanonicalError,
    as_two,
    many_rows_differ,
    rows_alike,
    sums_alike,
    sums_one_otherwise,
)
from opt_tree.backends.grouped_attention import attention_by
from opt_tree.backends.mapped import release
from opt_tree.backends.snapshot import fits, sample, version

_LEAST = {torch.float32: 1 << 17, torch.bfloat16: 1}
"""Numbers in a weight from which on it is packed: a call takes 10 us more, which in float32 the least ones do not win
back (measured in the demo target's forwards and in one of 344M, of 1 to 61 rows)."""
_TRIED = 1 << 14
"""Numbers in a weight from which on a layer is tried for canonical sums: for less, torch has many ways of its own."""
_SHARE = 2
"""Packed weights may take one part in so many of the memory that is free."""
_copies: "weakref.WeakValueDictionary[int, _Copy]" = weakref.WeakValueDictionary()
"""By the weight's id: a head that borrows the target's output layer takes its copy as well."""
_lock = threading.Lock()
"""Held while layers get their stand-ins or are given back."""


class _Here(threading.local):
    """What forwards of this thread compute otherwise than the layers themselves."""

    linears: "Mapping[_PackedForward, _Linear]" = MappingProxyType({})
    entered: tuple[AbstractContextManager[None], ...] = ()
    """The forwards under way, the innermost last: one may run another model's."""


_here = _Here()


class PackedWeights:
    """The packed linear layers of a model. As a context, they stand in for its own, for one forward of this thread.

    Whoever runs the model in another thread meanwhile has the layers themselves, as under autocast everybody has.
    Weights are packed when a forward first needs them. What is not a plain `nn.Linear` with its weight on the CPU stays
    as it is, and so does a model for whose copies there is no room, which a warning says.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.wanted = model, True
        """What `pack` was last told."""
        self.canonical = False
        """Whether linear layers and attention are computed so that a row's bits do not depend on other rows."""
        self._linears: list[_Linear] | None = None

    def __bool__(self) -> bool:
        """Whether forwards take packed weights."""
        return any(linear.packs for linear in self._layers())

    def pack(self, wanted: bool = True) -> None:
        """Have forwards take packed weights, or the model's own; that gives the copies' memory back."""
        self.wanted, self._linears = wanted, None

    def make_canonical(self, on: bool = True) -> None:
        """Compute attention by the canonical kernel, which is loaded, or as before.

        Where a layer needs it, one row goes as two equal ones, and many rows in blocks.
        """
        self.canonical, self._linears = on, None

    def attention(self) -> AbstractContextManager[None]:
        """Inside, this thread's bodies compute attention as this model's are to."""
        return attention_by(Canonical if self.canonical else None)

    def forget(self) -> None:
        """Look for layers again and pack them anew when the next forward needs them: the model was changed."""
        for linear in self._linears or ():
            if linear.copy is not None:
                _copies.pop(id(linear.copy.weight), None)
        self._linears = None

    def uneven(self) -> str | None:
        """What computes a row otherwise among others, in canonical arithmetic; None: nothing that was tried.

        Layers of one shape are computed alike: one of them is tried. Of tiny ones, which no model has whose text
        somebody reads, this is not asked. Experts and the like multiply by weights of their own, at once.
        """
        layers = [linear for linear in self._layers() if linear.weight.numel() >= _TRIED]
        for linear in {(linear.weight.shape, linear.weight.dtype): linear for linear in layers}.values():
            if not linear.alike():
                return f"layers of {list(linear.weight.shape)} compute a row otherwise among others"
        if not many_rows_differ(torch.get_num_threads()):
            return None
        ours = {id(linear.weight) for linear in layers}
        for module in self.model.modules():
            for name, weight in [] if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
                if weight.dtype != torch.bfloat16 or weight.ndim < 2 or id(weight) in ours:
                    continue
                one = weight.reshape(-1, *weight.shape[-2:])[0]
                ways = (one, one.T) if one.numel() >= _TRIED else ()
                if any(rows_alike(partial(nn.functional.linear, weight=way), way) is not None for way in ways):
                    return f"{type(module).__name__} multiplies by {name} itself, which sums many rows otherwise here"
        return None

    @property
    def in_blocks(self) -> bool:
        """Whether canonical arithmetic computes products of many rows in blocks of fewer."""
        return self.canonical and any(linear.rule[1] for linear in self._layers())

    def __enter__(self) -> None:
        inside = self._standing_in()
        inside.__enter__()
        _here.entered = (*_here.entered, inside)

    def __exit__(self, *error: Any) -> None:
        *outside, inside = _here.entered
        _here.entered = tuple(outside)
        inside.__exit__(*error)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Inside, a stand-in is before each layer, and this thread computes by them and by this model's attention."""
        layers = self._layers()
        if torch.is_autocast_enabled("cpu"):  # which multiplies in another dtype than the weights'
            if self.canonical:
                raise RuntimeError(
                    f"{type(self.model).__name__} is canonical, which autocast undoes: decode outside it"
                )
            layers = []
        with _lock:
            stand_ins = {one: linear for linear in layers if (one := linear.stand_in())}
        outside, _here.linears = _here.linears, {**_here.linears, **stand_ins}
        try:
            with self.attention():
                yield
        finally:
            _here.linears = outside
            with _lock:
                missing = len(layers) - sum([linear.give_back(one) for one, linear in stand_ins.items()])
        if missing and self.canonical:
            raise RuntimeError(
                f"{missing} linear layers of {type(self.model).__name__} were not computed canonically: something was "
                "put in their place. Give each user of the model a copy of it"
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
        self.weight, self.version, self.sample = weight, version(weight), sample(weight)
        with torch.inference_mode():
            self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        release(weight)  # forwards read the copy

    def fits(self, weight: Tensor) -> bool:
        """Whether it is this weight, unchanged as far as PyTorch knows."""
        return weight is self.weight and version(weight) == self.version

    def holds(self, weight: Tensor) -> bool:
        """The same, also as far as numbers show it that are compared."""
        return self.fits(weight) and self.sample is not None and fits(self.sample, weight)


class _PackedForward:
    """What a layer has in the place of its `forward` while some thread is in a forward of packed weights.

    It looks up what that thread asked for; any other thread gets what the layer itself computes, gradients included.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters, self.users = parameters, 0

    def __call__(self, rows: Tensor) -> Tensor:
        linear = _here.linears.get(self)
        if linear is None:
            return nn.functional.linear(rows, self.parameters["weight"], self.parameters["bias"])
        return linear(rows)


_Tried = dict[tuple[torch.Size, int], int | None]
"""By the shape of a weight and the number of threads: how many rows its layer computes at once."""


class _Linear:
    """One layer and its packed weight, where it `packs`."""

    def __init__(self, module: nn.Linear, packs: bool, canonical: bool, tried: "_Tried | None" = None) -> None:
        self.packs, self.canonical, self._tried = packs, canonical, {} if tried is None else tried
        self.names: dict[str, Any] = module.__dict__
        self.parameters = module._parameters
        self.copy: _Copy | None = None
        self._own = _PackedForward(self.parameters)
        self._rules: dict[int, tuple[bool, int | None]] = {}
        """By the number of threads: see `rule`."""

    def stand_in(self) -> _PackedForward | None:
        """What is called in the place of the layer from now on, one for all threads; None: others put theirs there.

        So they did where its weight is no plain one any more: pruned, normalised or quantised since.
        """
        if type(self.parameters.get("weight")) is not nn.Parameter:
            return None
        found = self.names.setdefault("forward", self._own)
        if type(found) is not _PackedForward:
            return None
        found.users += 1
        return found

    def give_back(self, stand_in: _PackedForward) -> bool:
        """Leave the layer to itself, unless another thread goes on; whether it was the stand-in that was called."""
        ours = self.names.get("forward") is stand_in
        stand_in.users -= 1
        if ours and not stand_in.users:
            del self.names["forward"]
        return ours

    def __call__(self, rows: Tensor) -> Tensor:
        bias = self.parameters["bias"]
        if not self.canonical:
            return self._compute(rows, bias)
        count = rows.numel() // rows.shape[-1]
        doubles, most = self.rule
        if not doubles if count == 1 else most is None or count <= most:
            return self._compute(rows, bias)
        return self._alike(rows.reshape(count, -1), bias).view(*rows.shape[:-1], -1)

    def _alike(self, rows: Float[Tensor, "rows inputs"], bias: Tensor | None) -> Float[Tensor, "rows outputs"]:
        """Compute few rows, or many in blocks, so that a row does not depend on their number."""
        doubles, most = self.rule
        if most is not None and len(rows) > most:
            return torch.cat([self._alike(block, bias) for block in rows.split(most)])
        if len(rows) == 1 and doubles:
            return as_two(lambda rows: self._compute(rows, bias), rows)
        return self._compute(rows, bias)

    @property
    def weight(self) -> Tensor:
        """The layer's own, as it is now."""
        weight = self.parameters["weight"]
        assert weight is not None
        return weight

    @property
    def rule(self) -> tuple[bool, int | None]:
        """In canonical arithmetic: whether one row goes as two equal ones, and how many are computed at once at most.

        None: any number.
        """
        threads = torch.get_num_threads()
        if threads not in self._rules:
            weight, compute = self.weight, partial(self._compute, bias=None)
            most, key = None, (weight.shape, threads)
            if weight.dtype == torch.bfloat16 and weight.numel() >= _TRIED and many_rows_differ(threads):
                if key not in self._tried:
                    self._tried[key] = rows_alike(compute, weight)
                most = self._tried[key]
            self._rules[threads] = sums_one_otherwise(compute, weight), most
        return self._rules[threads]

    def alike(self) -> bool:
        """Whether a row is computed the same alone and among so many rows as `COUNTS` has."""
        return sums_alike(lambda rows: self._alike(rows, None), self.weight, (1, *COUNTS))

    def _compute(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight
        # In float32 nothing is packed for one row, and a call is cheaper.
        if not self.packs or (rows.numel() == rows.shape[-1] and weight.dtype == torch.float32):
            return nn.functional.linear(rows, weight, bias)
        if self.copy is None or not self.copy.fits(weight):
            self.copy = _copy_of(weight)
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.copy.packed, bias, "none", [], "")


def _copy_of(weight: Tensor) -> _Copy:
    known = _copies.get(id(weight))
    if known is None or not known.holds(weight):
        known = _copies[id(weight)] = _Copy(weight)
    return known


def _found(model: Any, wanted: bool, canonical: bool) -> list[_Linear]:
    """The layers that can be packed, if there is room for it; with `canonical` all that are plain."""
    if not wanted and not canonical:
        return []
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = {id(module): module for module in (*model.modules(), output)}.values()
    if any(hasattr(module, "_hf_hook") for module in modules):
        return []
    plain = [module for module in modules if type(module) is nn.Linear and _is_plain(module)]
    large = [module for module in plain if module.weight.numel() >= _least(module.weight)]
    packs = wanted and _can_pack(type(model).__name__, [module.weight for module in (plain if canonical else large)])
    if not canonical:
        return [_Linear(module, True, False) for module in large] if packs else []
    if not packs and any(module.weight.dtype == torch.float32 for module in plain):
        raise NotCanonicalError(f"{type(model).__name__} is canonical in float32 with packed weights only")
    tried: _Tried = {}
    return [_Linear(module, packs and _least(module.weight) < inf, True, tried) for module in plain]


def _can_pack(name: str, weights: list[Tensor]) -> bool:
    """Whether this CPU can multiply by such weights packed, and memory has room for them, else a warning says so."""
    if not torch.backends.mkldnn.is_available() or not all(map(_works, {weight.dtype for weight in weights})):
        return False
    size = sum(weight.nbytes for key, weight in {id(one): one for one in weights}.items() if key not in _copies)
    free = psutil.virtual_memory().available
    if size * _SHARE > free:
        warnings.warn(
            f"{name}: its weights are not packed for this CPU, which makes forwards of a tree faster: "
            f"that takes {size / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free",
            stacklevel=6,
        )
        return False
    return True


def _least(weight: Tensor) -> float:
    return _LEAST.get(weight.dtype, inf)


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    others = type(module.__dict__.get("forward", None)) not in (type(None), _PackedForward)  # another thread's is ours
    return plain and not others


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
