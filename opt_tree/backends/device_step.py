"""A step on the device, seen from the host: what it sends, reads once, and notes of both contexts.

The host gives what it knows before the step (which rows the drafter lacks, how long both contexts are, where the noise
starts) in one upload, and reads tree and verdict in one read. Knows nothing of texts and of when one ends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backend import Meter
from opt_tree.backends.tensor_pool import read_tree
from opt_tree.backends.tensor_step import FACTS, Given, Left, Shape, TensorStep
from opt_tree.model import Model, Pending
from opt_tree.sampling import Sampling
from opt_tree.target import Forward
from opt_tree.tree import Tree, on_host, send

LEAST_KEYS = 256
"""A forward has so many keys, or twice as many as often as it takes: few shapes."""


class StepStart(NamedTuple):
    """What a step begins with, all of it known to the host."""

    forward: Forward | None
    """Rows that the drafter lacks of its context, a model's root the last; at most `TensorStep.catching_up`. None: it
    has none."""
    root: int
    """The last token of the context."""
    more: Int[np.ndarray, " numbers"]
    """What else the drafter sends (`TensorDrafter.sent`)."""
    limit: int
    """Layers at most."""
    sampling: Sampling
    """How the target's own tokens are chosen; without processors."""
    starts: Int[np.ndarray, " depths"]
    """The noise of the own tokens by depth (`Random.starts`), as much as two steps take; none for a greedy target."""
    ends: Bool[Tensor, " vocab"] | None = None
    """The tokens below which nothing goes into the tree, on the device."""


@dataclass(frozen=True, eq=False)
class DeviceResult:
    """What a step left: tree and verdict on the host, all else where it was computed."""

    tree: Tree
    path: list[int]
    token: int
    """The target's own."""
    logits: Float[Tensor, "rows vocab"]
    scores: Float[Tensor, "rows vocab"]
    features: dict[int, Float[Tensor, "path hidden"]]


class Coming(NamedTuple):
    """A step that was launched and is not read."""

    shape: Shape
    left: Left
    told: Tensor
    """`Left.told` on the host, once it is `there`."""
    there: torch.Event | None
    """None: it is."""
    meters: list[Meter]
    """What it costs, a model each."""
    held: list[Any]
    """`DeviceStep.held` when it was launched."""


class DeviceStep(TensorStep):
    """A `TensorStep` between what the host knows before it and what the host learns of it."""

    def held(self) -> list[Any]:
        """What a launch rests on, compared by ==: a step is not the one to take once the answer is another one."""
        return [*((lm.cache, lm.cache.storage_version) for lm in self.models), self.drafter.held()]

    def begin(self, asked: StepStart) -> Coming:
        """Launch a step. Nothing is waited for."""
        missing, most, target, lm = asked.forward, self.catching_up, self.target, self.drafter.lm
        rows, least = 0 if missing is None else len(missing.tokens), int(lm is not None)
        if not least <= rows <= most:
            raise ValueError(f"a step catches up with {least} to {most} rows of the drafter, got {rows}")
        length = target.length if lm is None else lm.length + rows
        behind, more = most + FACTS, len(asked.more)
        numbers, features = np.zeros(behind + more + len(asked.starts), dtype=np.int64), None
        if missing is not None:
            numbers[most - rows : most], features = missing.tokens, missing.features
        numbers[most:behind] = rows, target.length, length, asked.root, 0
        numbers[behind : behind + more], numbers[behind + more :] = asked.more, asked.starts
        if features is not None and rows < most:
            features = torch.constant_pad_nd(features, (0, 0, most - rows, 0))
        shape = self._shape(asked, target.length, length - rows)
        return self._launched(shape, Given(send(numbers, target.device), features, asked.ends))

    def ahead(self, asked: StepStart, coming: Coming) -> Coming | None:
        """Launch the step behind one that is not read, of as many layers; None where that does not pay.

        What it begins with is on the device; the host knows how long the contexts may be.
        """
        most, lm = asked.limit + 1, self.drafter.lm
        length = self.target.length + most
        if lm is not None and asked.forward is not None:
            length = lm.length + len(asked.forward.tokens) + asked.limit
        shape = self._shape(asked, self.target.length + most, length)
        if not self.pays(shape):
            return None
        numbers, features, _ = coming.left.next
        if len(asked.starts):
            numbers = torch.cat([numbers, send(asked.starts, numbers.device)])
        return self._launched(shape, Given(numbers, features, asked.ends))

    def pays(self, shape: Shape) -> bool:
        """Whether a step of this shape is launched before it is known that there is one."""
        return False

    def end(self, asked: StepStart, coming: Coming) -> DeviceResult:
        """Wait for a step. Both contexts are then as after one of the host, but for what the drafter learns.

        Where the next one is on its way, `logits` and `scores` may be of that one.
        """
        if coming.there is not None:
            coming.there.synchronize()
        for model, meter in zip(self.models, coming.meters, strict=True):
            model.backend.meter = Meter(model.backend.meter.work + meter.work)
        missing, target, lm, left = asked.forward, self.target, self.drafter.lm, coming.left
        # A copy, as a step may be kept, and the memory that a device copies to is scarce.
        tree, verdict = read_tree(coming.told.numpy().copy(), len(left.logits))
        kept = verdict[: int(verdict[-2]) + 1]
        text = tree.tokens[kept]
        _write(target, text)
        target.commit(list(range(len(text))))
        if lm is not None and missing is not None:
            _write(lm, missing.tokens)
            lm.commit(list(range(len(missing.tokens))))
            _write(lm, text[1:])
        features = {layer: states[: len(kept)] for layer, states in left.features.items()}
        return DeviceResult(
            tree, kept.tolist(), int(verdict[-1]), left.logits[: len(tree)], left.scores[: len(tree)], features
        )

    def keys(self, lm: Model | None, slots: int) -> int:
        """How many keys a forward has where so many slots are used; the last one is nobody's."""
        keys = LEAST_KEYS
        while keys < slots:
            keys *= 2
        return keys if lm is None else self.shape(lm, 1, keys - 1)[1]

    def _shape(self, asked: StepStart, length: int, drafted: int) -> Shape:
        """The shape of a step behind contexts of these lengths, the drafter's without its missing rows."""
        own, draft = self.slots(asked.limit)
        keys = self.keys(self.target, length + own), self.keys(self.drafter.lm, drafted + draft)
        return Shape(asked.limit, keys, asked.sampling, self.drafter.scale, asked.ends is not None)

    def _launched(self, shape: Shape, given: Given) -> Coming:
        """Launch, and begin to copy what is told to the host; what it costs is counted once it is read."""
        backends = [lm.backend for lm in self.models]
        meters, held = [backend.meter for backend in backends], self.held()
        for lm in self.models:
            lm.cache.truncate(lm.length)
            lm.backend.meter = Meter()
        try:
            left = self.launch(shape, given)
        finally:
            own = [backend.meter for backend in backends]
            for backend, meter in zip(backends, meters, strict=True):
                backend.meter = meter
        if on_host(left.told):
            return Coming(shape, left, left.told, None, own, held)
        told, there = left.told.to("cpu", non_blocking=True), torch.Event(left.told.device)
        there.record()
        return Coming(shape, left, told, there, own, held)


def _write(lm: Model, tokens: Int[np.ndarray, " rows"]) -> None:
    """A path of these tokens was written behind the context."""
    lm.cache.truncate(lm.length)
    lm.cache.open(len(tokens))
    lm._note(Pending(0, tokens, np.arange(lm.length, lm.length + len(tokens))))
