"""The most probable tokens: deterministic children, for `greedy` and `match`."""

from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float

from opt_tree.core.children.base import Layer, Picked
from opt_tree.core.errors import require
from opt_tree.core.random import Random
from opt_tree.core.tree import fetch, on_host


@dataclass(frozen=True)
class TopK:
    """The most probable tokens: `per_node` of them under every node, or whichever are among the pool's `total` best."""

    per_node: int | None = None
    total: int | None = None
    sampled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("TopK takes either per_node or total")
        require((Integral, NoneType), per_node=self.per_node, total=self.total)
        if (self.per_node or self.total or 0) < 1:
            raise ValueError(f"TopK takes at least one token, got {self}")

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
            peaks = log_probs if layer.peaks is None else layer.peaks
            return _survivors(log_probs.numpy(), peaks.numpy(), layer, self.total)
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


_LEAST = float(np.finfo(np.float32).min) / 2  # above -inf, which nobody is to pick
_NOTHING = Picked(np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _survivors(
    log_probs: Float[np.ndarray, "frontier columns"],
    peaks: Float[np.ndarray, "frontier groups"],
    layer: Layer,
    total: int,
) -> Picked:
    """Return the `total` best children above the floor. Only groups are looked into whose peak is above it.

    In few operations of numpy: between two forwards each is paid for in cold caches, several times what it costs alone.
    """
    above = layer.above.astype(log_probs.dtype)
    (frontier, groups), size = peaks.shape, log_probs.shape[1] // peaks.shape[1]
    highest = peaks + above[:, None]  # rounded as its children are, hence never below one of them
    floor = layer.floor if layer.floor > -np.inf else max(_below_best(highest, total), _LEAST)
    among = (highest > floor).ravel().nonzero()[0]
    parents, groups_among = np.divmod(among, groups)
    blocks = log_probs.reshape(frontier * groups, size).take(among, 0)
    blocks += above.take(parents)[:, None]
    hits = (blocks > floor).ravel().nonzero()[0]
    values = blocks.ravel().take(hits)
    places, columns = np.divmod(hits, size)
    rows, tokens = parents.take(places), groups_among.take(places) * size + columns
    if len(values) > total:
        kept = (-values).argsort(kind="stable")[:total]
        kept.sort()
        values, tokens, rows = values.take(kept), tokens.take(kept), rows.take(kept)
    return Picked(values, tokens, rows)


def _below_best(values: Float[np.ndarray, "rows columns"], total: int) -> float:
    """Return a number that at least `total` of the values exceed, or -inf. Far cheaper than finding the `total` best.

    Dealt into groups, the values have a maximum a group; the `total`-th greatest of those is reached by as many.
    """
    groups = max(4 * total, 256)
    flat = values.ravel()
    dealt = len(flat) // groups
    maxima = flat[: dealt * groups].reshape(dealt, groups).max(0) if dealt > 1 else flat.copy()
    if len(maxima) < total:
        return -np.inf
    maxima.sort()
    return float(np.nextafter(maxima[-total], maxima.dtype.type(-np.inf)))
