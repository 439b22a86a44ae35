"""Decoder layers compiled by torch.compile: what is between a layer's products and its attention, in a few kernels.

Owns where compiled layers stand in for a model's own, for one thread, while a graph is captured. Half of a captured
forward of one row would be norms, rotations and sums of a microsecond each. The layers of a model are one piece of
code, so that a model of any depth is compiled as fast as a layer: products, attention and the cache stay library calls.
"""

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opt_tree.engines.body import decoder_layers

_lock = threading.Lock()
"""Held while layers of some model have their stand-ins."""
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "shape_padding": False}
"""Numbers are rounded where the model's own code rounds them; products are the library's, as they are."""


def can_fuse() -> bool:
    """Whether there is what generated kernels are compiled by."""
    return importlib.util.find_spec("triton") is not None


class FusedLayers:
    """A model's decoder layers, compiled when they are first called. Results differ from the model's by rounding."""

    def __init__(self, model: Any, **how: Any) -> None:
        """`how` goes to torch.compile; by default it is Inductor's, for a GPU."""
        found = decoder_layers(model)
        # What somebody else put in the place of a layer's own code is called as it is.
        self._layers = [] if found is None or any("forward" in layer.__dict__ for layer in found) else list(found)
        kinds = {type(layer).forward for layer in self._layers}
        self._compiled = {own: torch.compile(own, dynamic=True, **(how or {"options": _OPTIONS})) for own in kinds}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, this thread's forwards of the model run the compiled layers; other threads run the layers."""
        # A layer's number is a number like others, so that all layers have the same code.
        with _lock, torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            try:
                for layer in self._layers:
                    own = type(layer).forward
                    run = functools.partial(_run, threading.get_ident(), self._compiled[own], own, layer)
                    layer.__dict__["forward"] = run
                yield
            finally:
                for layer in self._layers:
                    layer.__dict__.pop("forward", None)


def _run(thread: int, compiled: Any, own: Any, layer: nn.Module, *args: Any, **more: Any) -> Any:
    """Compute a layer: compiled for this thread, by its own code for any other."""
    return (compiled if threading.get_ident() == thread else own)(layer, *args, **more)
