"""Models whose layers see different parts of a text: sliding windows and chunks, one mask for each kind of layer.

Owns what a window hides, by positions. A `Model` of the core has one mask for all layers; it ends its context where a
layer would see less.
"""

from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from opt_tree.backend import Backend, Mask
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.model import Model
from opt_tree.tree import send


class WithWindows(Model):
    """A `Model` that gives each kind of its layers a mask of its own."""

    def __init__(self, network: Any, backend: Backend | None = None) -> None:
        super().__init__(network, WithHiddenStates(network) if backend is None else backend)
        self.max_context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        found = layer_windows(network).items()
        # A layer that is attention and a state space takes attention's mask by attention's name.
        self.windows = {"full_attention" if kind == "hybrid" else kind: size for kind, size in found}
        """The kinds of layers that want a mask, each with its window or chunk, 0 for none."""

    @property
    def mask_kinds(self) -> tuple[str, ...]:
        """The kinds of attention layers, where there are several: every forward then brings a mask for each."""
        return tuple(sorted(self.windows)) if len(self.windows) > 1 else ()

    def forget(self) -> None:
        """Have no context, without a look at the cache and the network: of a copy that was given others."""
        self._tokens = []
        vars(self).pop("_turns", None)  # the original's: see `Turns`

    def masks(self, full: Mask, positions: Int[Tensor, " padded"]) -> Mask | dict[str, Mask]:
        """See `Model.masks`. Keys of the context are in the order of their positions, those of pending rows are not."""
        if not any(self.windows.values()):  # nobody asks where a key is
            return self.by_kind(full, positions, positions)
        numbers = np.arange(full.shape[-1])
        numbers[self.length : self.length + self.pending.shape[1]] = self.pending[1]
        return self.by_kind(full, positions, send(numbers, self.device))

    def by_kind(self, full: Mask, positions: Tensor, key_positions: Tensor) -> Mask | dict[str, Mask]:
        """One mask where all layers are of one kind; a dict of masks where they differ."""
        masks = {}
        for kind, size in self.windows.items():
            masks[kind] = full
            if size and kind == "sliding_attention":  # by position, never by slot: siblings share a position
                masks[kind] = full & (positions[:, None] - key_positions < size)
            elif size and kind == "chunked_attention":  # chunks of so many tokens (Llama 4)
                masks[kind] = full & (positions[:, None] // size == key_positions // size)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def layer_windows(model: Any) -> dict[str, int]:
    """The kinds of layers that a model's config names, each with its window or chunk, 0 for none."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    sizes = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return {kind: int(sizes.get(kind) or 0) for kind in kinds}
