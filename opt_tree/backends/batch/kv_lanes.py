"""Key/value rows of several sequences side by side: one storage, a lane for each sequence.

Owns the rows of all lanes of one model and how they move: a forward of several lanes writes its rows by index, and what
their commits keep is moved for all of them at once, before the next forward. Knows nothing of who runs when.
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

    A slot of a head of a lane is a row of `[lanes * heads * slots]`: a forward's rows are written, and what all commits
    keep is moved, by one kernel a tensor, whatever the lanes. The last slot of a lane is scratch: padding is written
    there, and nobody reads it. Storage grows by doubling, from zeros: a hidden key that was NaN would not be silent.
    """

    def __init__(self, shapes: list[LayerShape], lanes: int) -> None:
        super().__init__(layers=[])
        self.lanes = [Lane(self, number) for number in range(lanes)]
        self.slots = 0
        """Of a lane, the scratch slot included."""
        self._shapes = shapes
        self._groups: list[Tensor] = []
        self._views: list[tuple[tuple[Tensor, Tensor], ...]] = []
        """Keys and values of each layer, each by row, `[lanes * heads * slots, dim]`, and by lane, head and slot."""
        self._moves: dict[int, tuple[list[int], list[int]]] = {}
        """From and to which slots of a lane, by lane: what was committed since the last forward."""
        self._viewed: tuple[tuple[range, int], list[Tensor]] = ((range(0), 0), [])
        """The last answer of `views`, and what it depends on."""
        self._open: tuple[Places, int, slice | Tensor] = ({}, 0, slice(0))

    @inference
    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in each lane. Out of memory the storage stays as it was."""
        if slots < self.slots:
            return
        self.flush()
        old, used = self._groups, max(self.slots - 1, 0)
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
        self.slots, self._groups = size, groups
        self._views = [tuple((view.flatten(0, 2), view) for view in layer) for layer in views]
        for lane in self.lanes:
            lane.capacity = self.slots - 1

    def open(self, lanes: list[int], keys: int, slots: Int[Tensor, "lanes rows"]) -> None:
        """Prepare a forward with a batch row for each of `lanes` (in increasing order): it writes its rows at `slots`
        of each lane (the last one: padding) and reads the first `keys` of each.
        """
        self.flush()
        among: slice | Tensor = slice(lanes[0], lanes[-1] + 1)
        if len(lanes) <= lanes[-1] - lanes[0]:  # some in between stay out: theirs are copied together
            among = torch.tensor(lanes)
        rows = torch.tensor(lanes, device=slots.device)[:, None]
        kinds = {(shape.heads, shape.device) for shape in self._shapes}
        self._open = {kind: self._rows(rows, slots, *kind) for kind in kinds}, keys, among

    def _rows(
        self, lanes: Int[Tensor, "batch _"], slots: Int[Tensor, "batch rows"], heads: int, device: torch.device
    ) -> Int[Tensor, " all"]:
        """Where slots of lanes are among all rows, head by head."""
        starts = (lanes[:, None] * heads + torch.arange(heads, device=lanes.device)[:, None]) * self.slots
        return (starts + slots[:, None]).flatten().to(device, non_blocking=True)

    def views(self, lanes: range) -> list[Float[Tensor, "lanes heads slots dim"]]:
        """The rows of some lanes: keys and values of each layer in turn. What was committed has been moved."""
        self.flush()
        if (lanes, self.slots) != self._viewed[0]:
            found = [view[lanes.start : lanes.stop] for layer in self._views for _, view in layer]
            self._viewed = (lanes, self.slots), found
        return self._viewed[1]

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

    def keep(self, lane: int, rows: list[int], to: int) -> None:
        """Have these slots of a lane moved to those from `to` on, before anything is written or read again."""
        if lane in self._moves:
            self.flush()
        self._moves[lane] = rows, list(range(to, to + len(rows)))

    @inference
    def flush(self) -> None:
        """Move what was committed: one gather and one scatter a tensor, for all lanes."""
        if not self._moves:
            return
        moves = [
            (lane, row, slot) for lane, (rows, to) in self._moves.items() for row, slot in zip(rows, to, strict=True)
        ]
        self._moves = {}
        lanes, *ends = torch.tensor(moves).T[..., None]
        for group in self._groups:
            source, destination = (self._rows(lanes, slots, group.shape[2], group.device) for slots in ends)
            rows = group.flatten(1, 3)
            # The gather copies first, so overlapping rows do no harm.
            rows.index_copy_(1, destination, rows.index_select(1, source))

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

    def _move(self, kept: list[int], to: int) -> None:
        self.storage.keep(self.number, [self.length + row for row in kept], to)
