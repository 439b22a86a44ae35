"""A step as one CUDA graph, or as one a layer and one for the rest: the host sends, replays and reads.

Owns the graphs of a step and when they are dropped. Models whose forwards are captured one by one (`Captured`) give the
kernels of these forwards; what lies between them is captured with them.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from opt_tree.backend import Inputs
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.backends.device_step import DeviceStep
from opt_tree.backends.tensor_step import Given, Layers, Left, Shape, further, whole
from opt_tree.cache import inference
from opt_tree.errors import one_line
from opt_tree.model import Model
from opt_tree.target import Output
from opt_tree.tree import fetch

_ROUNDING = 0.2
"""How far path log-probabilities of a graph and of its kernels one by one may lie apart, also as a part of them: in
bfloat16 0.07 was seen. Tokens, parents and the verdict are to be equal."""


class _Part(NamedTuple):
    """A layer of a step, or the rest of it. Where no flag is looked at, a step is one part."""

    graph: Any
    flag: Bool[Tensor, ""] | None
    computed: list[tuple[Model, int]]
    """Its forwards: the model of each, and how many real rows it has."""

    def replay(self) -> None:
        """Replay it, and count its forwards; its time is that of the last one."""
        meters = [lm.backend.meter for lm, _ in self.computed]
        begin = [meter.now() for meter in meters[-1:]]
        self.graph.replay()
        end = [meter.now() for meter in meters[-1:]]
        for meter, (_, rows) in zip(meters, self.computed, strict=True):
            meter.add(rows, *(begin if meter is meters[-1] else end), *end)


class CapturedStep(DeviceStep):
    """A step whose launch is one replay, once its `Shape` has been met before; one a layer where a stop saves layers.

    A shape's first step runs forward by forward, so that caches have grown and libraries have chosen their kernels. Its
    second one is captured, and replayed beside the same kernels one by one: where the two say different things, or
    where it cannot be captured, that shape goes on forward by forward, and one warning says why. Graphs hold addresses:
    all are dropped when a cache has moved, when a layer is watched and when weights are others.

    Seconds of a replay are those of the model that it ends with: in a step of one graph the target's, as its forward
    and the drafter's cannot be told apart.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Everything but graphs: a copy captures its own."""
        dropped = ("_replays", "_met", "_rests_on", "_pool", "_stream")
        return {key: value for key, value in self.__dict__.items() if key not in dropped}

    _replays: dict[Shape, Callable[[Given], Layers] | None] | None = None
    """A shape without a replay goes on forward by forward."""
    _met: set[Shape]
    _rests_on: Any = None
    _pool: Any = None
    _stream: Any = None
    _computed: list[tuple[Model, int]] | None = None
    """During a capture, the forwards of its newest part."""

    def held(self) -> list[Any]:
        return [*(cast(Captured, lm.backend).held(lm.cache) for lm in self.models), self.drafter.held()]

    def pays(self, shape: Shape) -> bool:
        """Replays do, which find room in both caches."""
        return self._replays is not None and self._replays.get(shape) is not None

    @inference
    def launch(self, shape: Shape, given: Given) -> Layers:
        rests_on = self.held()
        if self._replays is None or rests_on != self._rests_on:
            self._replays, self._met, self._rests_on = {}, set(), rests_on
            self._pool = self._stream = None
        if shape not in self._met:
            self._met.add(shape)
            return super().launch(shape, given)
        if shape not in self._replays:
            try:
                self._replays[shape] = self._capture(shape, given)
            except RuntimeError as error:
                warnings.warn(f"a step of {shape.limit} layers is not captured: {one_line(error)}", stacklevel=2)
                self._replays[shape] = None
        replay = self._replays[shape]
        return super().launch(shape, given) if replay is None else replay(given)

    def compute(self, lm: Model, inputs: Inputs, rows: int) -> Output:
        if self._computed is None:
            return super().compute(lm, inputs, rows)
        self._computed.append((lm, rows))
        return cast(Captured, lm.backend).inline(inputs, lm.cache)

    def _capture(self, shape: Shape, given: Given) -> Callable[[Given], Layers]:
        """Capture a step over buffers that stay; return what brings a step's tensors there and replays it.

        A launch writes behind both contexts alone, so it may be made again. Its graphs share a pool: what a part reads
        of those before it was in use while it was captured. Of a part that is left out anything may be there.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream, parts = self._stream, list[_Part]()
        buffers = Given(*(None if part is None else part.clone() for part in given))  # type: ignore[arg-type]
        self._computed = []
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                expected = _said(whole(super().launch(shape, buffers)))
            torch.cuda.current_stream().wait_stream(stream)
            layers, left = super().launch(shape, buffers), None
            while left is None:
                graph, self._computed = torch.cuda.CUDAGraph(), []
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    found = further(layers)
                left, flag = (found, None) if isinstance(found, Left) else (None, found)
                parts.append(_Part(graph, flag, self._computed))
        finally:
            self._computed = None
        for part in parts:
            part.graph.replay()
        said, known = fetch(_said(left), expected)
        if not _same(said, known, len(left.logits)):
            raise RuntimeError("its graph says something else than its kernels one by one")
        return partial(_replayed, parts, left, buffers)


def _replayed(parts: list[_Part], left: Left, buffers: Given, given: Given) -> Layers:
    """Bring a step's tensors to the buffers that its graphs read, and replay these until a stop, and the rest."""
    for buffer, one in zip(buffers, given, strict=True):
        if buffer is not None and one is not None:
            buffer.copy_(one)
    for part in parts[:-1]:
        part.replay()
        if (yield part.flag):
            break
    parts[-1].replay()
    return left._replace(features={layer: states.clone() for layer, states in left.features.items()})


def _said(left: Left) -> Int[Tensor, " numbers"]:
    """All integers that a launch left: for the host, and for the next step."""
    return torch.cat([left.told, left.next.numbers])


def _same(one: Int[np.ndarray, " numbers"], other: Int[np.ndarray, " numbers"], rows: int) -> bool:
    """Whether two launches told the same tree of so many rows and the same verdict; of paths to rounding."""
    paths = slice(3 * rows, 4 * rows)  # in the order of `TensorTree.told`
    found, expected = (numbers[paths].view(np.float64) for numbers in (one, other))
    close = np.allclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING)
    return close and np.array_equal(np.delete(one, paths), np.delete(other, paths))
