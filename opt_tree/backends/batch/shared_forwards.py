"""Forwards of several sequences as one: what the sequences share of a model, and which forwards go together.

Owns what a lane has of a model; `merge_tensors.py` makes the tensors. Who runs when is `scheduler.py`'s.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from opt_tree.backend import Inputs
from opt_tree.backends.batch.kv_lanes import Lane, Storage
from opt_tree.backends.batch.merge_tensors import cheapest_split, side_by_side
from opt_tree.backends.compiled import Compiled
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.backends.packed import Packed
from opt_tree.backends.windows import WithWindows
from opt_tree.cache import KVCache
from opt_tree.target import Output

T = TypeVar("T")

_CALL = {"cpu": 32}
_CALL_ELSEWHERE = 128
"""What a forward costs however few rows it has, in rows: weights are read and kernels launched once. Measured on the
demo target on a CPU; accelerators take many more rows before they are busy."""
_KEYS = 4
"""Attention to this many keys times the model's width costs as much as all else of a row. Measured likewise."""


class LaneBackend(WithHiddenStates):
    """The backend of one lane: what it would compute runs with what others would, so whoever drives them does it."""

    name = "lane"

    def __init__(self, shared: "SharedModel", lane: Lane) -> None:
        super().__init__(shared.lm.model)
        self.shared, self.lane = shared, lane
        self._changes = shared.lm.eager.changes

    @property
    def eager(self) -> Packed:
        """The model's own, which is without compiled code."""
        return self.shared.lm.eager

    def begin_text(self) -> bool:
        """See `Backend.begin_text`: whichever lane looks first sees a change, and all lanes have rows of before."""
        self.shared.lm.backend.begin_text()
        before, self._changes = self._changes, self.eager.changes
        return before == self._changes

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        return self.eager.shape(rows, first_slot)

    def watch(self, layers: tuple[int, ...]) -> None:
        self.shared.lm.watch(layers)

    def forward(self, inputs: Inputs, cache: Any) -> Output:
        raise RuntimeError("this decoder belongs to a job of side_by_side, whose forwards are yielded: use `answer`")


class Ask(NamedTuple):
    """A forward that a lane waits for."""

    backend: LaneBackend
    inputs: Inputs
    real: int
    """How many of its rows are real."""

    @property
    def rows(self) -> int:
        return self.inputs.numbers.shape[2]


class SharedModel:
    """One model for all lanes: its storage, and forwards of several lanes as one."""

    def __init__(self, lm: Any, lanes: int, last: bool) -> None:
        lm.begin()  # once for all lanes
        self.lm, self.storage, self.last = lm, Storage(lm.cache.shapes, lanes), last
        self._call = _CALL.get(lm.device.type, _CALL_ELSEWHERE)

    def views(self) -> list[WithWindows]:
        """The model as each lane has it."""
        return [_in_lane(self.lm, lane, LaneBackend(self, lane)) for lane in self.storage.lanes]

    def parts(self, asked: Sequence[Ask]) -> list[list[Ask]]:
        """Split forwards into those that run as one, each part in the order of its lanes."""
        parts = [list(asked)]
        if self._cost(asked) - sum(ask.rows for ask in asked) > 2 * self._call:  # else another call saves less
            parts = cheapest_split(sorted(asked, key=lambda ask: -ask.rows), self._cost)
        return [sorted(part, key=lambda ask: ask.backend.lane.number) for part in parts]

    def _cost(self, asked: Sequence[Ask]) -> float:
        """Of running these as one, in rows: padded to the longest."""
        keys = max(ask.backend.lane.read[1] for ask in asked) / (_KEYS * self.lm.hidden)
        return self._call + len(asked) * max(ask.rows for ask in asked) * (1 + keys)

    def run(self, asked: Sequence[Ask]) -> list[Output]:
        """Run forwards of different lanes, in their order, as one: padded on the left, and to the keys of the fullest.

        A padding row sees the first key of its lane alone and is written where nobody reads; nobody sees it.
        """
        rows, backend, begin = max(ask.rows for ask in asked), self.lm.backend, self.lm.backend.meter.now()
        keys = max(ask.backend.lane.read[1] for ask in asked)
        lanes = [ask.backend.lane.number for ask in asked]
        self.storage.reserve(keys)
        scratch, places = self.storage.slots - 1, list(range(len(lanes)))
        if isinstance(backend, Compiled) and backend.takes((lanes[-1] + 1 - lanes[0]) * rows):
            # All lanes from the first to the last: those between them are padding.
            by_lane = {ask.backend.lane.number: ask.inputs for ask in asked}
            whole = range(lanes[0], lanes[-1] + 1)
            inputs = side_by_side([by_lane.get(lane) for lane in whole], rows, keys, scratch)
            output, places = backend.call(inputs, self.storage.views(whole)), [lane - lanes[0] for lane in lanes]
        else:
            inputs = side_by_side([ask.inputs for ask in asked], rows, keys, scratch)
            self.storage.open(lanes, keys, inputs.numbers[2])
            output = self.lm.eager.forward(inputs, self.storage)
        for ask in asked:
            ask.backend.meter.add(ask.real, begin, backend.meter.now())
        return [_of_lane(output, place) for place in places]


def _of_lane(output: Output, place: int) -> Output:
    """Of one text of several, as if it had run alone: `[1, rows, ...]`."""
    one = slice(place, place + 1)
    best = None if output.best is None else output.best[:, one]
    return Output(output.logits[one], {layer: states[one] for layer, states in output.features.items()}, best)


def _in_lane(lm: WithWindows, cache: KVCache, backend: LaneBackend) -> WithWindows:
    """The same model for another sequence, with rows and a context of its own, run by another backend."""
    twin = copy.copy(lm)
    twin.cache, twin.backend = cache, backend
    twin.forget()
    return twin


def why_alone(models: Sequence[Any]) -> str | None:
    """Why sequences of these models do not run side by side; None: they do."""
    for lm in models:
        if (why := getattr(lm, "alone", None)) is not None:
            return why
        if not isinstance(lm, WithWindows):
            if isinstance(getattr(lm, "model", None), nn.Module):
                return f"{type(lm).__name__} runs its model for one sequence at a time"
            continue
        if lm.ranks is not None:
            return f"{lm.name} is spread over processes, which follow one sequence"
        backend: Any = lm.backend
        if not hasattr(backend, "eager"):
            return f"{lm.name} has a backend ({backend.name}) that computes for one sequence at a time"
        if rows := backend.eager.rows_at_once:
            return f"{lm.name} is canonical by forwards of {rows} rows of one sequence"
        if type(lm.cache) is not KVCache:
            return f"{lm.name} keeps {type(lm.cache).__name__}, of which there is one for one sequence"
        if backend is not backend.eager and not isinstance(backend, Compiled):
            return f"{lm.name} replays captured graphs, which are for one sequence at a time"
    return None


def why_not_copied(memo: Mapping[int, Any]) -> str | None:
    """Why what was copied with this memo cannot go side by side: it runs a model past those that it names."""
    for original, copied in memo.items():
        if type(copied) is KVCache or (isinstance(copied, nn.Module) and id(copied) != original):
            return f"the drafter has a {type(copied).__name__} beside the models that it names"
    return None


def in_lanes(models: Sequence[Any], parts: T, count: int, alone: str | None = None) -> tuple[list[T], str | None]:
    """Copy what runs these models, the target first, once for each lane; or no copy, and why there is one lane only.

    `alone`: why, where the caller knows it.
    """
    if (why := why_alone(models) or alone) is not None:
        return [], why
    memos = lane_memos(models, count)
    made = [copy.deepcopy(parts, memo) for memo in memos]
    why = why_not_copied(memos[0])
    return ([] if why else made), why


def lane_memos(models: Sequence[Any], count: int) -> list[dict[int, Any]]:
    """Return a memo for `copy.deepcopy` for each of `count` lanes: copies made with it run the lane's views of models.

    The first model is the target: its forwards wait for those of the others, so that all lanes have drafted when it
    runs. What is no `WithWindows` is in no memo, hence copied whole.
    """
    memos: list[dict[int, Any]] = [{} for _ in range(count)]
    for lm in models:
        if isinstance(lm, WithWindows) and id(lm) not in memos[0]:
            for memo, view in zip(memos, SharedModel(lm, count, last=lm is models[0]).views(), strict=True):
                memo[id(lm)], memo[id(lm.model)] = view, lm.model
    return memos
