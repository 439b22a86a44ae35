"""The transformers model as it is: one call, kernel after kernel. The engine that every other one is compared with."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from opt_tree.core.target import Output
from opt_tree.engines.base import Engine, Inputs
from opt_tree.engines.body import compute, laws_of, model_inputs, takes, watched_module
from opt_tree.engines.delta_layers import delta_forwards, delta_nets
from opt_tree.engines.delta_net import DeltaCache
from opt_tree.engines.kv_cache import KVCache
from opt_tree.engines.prepacked import PackedWeights


class Eager(Engine):
    """Calls the model's own `forward` with the library's cache.

    It computes the same body as every engine (`body.compute`), but hands it the `KVCache` itself: consecutive rows are
    then written by a slice, which costs half of what an indexed copy does, and nothing has to be a tensor.
    """

    name = "eager"

    def __init__(self, model: Any, cache: KVCache, packed: PackedWeights | None = None) -> None:
        """`packed`: weights of a model that this one is a part of."""
        self.model, self.cache = model, cache
        self.packed = PackedWeights(model) if packed is None else packed
        self._delta = delta_nets(model) if isinstance(cache, DeltaCache) else {}
        self._keeps_logits = takes(model, "logits_to_keep")
        self.layers: tuple[int, ...] = ()

    def watch(self, layers: tuple[int, ...]) -> None:
        for layer in layers:
            watched_module(self.model, layer)
        self.layers = tuple(sorted({*self.layers, *layers}))

    def changed(self, what: str) -> None:
        self.packed.forget()

    def run(self, forward: Inputs) -> Output:
        features = None if forward.features is None else forward.features[None]
        inputs = model_inputs(self.model, forward.ints[:, None], forward.mask, features)
        if forward.last_only and forward.slots is None and self._keeps_logits:
            inputs["logits_to_keep"] = 1
        with attention_kernels(forward.ints.device), delta_forwards(self._delta), self.packed:
            output = compute(self.model, inputs, self.cache, self.layers)
            return output._replace(laws=laws_of(output.logits, forward))


def attention_kernels(device: torch.device) -> AbstractContextManager:
    """Keep masked attention off cuDNN, which plans anew for every key length: a tree has a new one at every step."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
