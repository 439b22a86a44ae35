"""The most probable tokens: deterministic children, for `greedy` and `match`."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float

from opt_tree.children.base import Layer, Picked
from opt_tree.random import Random
from opt_tree.tree import fetch, on_host


@dataclass(frozen=True)
class TopK:
    """The most probable tokens: `per_node` of them under every node, or whichever are among the pool's `total` best."""

    per_node: int | None = None
    total: int | None = None
    sampled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("TopK takes either per_node or total")

    @property
    def budget(self) -> int | None:
        return self.total

    def pick(self, layer: Layer, random: Random) -> Picked:
        """See `Children.pick`; nothing here is random."""
        if not layer.log_probs.numel():
            return _NOTHING
        picked = self._columns(layer)
        if layer.tokens is None:
            return picked
        (names,) = fetch(layer.tokens)
        return picked._replace(tokens=names[picked.tokens] if names.ndim == 1 else names[picked.rows, picked.tokens])

    def _columns(self, layer: Layer) -> Picked:
        """Pick, with the columns of the layer for tokens."""
        log_probs, floor = layer.log_probs, layer.floor
        width, vocab = log_probs.shape
        if self.total is not None and on_host(log_probs):
            return _survivors(log_probs.numpy(), layer.above, floor, self.total)
        above = torch.from_numpy(layer.above).to(log_probs)
        if self.per_node is not None:
            best, tokens = log_probs.topk(min(self.per_node, vocab))
            values = best + above[:, None]
            rows = torch.arange(width, device=values.device)[:, None].expand_as(tokens)
            real = values > -torch.inf
            return Picked(*fetch(values[real], tokens[real], rows[real]))
        assert self.total is not None
        if floor > -np.inf:
            # Comparing against a bound a row and listing the few survivors is cheaper than a top-k of all.
            flat = (log_probs > (floor - above)[:, None]).flatten().nonzero().squeeze(-1)
            values = log_probs.flatten()[flat] + above[flat // vocab]
        else:
            values, flat = (log_probs + above[:, None]).flatten().topk(min(self.total, log_probs.numel()))
        if len(values) > self.total:
            keep = values.topk(self.total).indices.sort().values
            values, flat = values[keep], flat[keep]
        host_values, host_flat = fetch(values, flat)
        possible = host_values > -np.inf
        return Picked(host_values[possible], host_flat[possible] % vocab, host_flat[possible] // vocab)


_LEAST = float(np.finfo(np.float32).min)
_NOTHING = Picked(np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _survivors(
    log_probs: Float[np.ndarray, "frontier vocab"], above: Float[np.ndarray, " frontier"], floor: float, total: int
) -> Picked:
    """Return the `total` best children above the floor.

    In numpy and in few operations: between two forwards each of them is paid for in cold caches, several times what it
    costs alone.
    """
    vocab = log_probs.shape[1]
    above = above.astype(log_probs.dtype)
    if floor == -np.inf:
        sums = log_probs if len(above) == 1 else log_probs + above[:, None]
        promising = sums >= max(_lower_bound(sums, total), _LEAST)
    else:
        promising = log_probs > (floor - above)[:, None]
    rows, tokens = np.divmod(promising.ravel().nonzero()[0], vocab)
    values = log_probs[rows, tokens] + above[rows]
    if len(values) > total:
        keep = (-values).argsort(kind="stable")[:total]
        keep.sort()
        values, tokens, rows = values[keep], tokens[keep], rows[keep]
    return Picked(values, tokens, rows)


def _lower_bound(values: Float[np.ndarray, "rows columns"], total: int) -> float:
    """Return a number that at least `total` of the values reach, or -inf. Far cheaper than finding the `total` best.

    Dealt into groups, the values have a maximum a group; the `total`-th greatest of those is such a number.
    """
    groups = max(4 * total, 256)
    flat = values.ravel()
    flat = flat[: len(flat) - len(flat) % groups]
    if not len(flat):
        return -np.inf
    maxima = flat.reshape(-1, groups).max(0)
    maxima.sort()
    return float(maxima[-total])
