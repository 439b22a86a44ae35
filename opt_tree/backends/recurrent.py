"""Layers that keep one state of the whole text, under a tree: every row's state is that of its own path.

`RecurrentCache` holds the states of the context, and the pending rows in a form from which the state behind any path
can be had (`recurrent_rows`). The short convolution before a layer's rule takes each row's last ancestors.

What a row adds is the layer's own: `delta_net`, `state_space`. The model's code of the layer runs, with these functions
in the place of some of its module's (`recurrent_layers`).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.activations import ACT2FN

from opt_tree.backends.recurrent_rows import Levels, PendingRows, State, last_ancestors
from opt_tree.cache import KVCache, LayerShape, inference
from opt_tree.errors import counted
from opt_tree.target import Forward
from opt_tree.tree import send


@dataclass
class RecurrentState:
    """One layer: what the context left behind, and the pending rows."""

    before: Float[Tensor, "channels taps"] | None = None
    """The last inputs of the convolution; None: no context."""
    state: State | None = None
    inputs: Float[Tensor, "channels columns"] | None = None
    """Of the convolution, of all pending rows."""
    rows: PendingRows | None = None


class RecurrentCache(KVCache):
    """`KVCache` for a model some of whose layers keep a state: for these it holds the state of the context.

    A state cannot be taken back: a context is gone on from or forgotten, never shortened.
    """

    def __init__(self, shapes: list[LayerShape], taps: dict[int, int], limits: bool = False) -> None:
        """`taps`: the width of each such layer's convolution, by its number; `limits`: see `expect`."""
        super().__init__(shapes)
        self._taps, self._limits = taps, limits
        self.all_limited = False
        self._begin()
        self.sees = torch.ones(0, 0, dtype=torch.bool)
        """Which pending rows, its own included, each row of the forward under way sees."""
        self.parents = np.zeros(0, dtype=np.int64)
        """The parent of each pending row among them; -1: the context."""
        self.text, self.limited = False, 0
        """Of the forward under way: whether its rows continue the context; how many of the first are of the prompt."""
        self._windows: dict[int, Tensor] = {}

    def _begin(self) -> None:
        self._layers = {number: RecurrentState() for number in self._taps}
        self._prompt = True

    def expect(self, forward: Forward) -> None:
        """Be told what is opened next.

        Where several tokens run at once, transformers holds the time step of a Mamba-2 layer within the model's limits;
        not where it runs token by token, as `generate` does behind a prompt. So a prompt's rows are limited, up to the
        first root, which is its last token.
        """
        self.text = forward.goes_on
        many = forward.goes_on or self.all_limited
        own = len(forward.tokens) if many else int(forward.tree is not None)
        self.limited = own if self._limits and (self._prompt or self.all_limited) else 0

    def open(self, rows: int, keys: Any = None, index: Any = None, visible: Any = None) -> None:
        """See `KVCache.open`. Which rows each row sees is needed here."""
        super().open(rows, keys, index, visible)
        assert visible is not None
        self.see(visible, self.shapes[0].device)

    def see(self, visible: Bool[np.ndarray, "rows columns"], device: torch.device) -> None:
        """Say which pending rows, these included, each row of the next forward sees."""
        start = visible.shape[1] - visible.shape[0]
        own = np.arange(start, visible.shape[1])[:, None]
        above = np.where(visible & (np.arange(visible.shape[1]) < own), np.arange(visible.shape[1]), -1)
        self.parents = np.concatenate((self.parents[:start], above.max(1)))
        vars(self).pop("levels", None)
        self.sees = send(visible.copy(), device)
        windows = {taps: last_ancestors(visible, taps) for taps in {*self._taps.values()}}
        self._windows = {taps: send(window, device) for taps, window in windows.items()}

    @functools.cached_property
    def levels(self) -> Levels:
        """All pending rows by their depth."""
        return Levels.of(self.parents, self.sees.device)

    def reset(self) -> None:
        super().reset()
        self._begin()

    @inference
    def commit(self, kept: list[int]) -> None:
        """See `KVCache.commit`. The states move in one go and last, so that Ctrl-C leaves no layer ahead of another.

        In between the context is longer than its owner knows, who then forgets it.
        """
        after = {number: _committed(layer, kept, self._taps[number]) for number, layer in self._layers.items()}
        super().commit(kept)
        self._layers, self._prompt = after, self._prompt and self.text

    def can_cut(self, length: int) -> bool:
        """See `KVCache.can_cut`. A prompt would be limited where rows behind the last one were not (see `expect`)."""
        return length == self.length and (self._prompt or not self._limits)

    def truncate(self, length: int) -> None:
        """Forget the pending rows, and for 0 the context as well. ValueError for any other part of the context."""
        if length == 0:
            self.reset()
            return
        if length != self.length:
            raise ValueError(f"the state behind {counted(self.length, 'token')} cannot be taken back to {length}")
        super().truncate(length)
        self._layers = {number: RecurrentState(layer.before, layer.state) for number, layer in self._layers.items()}

    # What a layer asks of its cache. It convolves and goes on from the state through functions of its module, for which
    # others stand in, so it is told that there is neither.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: no state. Called by the model, as are the others."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: no state."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: its own update of one row in place is not taken."""
        return True

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Return the rows as they are."""
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Any:
        """Nothing: the state moves where a path is committed."""

    def layer(self, number: int, nothing: State) -> RecurrentState:
        """A layer whose rule is about to run: `nothing` is its state if there is no context.

        Rows that are pending from before are forgotten if these are the first.
        """
        own = self._layers[number]
        own.state = nothing if own.state is None else own.state
        own.rows = None if self._fresh else own.rows
        return own

    @property
    def _fresh(self) -> bool:
        """Whether no other rows are pending than those of the forward under way."""
        return self.sees.shape[0] == self.sees.shape[1]

    def convolve(
        self,
        layer: int,
        rows: Float[Tensor, "1 channels rows"],
        weight: Float[Tensor, "channels taps"],
        bias: Float[Tensor, " channels"] | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> Float[Tensor, "1 channels rows"]:
        """The causal convolution, each row over its last ancestors; those of the context come first."""
        own, taps = self._layers[layer], weight.shape[1]
        if own.before is None:
            own.before = rows.new_zeros(rows.shape[1], taps - 1)
        own.inputs = rows[0] if self._fresh or own.inputs is None else torch.cat((own.inputs, rows[0]), 1)
        known, window = torch.cat((own.before, own.inputs), 1), self._windows[taps].to(rows.device)
        exact = torch.promote_types(rows.dtype, torch.float32)
        products = [known[:, window[:, tap]].to(exact) * weight[:, tap, None].to(exact) for tap in range(taps)]
        summed = torch.stack(products).sum(0)
        if bias is not None:
            summed = summed + bias[:, None].to(exact)
        out = summed.to(rows.dtype)
        return (out if activation is None else ACT2FN[activation](out))[None]


@contextmanager
def all_limited(cache: KVCache) -> Iterator[None]:
    """Inside, every row is taken for one of a prompt (see `RecurrentCache.expect`), as plain forwards take theirs."""
    if isinstance(cache, RecurrentCache):
        cache.all_limited = True
    try:
        yield
    finally:
        if isinstance(cache, RecurrentCache):
            cache.all_limited = False


def _committed(layer: RecurrentState, kept: list[int], taps: int) -> RecurrentState:
    """Return the layer with its state at the end of a path of pending rows, and no pending rows."""
    if not kept:
        return RecurrentState(layer.before, layer.state)
    assert layer.inputs is not None and layer.before is not None and layer.state is not None and layer.rows is not None
    path = torch.tensor(kept, device=layer.inputs.device)
    before = torch.cat((layer.before, layer.inputs[:, path]), 1)[:, -(taps - 1) :].clone()
    return RecurrentState(before, layer.rows.behind(layer.state, path.to(layer.state.device)))
