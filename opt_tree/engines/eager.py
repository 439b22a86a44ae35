"""The transformers model as it is: one call, kernel after kernel. The engine that every other one is compared with."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from opt_tree.cache import KVCache
from opt_tree.engines.base import Engine, Forward
from opt_tree.target import Output


class Eager(Engine):
    """Calls the model's own `forward` with the library's cache. Hidden states are caught by hooks, for one call each.

    A hook that stayed would fire on forwards that are not ours, and would keep the model from being copied or pickled.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers: tuple[int, ...] = ()

    def watch(self, layers: tuple[int, ...]) -> None:
        for layer in layers:
            watched_module(self.model, layer)
        self._layers = tuple(sorted({*self._layers, *layers}))

    def run(self, forward: Forward) -> Output:
        inputs: dict[str, object] = {
            "input_ids": forward.ints[:1],
            "position_ids": forward.ints[1:],
            "attention_mask": forward.mask,
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if forward.features is not None:
            inputs["features"] = forward.features[None]
        if forward.last_only and forward.slots is None and self._keeps_logits:
            inputs["logits_to_keep"] = 1
        caught: dict[int, Float[Tensor, "rows hidden"]] = {}
        with ExitStack() as stack:
            stack.enter_context(_attention_kernels(forward.ints.device))
            for layer in self._layers:
                stack.enter_context(_catch(watched_module(self.model, layer), layer, caught))
            logits = self.model(**inputs).logits[0]
        if len(caught) < len(self._layers):
            missing = [layer for layer in self._layers if layer not in caught]
            raise RuntimeError(f"{type(self.model).__name__} did not run the layers whose features are read: {missing}")
        return Output(logits, caught)


def watched_module(model: Any, layer: int) -> nn.Module:
    """Return the module whose output is the features of `layer`: the decoder for -1, else one of its layers."""
    # OPT's head calls its decoder past the base model, so it has to be the innermost of the two.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if layer == -1:
        return decoder
    count = model.config.get_text_config().num_hidden_layers
    layers = next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None or not 0 <= layer < count:
        raise ValueError(f"{type(model).__name__} has no layer {layer} to read hidden states of; it has {count} layers")
    return layers[layer]


@contextmanager
def _catch(module: nn.Module, layer: int, caught: dict[int, Tensor]) -> Iterator[None]:
    """Put what a module returns into `caught`, if it is this thread that called it."""
    thread = threading.get_ident()

    def keep(_module: object, _args: object, output: Any) -> None:
        if threading.get_ident() == thread:
            caught[layer] = (output if isinstance(output, Tensor) else output[0])[0]

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _attention_kernels(device: torch.device) -> AbstractContextManager:
    """Keep masked attention off cuDNN, which plans anew for every key length: a tree has a new one at every step."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
