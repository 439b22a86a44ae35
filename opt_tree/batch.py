"""Forwards of several sequences as one: which go together, and how they are packed.

Owns what a lane has of a model, and padding. Who runs when is `hub.py`'s: a forward of a lane switches to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import greenlet
from jaxtyping import Bool, Int
from torch import Tensor, nn

from opt_tree.cache import KVCache
from opt_tree.chain_lm import ChainLM
from opt_tree.engines import Compiled, Engine, Forward
from opt_tree.engines.base import Mask
from opt_tree.engines.body import compute_batch, laws_of, model_inputs, takes
from opt_tree.engines.eager import attention_kernels
from opt_tree.lanes import Lane, Storage
from opt_tree.lm import CausalLM
from opt_tree.target import Output

_CALL = {"cpu": 12}
_CALL_ELSEWHERE = 128
"""What a forward costs however few rows it has, in rows: weights are read and kernels launched once. Measured on the
demo target on a CPU; accelerators take many more rows before they are busy."""


class Ask(NamedTuple):
    """A forward that a lane waits for."""

    engine: "LaneEngine"
    forward: Forward

    @property
    def rows(self) -> int:
        return self.forward.ints.shape[1]


class LaneEngine(Engine):
    """The engine of one lane: it asks the hub. Outside of the hub's greenlets there is nobody to ask."""

    name = "lane"

    def __init__(self, packed: "Packed", lane: Lane) -> None:
        self.packed, self.lane = packed, lane

    def run(self, forward: Forward) -> Output:
        return greenlet.getcurrent().parent.switch(Ask(self, forward))

    def watch(self, layers: tuple[int, ...]) -> None:
        self.packed.lm.watch(layers)


class Packed:
    """One model for all lanes: its storage, and forwards of several lanes as one."""

    def __init__(self, lm: CausalLM, lanes: int, last: bool) -> None:
        self.lm, self.storage, self.last = lm, Storage(lm.cache.shapes, lanes), last
        self._keeps_logits = takes(lm.model, "logits_to_keep")
        self._call = _CALL.get(lm.device.type, _CALL_ELSEWHERE)

    def views(self) -> list[CausalLM]:
        """The model as each lane has it."""
        return [self.lm.in_lane(lane, LaneEngine(self, lane)) for lane in self.storage.lanes]

    def parts(self, asked: Sequence[Ask]) -> list[list[Ask]]:
        """Split forwards into those that run as one, each part in the order of its lanes."""
        parts = cheapest_split([ask.rows for ask in asked], self._call)
        return [sorted((asked[index] for index in part), key=lambda ask: ask.engine.lane.number) for part in parts]

    def run(self, asked: Sequence[Ask]) -> list[Output]:
        """Run forwards of different lanes, in their order, as one: padded on the left, and to the keys of the fullest.

        A padding row sees the first key of its lane alone and is written where nobody reads; nobody sees it.
        """
        rows, engine = max(ask.rows for ask in asked), self.lm.engine
        keys = max(ask.engine.lane.read[1] for ask in asked)
        lanes = [ask.engine.lane.number for ask in asked]
        self.storage.reserve(keys)
        if isinstance(engine, Compiled) and engine.takes((lanes[-1] + 1 - lanes[0]) * rows):
            return self._compiled(engine, asked, rows, keys)
        forwards = [ask.forward for ask in asked]
        ints, mask, more = _tensors(forwards, rows, keys, self.storage.slots - 1)
        self.storage.open(lanes, keys, ints[2])
        inputs = model_inputs(self.lm.model, ints, mask, *more)
        whole = not all(forward.last_only and forward.slots is None for forward in forwards)
        if not whole and self._keeps_logits:
            inputs["logits_to_keep"] = 1
        with attention_kernels(self.lm.device):
            logits, states = compute_batch(self.lm.model, inputs, self.storage, engine.layers)
        outputs = []
        for row, ask in enumerate(asked):
            own = {layer: found[row, -ask.rows :] for layer, found in states.items()}
            asked_for = logits[row, -ask.rows if whole else -1 :]
            outputs.append(Output(asked_for, own, laws_of(asked_for, ask.forward)))
        return outputs

    def _compiled(self, engine: Compiled, asked: Sequence[Ask], rows: int, keys: int) -> list[Output]:
        """The same by the model's package, for all lanes from the first to the last: those between them are padding."""
        by_lane = {ask.engine.lane.number: ask.forward for ask in asked}
        lanes = range(asked[0].engine.lane.number, asked[-1].engine.lane.number + 1)
        forwards = [by_lane.get(lane) for lane in lanes]
        ints, mask, more = _tensors(forwards, rows, keys, self.storage.slots - 1)
        found = engine.call(ints, mask, self.storage.views(lanes), more, forwards)
        places = ((ask.engine.lane.number - lanes.start, ask) for ask in asked)
        return [engine.output([one[place, -ask.rows :] for one in found], ask.forward) for place, ask in places]


def cheapest_split(rows: Sequence[int], call: int) -> list[list[int]]:
    """Split forwards of so many rows, each a lane's, into those that are cheapest as one; indices, part by part.

    A part costs a call, and for each of its lanes the rows of its longest forward: a prefill of 500 rows does not pad
    a tree of 10 to its size. In order of their rows the best split is a shortest path over the places to split at.
    """
    order = sorted(range(len(rows)), key=lambda index: -rows[index])
    best = [(0, 0)]
    for end in range(1, len(rows) + 1):
        best.append(min((best[begin][0] + call + (end - begin) * rows[order[begin]], begin) for begin in range(end)))
    parts, end = [], len(rows)
    while end:
        parts.append(order[best[end][1] : end])
        end = best[end][1]
    return parts


def _tensors(
    forwards: Sequence[Forward | None], rows: int, keys: int, scratch: int
) -> tuple[Int[Tensor, "3 lanes {rows}"], Mask | dict[str, Mask], list[Tensor]]:
    """A body's inputs, a batch row for each forward: padded on the left to `rows`, on the right to `keys`.

    Padding is written to the slot `scratch`; a lane without a forward is padding as a whole. The last are features.
    """
    first = next(forward for forward in forwards if forward is not None)
    ints = first.ints.new_zeros((3, len(forwards), rows))
    ints[2] = scratch
    for lane, forward in enumerate(forwards):
        if forward is not None:
            ints[:, lane, rows - forward.ints.shape[1] :] = forward.ints
    if isinstance(first.mask, dict):
        masks = {kind: [one and one.mask[kind] for one in forwards] for kind in first.mask}  # type: ignore[index]
        mask: Any = {kind: _mask(own, rows, keys) for kind, own in masks.items()}  # type: ignore[arg-type]
    else:
        mask = _mask([one and one.mask for one in forwards], rows, keys)  # type: ignore[arg-type, misc]
    if first.features is None:
        return ints, mask, []
    features = first.features.new_zeros((len(forwards), rows, first.features.shape[1]))
    for own, forward in zip(features, forwards, strict=True):
        if forward is not None:
            own[rows - len(forward.features) :] = forward.features  # type: ignore[arg-type]
    return ints, mask, [features]


def _mask(
    masks: Sequence[Bool[Tensor, "1 1 _ _"] | None], rows: int, keys: int
) -> Bool[Tensor, "lanes 1 {rows} {keys}"]:
    """One mask for all lanes: what a lane has no rows or keys for is hidden, but a padding row sees the first key."""
    first = next(mask for mask in masks if mask is not None)
    whole = first.new_zeros((len(masks), 1, rows, keys))
    for lane, mask in zip(whole, masks, strict=True):
        empty = rows if mask is None else rows - mask.shape[2]
        if mask is not None:
            lane[:, empty:, : mask.shape[3]] = mask[0]
        if empty:
            lane[:, :empty, 0] = True
    return whole


def why_alone(models: Sequence[Any]) -> str | None:
    """Why sequences of these models do not run side by side; None: they do."""
    for lm in models:
        if isinstance(lm, ChainLM):
            return f"{lm.name} is scored path by path, from one cache of its own"
        if not isinstance(lm, CausalLM):
            if isinstance(getattr(lm, "model", None), nn.Module):
                return f"{type(lm).__name__} runs its model for one sequence at a time"
            continue
        if lm.ranks is not None:
            return f"{lm.name} is spread over processes, which follow one sequence"
        if lm.changes_at_border:
            return f"{lm.name} changes its position factors with the context (LongRoPE): one forward takes one kind"
        if type(lm.cache) is not KVCache:
            return f"{lm.name} keeps {type(lm.cache).__name__}, of which there is one for one sequence"
        if lm.engine is not lm.eager and not isinstance(lm.engine, Compiled):
            return f"{lm.name} replays captured graphs, which are for one sequence at a time"
    return None


def why_not_copied(memo: Mapping[int, Any]) -> str | None:
    """Why what was copied with this memo cannot go side by side: it runs a model past those that it names."""
    for original, copied in memo.items():
        if type(copied) is KVCache or (isinstance(copied, nn.Module) and id(copied) != original):
            return f"the drafter has a {type(copied).__name__} beside the models that it names"
    return None


def lanes_of(models: Sequence[Any], count: int) -> list[dict[int, Any]]:
    """For each of `count` lanes, what stands for each of these models in it: a memo for `copy.deepcopy`.

    The first is the target: its forwards wait for those of the others, so that everybody has drafted when it runs.
    Models that are no `CausalLM` are not in it, hence copied whole.
    """
    memos: list[dict[int, Any]] = [{} for _ in range(count)]
    for lm in models:
        if isinstance(lm, CausalLM) and id(lm) not in memos[0]:
            for memo, view in zip(memos, Packed(lm, count, last=lm is models[0]).views(), strict=True):
                memo[id(lm)], memo[id(lm.model)] = view, lm.model
    return memos
