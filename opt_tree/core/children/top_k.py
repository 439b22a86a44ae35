"""The most probable tokens: deterministic children, for `greedy` and `match`."""

from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.core.children.base import Best, Layer, Picked
from opt_tree.core.errors import require
from opt_tree.core.random import Random
from opt_tree.core.tree import fetch, on_host, send


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
        log_probs, names = layer.log_probs, layer.tokens
        if not log_probs.numel():
            return _NOTHING
        if layer.best is None and self.per_node is None and on_host(log_probs):
            assert self.total is not None
            peaks = log_probs if layer.peaks is None else layer.peaks
            picked = _survivors(log_probs.numpy(), peaks.numpy(), layer, self.total)
            if names is None:
                return picked
            (known,) = fetch(names)
            return picked._replace(
                tokens=known[picked.tokens] if known.ndim == 1 else known[picked.rows, picked.tokens]
            )
        return self._read_once(layer)

    def _read_once(self, layer: Layer) -> Picked:
        """Pick where the layer lies. What comes back has one size, whatever is in it: the host waits once."""
        log_probs, names, best = layer.log_probs, layer.tokens, layer.best
        frontier, width = log_probs.shape
        # One list of tokens for all rows that lies on the host is looked up there.
        listed = names if names is not None and names.ndim == 1 and on_host(names) else None
        if best is None:
            above = send(layer.above, log_probs.device, log_probs.dtype)
            best = Best(self.best(log_probs, above, names if listed is None else None))
        (found,) = fetch(best.found)
        if self.per_node is not None:  # of each node the greatest first
            found = found[:, best.first : best.first + frontier, : self.per_node]
            rows = np.arange(frontier).repeat(found.shape[2])
            bits, columns, *tokens = found.reshape(len(found), -1)
        else:  # the best of all, the best first: put into the order in which the host would find them
            found = found[:, : self.total]
            bits, places, *tokens = found[:, found[1].argsort()]
            rows, columns = np.divmod(places, width)
            rows = rows - best.first
        values = np.ascontiguousarray(bits).view(f"f{bits.itemsize}")
        kept = (values > layer.floor).nonzero()[0]
        named = (tokens[0] if tokens else columns).take(kept)
        if listed is not None:
            named = listed.numpy().take(named)
        return Picked(values.take(kept), named.astype(np.int64), rows.take(kept))

    def best(
        self,
        log_probs: Float[Tensor, "frontier columns"],
        above: Float[Tensor, " frontier"],
        names: Int[Tensor, "frontier columns"] | Int[Tensor, " columns"] | None = None,
    ) -> Int[Tensor, "parts ..."]:
        """Return the children of a layer in one tensor, for one read: path values as bits, columns, tokens if named.

        Per node: a row for each node. Else they are the best of all, the best first, and a place counts through the
        columns row after row. There are as many whatever the values are, so a graph may hold this.
        """
        vocab = log_probs.shape[1]
        if self.per_node is not None:
            values, places = log_probs.topk(min(self.per_node, vocab))
            values = values + above[:, None]
            columns = places
        else:
            assert self.total is not None
            values, places = (log_probs + above[:, None]).flatten().topk(min(self.total, log_probs.numel()))
            columns = places % vocab if names is not None and names.ndim == 1 else places
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        bits = torch.int32 if values.dtype == torch.float32 else torch.int64
        parts = [values.view(bits), places.to(bits)]
        if names is not None:
            whole = names.ndim == 2 and self.per_node is not None
            tokens = names.gather(1, columns) if whole else names.flatten()[columns]
            parts.append(tokens.to(bits))
        return torch.stack(parts)

    @property
    def rounded(self) -> "TopK":
        """The same for as many children or more: one for many, as each is a graph of its own."""
        if self.per_node is not None:
            return TopK(per_node=max(16, 1 << (self.per_node - 1).bit_length()))
        assert self.total is not None
        return TopK(total=max(64, 1 << (self.total - 1).bit_length()))


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
    rows, tokens = np.divmod(among, groups)
    if size == 1:
        values = highest.ravel().take(among)
    else:
        blocks = log_probs.reshape(frontier * groups, size).take(among, 0)
        blocks += above.take(rows)[:, None]
        hits = (blocks > floor).ravel().nonzero()[0]
        values = blocks.ravel().take(hits)
        places, columns = np.divmod(hits, size)
        rows, tokens = rows.take(places), tokens.take(places) * size + columns
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
