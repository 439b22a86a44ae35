"""Networks some of whose layers keep a state, which follows the tree (`RecurrentCache`)."""

import inspect
from contextlib import nullcontext
from typing import Any, cast

from transformers import DynamicCache
from transformers.cache_utils import Cache

from opt_tree.backend import Inputs, layer_shapes
from opt_tree.backends.packed import Packed
from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_layers import limits_steps, recurrent_forwards, recurrent_layers
from opt_tree.target import Output


class Hybrid(Packed):
    """Computes forwards in which each row's running state is that of its own path."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self._recurrent = recurrent_layers(network)
        self._renamed = next((module for module in network.modules() if _names_it_otherwise(module)), None)

    def new_cache(self) -> RecurrentCache:
        asked: Any = DynamicCache(config=self.network.config.get_text_config())
        for layer in asked.layers:
            if getattr(layer, "is_initialized", False):  # before anything is run: it stores nothing
                del layer.keys, layer.values
        shapes = layer_shapes(self.network, asked)
        taps = {number: int(cast(Any, layer).conv_kernel_size) for number, layer in self._recurrent.items()}
        return RecurrentCache(shapes, taps, any(map(limits_steps, self._recurrent.values())))

    def forward(self, inputs: Inputs, cache: Cache) -> Output:
        renamed = self._renamed and self._renamed.register_forward_pre_hook(_rename, with_kwargs=True)
        with renamed or nullcontext(), recurrent_forwards(self._recurrent):
            return super().forward(inputs, cache)


def _names_it_otherwise(module: Any) -> bool:
    """Whether a model (Mamba 2) takes its cache as `cache_params`."""
    names = inspect.signature(module.forward).parameters
    return "input_ids" in names and "cache_params" in names


def _rename(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand the cache over by that name, where it is ours: others may run the model meanwhile."""
    ours = isinstance(kwargs.get("past_key_values"), RecurrentCache)
    return args, kwargs | {"cache_params": kwargs["past_key_values"]} if ours else kwargs
