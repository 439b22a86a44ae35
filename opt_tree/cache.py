"""The key/value rows of one model: append, keep a path, drop the rest. It is told which; it knows nothing of trees."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from opt_tree.errors import counted

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.inference_mode`, entered only where it is not on: entering it takes 15 us between two forwards."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return call


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token: heads and head sizes of keys and values, and where."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache(Cache):
    """KV rows of all layers in one tensor per distinct shape, so that keeping a row is one copy, not 2 x layers.

    Invariant: slots below `length` hold the committed context in order, exactly as a fresh prefill would have left
    them; slots `length ... length + pending` hold rows that the last forwards wrote and nobody has kept yet, such as a
    tree that is not yet judged. Storage grows by doubling, from zeros: NaN is not silenced by a mask (0 * NaN).
    """

    def __init__(self, shapes: list[LayerShape]) -> None:
        super().__init__(layers=[])
        self.shapes, self.length, self.pending, self.capacity = shapes, 0, 0, 0
        self.views: list[Float[Tensor, "1 heads capacity dim"]] = []
        """The storage of each layer, keys and values in turn; replaced when `storage_version` rises."""
        self.storage_version = 0
        """Counts moves of the storage: whoever captured addresses compares it before a replay."""
        self._start, self._end, self._keys = 0, 0, 0
        self._index: Tensor | None = None
        self._groups: list[Tensor] = []
        self._members: dict[tuple, list[int]] = {}
        """Which of the views have a shape: they share a tensor."""
        for layer, s in enumerate(shapes):
            for view, dim in enumerate((s.key_dim, s.value_dim), 2 * layer):
                self._members.setdefault((s.heads, dim, s.dtype, s.device), []).append(view)

    def reset(self) -> None:
        """Forget everything."""
        self.length = self.pending = 0

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make room for `rows` slots. Nothing is assigned before all is there: out of memory it stays as it was."""
        if rows <= self.capacity:
            return
        capacity, used = max(rows, 2 * self.capacity, 256), self.length + self.pending
        groups, views = [], [torch.empty(0)] * (2 * len(self.shapes))
        for index, ((heads, dim, dtype, device), members) in enumerate(self._members.items()):
            storage = torch.zeros(len(members), 1, heads, capacity, dim, dtype=dtype, device=device)
            if used:
                storage[..., :used, :] = self._groups[index][..., :used, :]
            groups.append(storage)
            for member, view in zip(members, storage, strict=True):
                views[member] = view
        self._groups, self.views, self.capacity = groups, views, capacity
        self.storage_version += 1

    def __getstate__(self) -> dict[str, Any]:
        """The rows in use. Views of a storage would come back apart from it, so they are made again."""
        groups = [storage[..., : self.length + self.pending, :].clone() for storage in self._groups]
        return self.__dict__ | {"_groups": groups, "views": [], "_index": None, "capacity": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reserve(self.length + self.pending)

    def open(
        self,
        rows: int,
        keys: int | None = None,
        index: Int[Tensor, " padded"] | None = None,
        visible: Bool[np.ndarray, "rows columns"] | None = None,
    ) -> None:
        """Prepare the next forward: it writes `rows` pending rows and reads the first `keys` slots.

        `index`: the slots, where the forward is padded; None: those behind the slots in use. `visible`: which pending
        rows, these included, each row sees, for layers that keep a state.
        """
        self._start = self.length + self.pending
        self._end, self._keys, self._index = self._start + rows, keys or self._start + rows, index
        slots = max(self._keys, self._start + (rows if index is None else index.numel()))
        if slots > self.capacity:
            self.reserve(slots)
        self.pending += rows

    def update(
        self,
        key_states: Float[Tensor, "1 heads rows key_dim"],
        value_states: Float[Tensor, "1 heads rows value_dim"],
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write this layer's rows at the open slots; return the keys and values to attend to. Called by the model."""
        keys, values = self.views[2 * layer_idx : 2 * layer_idx + 2]
        if self._index is None:
            keys[:, :, self._start : self._end] = key_states
            values[:, :, self._start : self._end] = value_states
        else:
            index = self._index.to(keys.device)
            keys.index_copy_(2, index, key_states)
            values.index_copy_(2, index, value_states)
        return keys[:, :, : self._keys], values[:, :, : self._keys]

    def commit(self, kept: list[int]) -> None:
        """Commit the pending rows `kept` (increasing offsets behind `length`), in this order; drop the others."""
        if len(kept) > self.pending or kept != list(range(len(kept))):
            if kept[0] < 0 or kept[-1] >= self.pending or kept != sorted(set(kept)):
                raise ValueError(f"cannot keep rows {kept} of {self.pending} pending ones")
            place = next(place for place, row in enumerate(kept) if row != place)
            self._move(kept[place:], self.length + place)
        self.length += len(kept)
        self.pending = 0

    @inference
    def _move(self, kept: list[int], to: int) -> None:
        """Bring the pending rows `kept` to the slots from `to` on: each to one below its own, the lowest first."""
        for slot, row in enumerate(kept, to):
            for storage in self._groups:
                storage[..., slot, :] = storage[..., self.length + row, :]

    def can_cut(self, length: int) -> bool:
        """Whether the context can be shortened to so many tokens. Rows can be; a cache that keeps a state says no."""
        return True

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {counted(self.length, 'row')} to {length}")
        self.length, self.pending = length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in use before the forward under way (transformers asks; positions are always passed explicitly)."""
        return self._start

    def __len__(self) -> int:
        return len(self.shapes)

    def __bool__(self) -> bool:
        # Without this an empty cache would be falsy through __len__ for models without layers that keep KV.
        return True
