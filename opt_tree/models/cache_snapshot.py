"""What a transformers cache holds, copied before a forward and put back where that is rejected.

For caches with a running state, which no row can be taken out of. Knows no model and no tree.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

State = list[dict[str, Any]]
"""What each layer of a cache holds."""


def state_of(cache: Cache) -> State:
    """Copy what the layers hold. Keys and values are only ever put together anew, so they need no copy."""
    return [_copied(vars(layer), isinstance(layer, DynamicLayer)) for layer in cache.layers]


def _copied(held: Mapping[Any, Any], grows: bool = False) -> dict[Any, Any]:
    copied = {}
    for name, value in held.items():
        if isinstance(value, Tensor) and not (grows and name in ("keys", "values")):
            value = value.clone()
        copied[name] = _copied(value) if isinstance(value, dict) else value
    return copied


def restore(cache: Cache, state: State) -> None:
    """Put back what `state_of` copied; layers that came later go."""
    del cache.layers[len(state) :]
    for layer, held in zip(cache.layers, state, strict=True):
        vars(layer).clear()
        vars(layer).update(held)
