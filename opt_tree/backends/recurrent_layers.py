"""The layers of a model that keep a state, and what stands in for their code while a tree is scored.

A layer's own `forward` runs, its projections and norms included; only its rule and the short convolution, which its
module calls by name, are those of a `RecurrentCache`.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from opt_tree.backends import delta_net, state_space
from opt_tree.backends.recurrent import RecurrentCache

_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_RULES: dict[tuple[str, ...], Callable[..., Any]] = {
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"): delta_net.follow,
    ("mamba2_chunk_scan", "mamba2_selective_state_update"): state_space.scan,
}
"""By the functions of a module that are a rule, those for many rows and for one: what stands in for them."""
_lock = threading.Lock()
"""Held while layers get their stand-ins or are given back."""


def recurrent_layers(model: Any) -> dict[int, nn.Module]:
    """The layers of a model whose state can follow a tree, by their number: those whose code calls a rule by its names.

    Empty where accelerate moves their weights about, which happens in calls that would be passed by.
    """
    found = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if number is not None and _rule(_names(type(module).forward)):
            if any(hasattr(part, "_hf_hook") for part in module.modules()):
                return {}
            found[int(number)] = module
    return found


def limits_steps(layer: nn.Module) -> bool:
    """Whether it is a state space (Mamba 2) that limits its time step where several tokens run at once."""
    low, high = getattr(layer, "time_step_limit", None) or state_space.NO_LIMIT
    return (low, high) != state_space.NO_LIMIT


def _rule(names: frozenset[str]) -> tuple[str, ...]:
    """The rule's names that are among these, where all are and those of the convolution; else none."""
    return next((rule for rule in _RULES if names >= {*rule, *_CONVOLUTIONS}), ())


@functools.cache
def _names(function: Callable) -> frozenset[str]:
    """What a function's own code names, behind its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code else frozenset()


class _TreeForward:
    """What such a layer has in the place of its `forward` while some thread is in a forward over a tree.

    Whose cache is another one gets what the layer itself computes.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.users = layer, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        own: Callable[..., Tensor] = type(self.layer).forward
        cache = kwargs.get("cache", kwargs.get("cache_params"))  # its name since transformers 5.24, and before
        if isinstance(cache, RecurrentCache):
            own = _with(inspect.unwrap(own), cache, int(self.layer.layer_idx))  # type: ignore[arg-type]
            kwargs["attention_mask"] = None  # which is of padding here, and a tree has none
        return own(self.layer, *args, **kwargs)


def _with(function: Any, cache: RecurrentCache, layer: int) -> Callable[..., Tensor]:
    """The layer's own code with the rule and the convolution of this cache in the place of its module's."""
    rule = _rule(_names(function))
    functions: dict[str, Any] = dict.fromkeys(rule, functools.partial(_RULES[rule], cache, layer))
    functions |= dict.fromkeys(_CONVOLUTIONS, functools.partial(cache.convolve, layer))
    names = function.__globals__ | functions
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@contextmanager
def recurrent_forwards(layers: dict[int, nn.Module]) -> Iterator[None]:
    """Inside, these layers go by the tree where they are given a `RecurrentCache`; as ever where they are not."""
    taken = []
    try:
        with _lock:
            for layer in layers.values():
                stand_in = layer.__dict__.setdefault("forward", _TreeForward(layer))
                if not isinstance(stand_in, _TreeForward):
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
