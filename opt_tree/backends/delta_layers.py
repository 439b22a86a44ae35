"""The gated delta nets of a model, and what stands in for their code while a tree is scored.

A layer's own `forward` runs, its projections and norms included; only the gated delta rule and the short convolution,
which its module calls by name, are `DeltaCache`'s.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from opt_tree.backends.delta_net import DeltaCache

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_lock = threading.Lock()
"""Held while layers get their stand-ins or are given back."""


def delta_nets(model: Any) -> dict[int, nn.Module]:
    """The gated delta nets of a model, by the number of the layer: those whose code calls the functions of this module.

    Empty where accelerate moves their weights about, which happens in calls that would be passed by.
    """
    found = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if number is not None and _names(type(module).forward) >= {*_RULES, *_CONVOLUTIONS}:
            if any(hasattr(part, "_hf_hook") for part in module.modules()):
                return {}
            found[int(number)] = module
    return found


@functools.cache
def _names(function: Callable) -> frozenset[str]:
    """What a function's own code names, behind its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code else frozenset()


class _StandIn:
    """What a gated delta net has in the place of its `forward` while some thread is in a forward over a tree.

    Whose cache is another one gets what the layer itself computes.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.users = layer, 0

    def __call__(self, *args: Any, cache_params: Any = None, **kwargs: Any) -> Tensor:
        own: Callable[..., Tensor] = type(self.layer).forward
        if isinstance(cache_params, DeltaCache):
            own = _with(inspect.unwrap(own), cache_params, int(self.layer.layer_idx))  # type: ignore[arg-type]
            kwargs["attention_mask"] = None  # which is of padding here, and a tree has none
        return own(self.layer, *args, cache_params=cache_params, **kwargs)


def _with(function: Any, cache: DeltaCache, layer: int) -> Callable[..., Tensor]:
    """The layer's own code with the rule and the convolution of this cache in the place of its module's."""
    functions: dict[str, Any] = dict.fromkeys(_RULES, functools.partial(cache.follow, layer))
    functions |= dict.fromkeys(_CONVOLUTIONS, functools.partial(cache.convolve, layer))
    names = function.__globals__ | functions
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@contextmanager
def delta_forwards(layers: dict[int, nn.Module]) -> Iterator[None]:
    """Inside, these layers go by the tree where they are given a `DeltaCache`; as ever where they are not."""
    taken = []
    try:
        with _lock:
            for layer in layers.values():
                stand_in = layer.__dict__.setdefault("forward", _StandIn(layer))
                if not isinstance(stand_in, _StandIn):
                    raise RuntimeError(
                        f"{type(layer).__name__} has another forward since it was wrapped: wrap it again"
                    )
                stand_in.users += 1
                taken.append((layer, stand_in))
        yield
    finally:
        with _lock:
            for layer, stand_in in taken:
                stand_in.users -= 1
                if not stand_in.users:
                    layer.__dict__.pop("forward", None)
