"""A step on the device, seen from the host: what it sends, reads once, and notes of both contexts.

The host gives what it knows before the step (which rows the drafter lacks, how long both contexts are, where the noise
starts) in one upload, and reads tree and verdict in one read. Knows nothing of texts and of when one ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backend import Meter
from opt_tree.backends.device_clock import meter_of
from opt_tree.backends.tensor_pool import read_tree
from opt_tree.backends.tensor_step import FACTS, Given, Layers, Left, Shape, TensorStep, further
from opt_tree.cache import inference
from opt_tree.model import Model
from opt_tree.sampling import Temperature
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
    sampling: Temperature
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


class Told(NamedTuple):
    """Numbers on their way from the device to the host."""

    numbers: Tensor
    there: torch.Event | None
    """None: they are."""

    @staticmethod
    def of(numbers: Tensor) -> "Told":
        """Begin to copy them, into memory of their own. Nothing is waited for."""
        if on_host(numbers):
            return Told(numbers, None)
        told, there = numbers.to("cpu", non_blocking=True), torch.Event(numbers.device)
        there.record()
        return Told(told, there)

    def read(self) -> Tensor:
        """Wait for them."""
        if self.there is not None:
            self.there.synchronize()
        return self.numbers


@dataclass(eq=False)
class Coming:
    """A step on its way, which is not read: launched, or its first two layers alone."""

    shape: Shape
    layers: Layers
    meters: list[Meter]
    """What it costs, a model each."""
    held: list[Any]
    """`DeviceStep.held` when it was launched."""
    flags: list[Told] = field(default_factory=list)
    """Of its layers; the last one has none."""
    rest: tuple[Left, Told] | None = None
    """Once all of it is launched: what it leaves, and `Left.told`."""


class DeviceStep(TensorStep):
    """A `TensorStep` between what the host knows before it and what the host learns of it."""

    def held(self) -> list[Any]:
        """What a launch rests on, compared by ==: a step is not the one to take once the answer is another one."""
        return [*((lm.cache, lm.cache.storage_version) for lm in self.models), self.drafter.held()]

    def begin(self, asked: StepStart) -> Coming:
        """Launch a step, of one that may stop its first two layers. Nothing is waited for."""
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
        """`begin` the step behind one that is not read, of as many layers; None where that does not pay.

        What it begins with is on the device; the host knows how long the contexts may be.
        """
        most, lm = asked.limit + 1, self.drafter.lm
        length = self.target.length + most
        if lm is not None and asked.forward is not None:
            length = lm.length + len(asked.forward.tokens) + asked.limit
        shape = self._shape(asked, self.target.length + most, length)
        if not self.pays(shape):
            return None
        numbers, features, _ = self.finish(coming)[0].next
        if len(asked.starts):
            numbers = torch.cat([numbers, send(asked.starts, numbers.device)])
        return self._launched(shape, Given(numbers, features, asked.ends))

    def pays(self, shape: Shape) -> bool:
        """Whether a step of this shape is launched before it is known that there is one."""
        return False

    def finish(self, coming: Coming) -> tuple[Left, Told]:
        """Launch what is left of a step: layer after layer until one has stopped, and the rest.

        A layer's flag is looked at when the next layer is launched as well: the device has work while the host waits,
        and a stop costs one layer that nobody needs.
        """
        while coming.rest is None:
            # The last layer has no flag. Behind it this is one that was looked at, and no wait.
            self._further(coming, stopped=not coming.flags[-2].read())
        return coming.rest

    def end(self, asked: StepStart, coming: Coming) -> DeviceResult:
        """Wait for a step. Both contexts are then as after one of the host, but for what the drafter learns.

        Where the next one is on its way, `logits` and `scores` may be of that one.
        """
        left, sent = self.finish(coming)
        told = sent.read().numpy().copy()  # a step may be kept, and the memory that a device copies to is scarce
        for model, meter in zip(self.models, coming.meters, strict=True):
            model.work += meter.work
        missing, target, lm = asked.forward, self.target, self.drafter.lm
        tree, verdict = read_tree(told, len(left.logits))
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
        return keys if lm is None else lm.backend.shape(1, keys - 1)[1]

    def _shape(self, asked: StepStart, length: int, drafted: int) -> Shape:
        """The shape of a step behind contexts of these lengths, the drafter's without its missing rows."""
        own, draft = self.slots(asked.limit)
        keys = self.keys(self.target, length + own), self.keys(self.drafter.lm, drafted + draft)
        return Shape(asked.limit, keys, asked.sampling, self.drafter.scale, asked.ends is not None)

    def _launched(self, shape: Shape, given: Given) -> Coming:
        """Launch a step, or its first two layers; what it costs is counted once it is read."""
        meters, held = [meter_of(lm.device) for lm in self.models], self.held()
        coming = Coming(shape, self.launch(shape, given), meters, held)
        self._further(coming)
        if coming.rest is None:
            self._further(coming)
        return coming

    @inference
    def _further(self, coming: Coming, stopped: bool = False) -> None:
        """Launch the next layer, or the rest, and begin to copy what it tells to the host."""
        with self._counting(coming.meters):
            found = further(coming.layers, stopped)
        if isinstance(found, Left):
            coming.rest = found, Told.of(found.told)
        elif found is not None:
            coming.flags.append(Told.of(found))

    @contextmanager
    def _counting(self, meters: list[Meter]) -> Iterator[None]:
        """Inside, the models' work is counted there."""
        backends = [lm.backend for lm in self.models]
        own = [backend.meter for backend in backends]
        for backend, meter in zip(backends, meters, strict=True):
            backend.meter = meter
        try:
            yield
        finally:
            for backend, meter in zip(backends, own, strict=True):
                backend.meter = meter


def _write(lm: Model, tokens: Int[np.ndarray, " rows"]) -> None:
    """A path of these tokens was written behind the context."""
    lm.cache.truncate(lm.length)
    lm.cache.open(len(tokens))
    lm.pending = np.array([tokens, np.arange(lm.length, lm.length + len(tokens))])
