"""Decoder layers compiled by torch.compile, so that a captured forward has fewer kernels.

Owns the compiled layers, and when they stand in for a model's own. Half of a captured forward of one row would be
norms, rotations and sums of a microsecond each; Inductor makes a few kernels of them. Products, attention and the cache
are called as they are. Layers of one class share their compiled code, so that a deep model takes no longer to compile.
"""

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opt_tree.backends.hidden_states import decoder_layers

_lock = threading.Lock()
"""Held while compiled layers stand in for those of some model: one model at a time."""
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "shape_padding": False}
"""Inductor rounds numbers where the model's own code does, and pads no matrix of a product."""
_MOST = 64
"""How often the layers of one class may be compiled in a process. Each model takes two: for one row, and for more."""


def can_fuse() -> bool:
    """Whether Triton is installed, by which Inductor makes kernels for a GPU."""
    return importlib.util.find_spec("triton") is not None


class FusedLayers:
    """A model's decoder layers, compiled when they are first called. Results differ from the model's by rounding."""

    def __init__(self, model: Any, **how: Any) -> None:
        """`how`: the arguments of torch.compile; without any, Inductor compiles for a GPU.

        A model with a layer whose `forward` was replaced, and one without a list of layers, runs its own layers.
        """
        found = decoder_layers(model)
        replaced = found is not None and any("forward" in layer.__dict__ for layer in found)
        self._layers: list[nn.Module] = [] if found is None or replaced else list(found)
        arguments = how or {"options": _OPTIONS}
        kinds = {type(layer).forward for layer in self._layers}
        self._compiled = {own: torch.compile(own, dynamic=True, **arguments) for own in kinds}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, this thread's forwards of the model run the compiled layers; other threads run the layers."""
        # A layer holds its own number. As a constant it would make the code of each layer another one.
        config = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=_MOST)
        with _lock, config:
            try:
                for layer in self._layers:
                    layer.__dict__["forward"] = _FusedForward(layer, self._compiled[type(layer).forward])
                yield
            finally:
                for layer in self._layers:
                    layer.__dict__.pop("forward", None)


class _FusedForward:
    """Stands in for a layer's `forward`: runs compiled code in the thread that made it, the layer's own in others."""

    def __init__(self, layer: nn.Module, compiled: Any) -> None:
        self.layer, self.compiled, self.thread = layer, compiled, threading.get_ident()

    def __call__(self, *args: Any, **more: Any) -> Any:
        run = self.compiled if threading.get_ident() == self.thread else type(self.layer).forward
        return run(self.layer, *args, **more)
