"""Key/value rows of several sequences side by side: one storage, a lane for each sequence.

Owns the rows of all lanes of one model: a forward of several lanes writes its rows by index. Knows nothing of who runs
when.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from opt_tree.cache import KVCache, LayerShape, inference

Places = dict[tuple[int, torch.device], Int[Tensor, " all"]]
"""Rows among those of all lanes, heads and slots, by how many heads there are and on which device."""


class Storage(Cache):
    """KV rows of all layers and lanes of one model: one tensor `[members, lanes, heads, slots, dim]` a distinct shape.

    A slot of a head of a lane is a row of `[lanes * heads * slots]`: a forward's rows are written by one kernel a
    tensor, whatever the lanes. The last slot of a lane is scratch: padding is written there, and nobody reads it.
    Storage grows by doubling, from zeros: a hidden key that was NaN would not be silent.
    """

    def __init__(self, shapes: list[LayerShape], lanes: int) -> None:
        super().__init__(layers=[])
        self.lanes = [Lane(self, number) for number in range(lanes)]
        self.slots = 0
        """Of a lane, the scratch slot included."""
        self._shapes = shapes
        self.groups: list[Tensor] = []
        self._views: list[tuple[tuple[Tensor, Tensor], ...]] = []
        """Keys and values of each layer, each by row, `[lanes * heads * slots, dim]`, and by lane, head and slot."""
        self._open: tuple[Places, int, slice | Tensor] = ({}, 0, slice(0))

    @inference
    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in each lane. Out of memory the storage stays as it was."""
        if slots < self.slots:
            return
        old, used = self.groups, max(self.slots - 1, 0)
        size = max(slots + 1, 2 * self.slots, 128)
        members: dict[tuple, list[tuple[int, int]]] = {}
        for layer, s in enumerate(self._shapes):
            for kind, dim in enumerate((s.key_dim, s.value_dim)):
                members.setdefault((s.heads, dim, s.dtype, s.device), []).append((layer, kind))
        groups, views = [], [[torch.empty(0)] * 2 for _ in self._shapes]
        for index, ((heads, dim, dtype, device), places) in enumerate(members.items()):
            shape = (len(places), len(self.lanes), heads, size, dim)
            group = torch.zeros(shape, dtype=dtype, device=device)
            if used:
                group[..., :used, :] = old[index][..., :used, :]
            groups.append(group)
            for view, (layer, kind) in zip(group, places, strict=True):
                views[layer][kind] = view
        self.slots, self.groups = size, groups
        self._views = [tuple((view.flatten(0, 2), view) for view in layer) for layer in views]
        for lane in self.lanes:
            lane.capacity = self.slots - 1

    def open(self, lanes: list[int], keys: int, slots: Int[Tensor, "lanes rows"]) -> None:
        """Prepare a forward with a batch row for each of `lanes` (in increasing order): it writes its rows at `slots`
        of each lane (the last one: padding) and reads the first `keys` of each.
        """
        among: slice | Tensor = slice(lanes[0], lanes[-1] + 1)
        if len(lanes) <= lanes[-1] - lanes[0]:  # some in between stay out: theirs are copied together
            among = torch.tensor(lanes)
        first = torch.tensor(lanes, device=slots.device)[:, None, None]
        kinds = {(shape.heads, shape.device) for shape in self._shapes}
        places: Places = {}
        for heads, device in kinds:
            starts = (first * heads + torch.arange(heads, device=slots.device)[:, None]) * self.slots
            places[heads, device] = (starts + slots[:, None]).flatten().to(device, non_blocking=True)
        self._open = places, keys, among

    def views(self, lanes: range) -> list[Float[Tensor, "lanes heads slots dim"]]:
        """The rows of some lanes: keys and values of each layer in turn."""
        return [view[lanes.start : lanes.stop] for layer in self._views for _, view in layer]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows; return what to attend to. Called by the model."""
        slots, keys, among = self._open
        found = []
        for states, (by_row, view) in zip((key_states, value_states), self._views[layer_idx], strict=True):
            by_row.index_copy_(0, slots[view.shape[1], view.device], states.flatten(0, 2))
            seen = view[:, :, :keys]
            found.append(seen[among] if isinstance(among, slice) else seen.index_select(0, among.to(view.device)))
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions are always passed explicitly."""
        return 0

    def __len__(self) -> int:
        return len(self._shapes)

    def __bool__(self) -> bool:
        return True


class Lane(KVCache):
    """The cache of one sequence: which of its lane's rows are committed, which pending. The rows are the storage's."""

    def __init__(self, storage: Storage, number: int) -> None:
        super().__init__([])
        self.storage, self.number = storage, number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def read(self) -> tuple[int, int]:
        """Of the forward under way: the slot of its first row, and how many slots it reads."""
        return self._start, self._keys

    def reserve(self, rows: int) -> None:
        """Make room for `rows` slots, in every lane."""
        self.storage.reserve(rows)

    @inference
    def _move(self, kept: list[int], to: int) -> None:
        for slot, row in enumerate(kept, to):
            for group in self.storage.groups:
                group[:, self.number, :, slot] = group[:, self.number, :, self.length + row]
