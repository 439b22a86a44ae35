"""Trees through gated delta nets: every row's running state is that of its own path, in one forward.

A gated delta net (arXiv:2412.06464) keeps one state for the whole text, S <- exp(g) S + k u^T with
u = beta (v - exp(g) S^T k). Unrolled from the committed state S0, the u of a tree's rows solve one triangular system in
which a row meets its ancestors alone (TreeWY, arXiv:2608.20961). So nothing is kept for a sibling, and a path is
committed by one sum. The short convolution before it takes each row's last ancestors.

The model's own layer runs, with `follow` and `convolve` in the place of two functions of its module (`delta_layers`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.activations import ACT2FN

from opt_tree.cache import KVCache, LayerShape, inference
from opt_tree.errors import counted
from opt_tree.tree import send


@dataclass
class _Layer:
    """One layer: what the context left behind, and the pending rows. Heads are those of the values."""

    before: Float[Tensor, "channels taps"] | None = None
    """The last inputs of the convolution; None: no context."""
    state: Float[Tensor, "heads key_dim value_dim"] | None = None
    inputs: Float[Tensor, "channels columns"] | None = None
    """Of the convolution, of all pending rows; so below."""
    keys: Float[Tensor, "heads columns key_dim"] | None = None
    updates: Float[Tensor, "heads columns value_dim"] | None = None
    """u: what the row adds to the state, along its key."""
    gates: Float[Tensor, "heads columns"] | None = None
    """g: the row's own decay, a logarithm."""
    decays: Float[Tensor, "heads columns"] | None = None
    """The sum of g along the row's path, from the committed state on."""

    def begin(self, fresh: bool, nothing: Float[Tensor, "heads key_dim value_dim"]) -> None:
        """Take `nothing` for the state of no context; forget the pending rows of the system if these are the first."""
        self.state = nothing if self.state is None else self.state
        if fresh:
            self.keys = self.updates = self.gates = self.decays = None

    def drop(self) -> None:
        """Forget the pending rows."""
        self.inputs = self.keys = self.updates = self.gates = self.decays = None


class DeltaCache(KVCache):
    """`KVCache` for a model some of whose layers are gated delta nets: for these it holds the state of the context.

    A state cannot be taken back: a context is gone on from or forgotten, never shortened.
    """

    def __init__(self, shapes: list[LayerShape], taps: dict[int, int]) -> None:
        """`taps`: the width of the short convolution of each gated delta net, by the layer's number."""
        super().__init__(shapes)
        self._taps = taps
        self._delta = {layer: _Layer() for layer in taps}
        self._sees = torch.ones(0, 0, dtype=torch.bool)
        self._windows: dict[int, Tensor] = {}
        self._fresh = True

    def open(self, rows: int, keys: Any = None, index: Any = None, visible: Any = None) -> None:
        """See `KVCache.open`. Which rows each row sees is needed here."""
        super().open(rows, keys, index, visible)
        assert visible is not None
        self.see(visible, self.shapes[0].device)

    def see(self, visible: Bool[np.ndarray, "rows columns"], device: torch.device) -> None:
        """Say which pending rows, these included, each row of the next forward sees."""
        self._fresh = visible.shape[0] == visible.shape[1]
        self._sees = send(visible.copy(), device)
        windows = {taps: last_ancestors(visible, taps) for taps in {*self._taps.values()}}
        self._windows = {taps: send(window, device) for taps, window in windows.items()}

    def reset(self) -> None:
        super().reset()
        self._delta = {layer: _Layer() for layer in self._taps}

    @inference
    def commit(self, kept: list[int]) -> None:
        """See `KVCache.commit`. The states move in one go and last, so that Ctrl-C leaves no layer ahead of another.

        In between the context is longer than its owner knows, who then forgets it.
        """
        after = {number: _committed(layer, kept, self._taps[number]) for number, layer in self._delta.items()}
        super().commit(kept)
        self._delta = after

    def can_cut(self, length: int) -> bool:
        return length == self.length

    def truncate(self, length: int) -> None:
        """Forget the pending rows, and for 0 the context as well. ValueError for any other part of the context."""
        if length == 0:
            self.reset()
            return
        if length != self.length:
            raise ValueError(f"the state behind {counted(self.length, 'token')} cannot be taken back to {length}")
        super().truncate(length)
        for layer in self._delta.values():
            layer.drop()

    # What a layer asks of its cache. It convolves and goes on from the state through the functions below, so it is told
    # that there is neither.

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
        own, taps = self._delta[layer], weight.shape[1]
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

    def follow(
        self,
        layer: int,
        query: Float[Tensor, "1 rows key_heads key_dim"],
        key: Float[Tensor, "1 rows key_heads key_dim"],
        value: Float[Tensor, "1 rows heads value_dim"],
        g: Float[Tensor, "1 rows heads"],
        beta: Float[Tensor, "1 rows heads"],
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[Float[Tensor, "1 rows heads value_dim"], None]:
        """The gated delta rule, each row along its own path: what the row reads of the state behind it.

        TreeWY (arXiv:2608.20961): with c_i the product of exp(g) along i's path,
        u_i = beta_i (v_i - c_i S0^T k_i - sum over ancestors j of (c_i / c_j) (k_j . k_i) u_j).
        """
        own, exact = self._delta[layer], torch.promote_types(query.dtype, torch.float32)
        q, k, v = _by_head(query, key, value, exact, use_qk_l2norm_in_kernel)
        gate, share = (rows[0].transpose(0, 1).to(exact) for rows in (g, beta))
        own.begin(self._fresh, k.new_zeros(k.shape[0], k.shape[2], v.shape[2]))
        assert own.state is not None
        sees, start = self._sees.to(q.device), self._sees.shape[1] - self._sees.shape[0]
        gates, keys = _behind(own.gates, gate), _behind(own.keys, k)
        decay = gates @ sees.T.to(exact)
        decays = _behind(own.decays, decay)
        # From an ancestor to a row: how much is left. Nobody else is seen, whatever the difference is there.
        left = (decay[:, :, None] - decays[:, None]).masked_fill(~sees, -torch.inf).exp()
        from_state = decay.exp()[..., None]
        overlap = share[..., None] * left * (k @ keys.mT)
        known = share[..., None] * (v - from_state * (k @ own.state))
        if start and own.updates is not None:
            known = known - overlap[..., :start] @ own.updates
        # The diagonal is not read: it is taken for 1.
        update = torch.linalg.solve_triangular(overlap[..., start:], known, upper=False, unitriangular=True)
        own.updates = _behind(own.updates, update)
        own.gates, own.keys, own.decays = gates, keys, decays
        out = from_state * (q @ own.state) + (left * (q @ keys.mT)) @ own.updates
        return out.transpose(0, 1)[None].to(query.dtype), None


def _by_head(
    query: Float[Tensor, "1 rows key_heads key_dim"],
    key: Float[Tensor, "1 rows key_heads key_dim"],
    value: Float[Tensor, "1 rows heads value_dim"],
    exact: torch.dtype,
    normed: bool,
) -> tuple[
    Float[Tensor, "heads rows key_dim"], Float[Tensor, "heads rows key_dim"], Float[Tensor, "heads rows value_dim"]
]:
    """Queries, keys and values, one of each for every head of the values; queries scaled, and of length 1 before."""
    groups = value.shape[2] // key.shape[2]
    q, k, v = (rows[0].transpose(0, 1).to(exact) for rows in (query, key, value))
    q, k = (rows.repeat_interleave(groups, 0) for rows in (q, k))
    if normed:
        q, k = (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6) for rows in (q, k))
    return q * q.shape[-1] ** -0.5, k, v


def _behind(before: Tensor | None, rows: Tensor) -> Tensor:
    return rows if before is None else torch.cat((before, rows), 1)


def _committed(layer: _Layer, kept: list[int], taps: int) -> _Layer:
    """Return the layer with its state at the end of a path of pending rows, and no pending rows."""
    if not kept:
        return _Layer(layer.before, layer.state)
    assert layer.inputs is not None and layer.before is not None and layer.state is not None
    assert layer.keys is not None and layer.updates is not None and layer.decays is not None
    path = torch.tensor(kept, device=layer.inputs.device)
    before = torch.cat((layer.before, layer.inputs[:, path]), 1)[:, -(taps - 1) :].clone()
    decays = layer.decays[:, path]
    left = (decays[:, -1:] - decays).exp()[..., None]
    state = decays[:, -1, None, None].exp() * layer.state + (left * layer.keys[:, path]).mT @ layer.updates[:, path]
    return _Layer(before, state)


def last_ancestors(visible: Bool[np.ndarray, "rows columns"], taps: int) -> Int[np.ndarray, "rows taps"]:
    """The last `taps` rows of each row's path, itself the last: places among taps - 1 of the context and the others.

    A row's ancestors are the columns that it sees, and a parent comes before its children.
    """
    behind = visible[:, ::-1].cumsum(1)[:, ::-1]  # how many that it sees are left, this one included
    own, window = behind[:, :1], np.empty((len(visible), taps), dtype=np.int64)
    for back in range(1, taps + 1):
        column = (visible & (behind == back)).argmax(1)
        context = taps - 1 - (back - own[:, 0])
        window[:, taps - back] = np.where(own[:, 0] >= back, taps - 1 + column, context)
    return window
