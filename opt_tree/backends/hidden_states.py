"""Hidden states of a network's layers, read while it runs: which module a layer is, and what it returns.

Owns what every backend beside the core has more than the core's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from opt_tree.backend import Backend, Inputs
from opt_tree.backends.device_clock import meter_of
from opt_tree.errors import UnsupportedModelError
from opt_tree.target import Output


class WithHiddenStates(Backend):
    """Returns the hidden states of the layers that are watched, too. A device's forwards are timed by its own clock."""

    layers: tuple[int, ...] = ()
    """The watched ones: what decoder layer k puts out; -1: behind the last norm."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.meter = meter_of(network.get_input_embeddings().weight.device)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Return features of these layers, too, from now on; ValueError names one that the network does not have."""
        for layer in layers:
            watched_module(self.network, layer)
        self.layers = tuple(sorted({*self.layers, *layers}))

    def forward(self, inputs: Inputs, cache: Cache) -> Output:
        """See `Backend.forward`. The watched features come with the logits, of every row."""
        with hidden_states(self.network, self.layers) as states:
            logits = super().forward(inputs, cache).logits
        return Output(logits, states)


@contextmanager
def hidden_states(model: Any, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Inside, what these layers return is put into what is yielded; RuntimeError for those that did not run."""
    caught: dict[int, Tensor] = {}
    thread, modules = threading.get_ident(), [watched_module(model, layer) for layer in layers]

    def keep(layer: int, output: Any) -> None:
        if threading.get_ident() == thread:
            caught[layer] = output if isinstance(output, Tensor) else output[0]

    # Hooks that stayed would fire on forwards that are not ours, and would keep the model from being copied or pickled.
    # Functions of this package, not partials: a `Snapshot` knows them by their module.
    handles = [
        module.register_forward_hook(lambda _module, _args, output, layer=layer: keep(layer, output))
        for layer, module in zip(layers, modules, strict=True)
    ]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()
    if len(caught) < len(layers):
        missing = [layer for layer in layers if layer not in caught]
        raise RuntimeError(f"{type(model).__name__} did not run the layers whose features are read: {missing}")
    for layer, states in caught.items():
        check_states(model, layer, states)


def check_states(model: Any, layer: int, states: Tensor) -> None:
    """Raise UnsupportedModelError where what was read of a layer are no hidden states of the model."""
    width = model.config.get_text_config().hidden_size
    if states.dim() != 3 or states.shape[-1] != width:
        raise UnsupportedModelError(
            f"the hidden states of {type(model).__name__}, layer {layer}, cannot be read: they are {width} wide, and "
            f"what {type(watched_module(model, layer)).__name__} returns is {list(states.shape)}"
        )


def watched_module(model: Any, layer: int) -> nn.Module:
    """Return the module whose output is the features of `layer`: the decoder for -1, else one of its layers."""
    if layer == -1:
        return _decoder(model)
    layers, count = decoder_layers(model), model.config.get_text_config().num_hidden_layers
    if layers is None or not 0 <= layer < count:
        raise ValueError(f"{type(model).__name__} has no layer {layer} to read hidden states of; it has {count} layers")
    return layers[layer]


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """Return the model's decoder layers, as many as its config says; None where there is no such list."""
    decoder, count = _decoder(model), model.config.get_text_config().num_hidden_layers
    return next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


def _decoder(model: Any) -> nn.Module:
    # OPT's head calls its decoder past the base model, so it has to be the innermost of the two.
    if not hasattr(model, "get_decoder"):  # a head, which may hold an output layer of its own
        return model.base_model
    found = model.get_decoder()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if found is output:  # ModernBERT's decoder calls it so
        found = model.base_model
    if output is not None and any(output is one for one in found.children()):  # Llama 4 answers with the whole model
        found = max((one for one in found.children() if one is not output), key=lambda one: len([*one.modules()]))
    return found
