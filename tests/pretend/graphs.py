"""Captured graphs on the pretended CUDA device: what a capture refuses, what a replay reads and writes.

A capture runs and records every operation. A replay runs them again over the addresses of then: inputs are read where
they were, results are written where they lay. A graph owns what was made during its capture and nothing else, so a
replay fails where an input's memory has been given back. Graphs of one pool share memory: a replay spoils the results
of the others (a real one may; this one always does), but for those that somebody held while it was captured, as their
memory was not given to it. A number of the host that an operation took is what it was.
"""

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pretend import device

counts: Counter[str] = Counter()
"""Captures, replays, and recorded operations."""
_pools: dict[int, list["Graph"]] = {}
_holders: dict[int, list[weakref.ref]] = defaultdict(list)
"""By the address of its memory, tensors of the device that hold what was made in a capture."""


class _Elsewhere:
    """A tensor that a graph does not own: its address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (a graph reads memory given back)")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[tuple[Any, Any, list[torch.Tensor | None]]] = []
        self.results: list[torch.Tensor] = []
        self.own: set[int] = set()
        self.pool = -1
        self.found: set[int] = set()
        """Memory of other graphs of the pool that was held when the capture began."""
        self.left: set[int] = set()
        """That which still was when it ended."""

    def holds(self, tensor: torch.Tensor) -> None:
        """Note a tensor of the device that was made during the capture."""
        _holders[_memory(tensor.inner)].append(weakref.ref(tensor))  # type: ignore[attr-defined]

    def held(self) -> set[int]:
        """The memory of results of other graphs of the pool that somebody holds."""
        known = {_memory(x) for other in _pools[self.pool] if other is not self for x in other.results}
        return {memory for memory in known if any(holder() is not None for holder in _holders[memory])}

    def spoil(self, kept: set[int]) -> None:
        """Write over the results of the other graphs of the pool, but for this memory."""
        for other in _pools[self.pool]:
            for x in other.results if other is not self else ():
                if _memory(x) not in kept:
                    x.fill_(float("nan") if x.is_floating_point() else 1)

    def record(self, func: Any, given: Any, found: Any, view: bool) -> None:
        """Note an operation on inner tensors. A view is an address only: whoever reads it is described by its own."""
        if view:
            return
        inputs, results = device.tensors_of(given), device.tensors_of(found)
        if func is torch.ops.aten.fill_.Tensor:  # `x[:] = 0`: a number of the host
            inputs[1] = inputs[1].clone()
            given = ((inputs[0], inputs[1]), {})
            self.own.add(_memory(inputs[1]))
        described = device.mapped(self._described, given)
        new = [x for x in results if not any(x is y for y in inputs)]
        storages = {_memory(x) for x in inputs}
        for x in new:
            if _memory(x) not in storages:
                self.own.add(_memory(x))
                self.results.append(x)
        if func.overloadpacket.__name__ not in device._NO_KERNEL:
            self.operations.append((func, described, [x if any(x is y for y in new) else None for x in results]))

    def _described(self, x: torch.Tensor) -> Any:
        return x if _memory(x) in self.own else _Elsewhere(x)

    def refuse(self, why: str) -> None:
        """Raise what CUDA raises for what a capture cannot hold."""
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({why})")

    def replay(self) -> None:
        """Run everything again, over the addresses of then."""
        counts["replays"] += 1
        device.note("kernels", "graph replay")
        with torch.inference_mode():
            self.spoil(self.found)
            for func, given, outs in self.operations:
                args, kwargs = device.mapped(_Elsewhere.tensor, given, _Elsewhere)
                for out, x in zip(outs, device.tensors_of(func(*args, **kwargs)), strict=True):
                    if out is not None and out is not x:
                        out.copy_(x)
            self.spoil(self.left)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Moment:
    """`torch.cuda.Event`: a host that has not waited since it was recorded waits for it."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "nobody waits for another stream by events"

    def record(self, stream: Any) -> None:
        self.time, self.before = time.perf_counter(), device.waited

    def synchronize(self) -> None:
        if device.waited == self.before:
            device.note("reads")

    def elapsed_time(self, end: "_Moment") -> float:
        return 1000 * (end.time - self.time)


@contextmanager
def _capture(graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    graph.pool = pool if pool is not None else id(graph)
    _pools.setdefault(graph.pool, []).append(graph)
    counts["captures"] += 1
    graph.found = graph.held()
    device.captures.append(graph)
    try:
        yield
    finally:
        device.captures.pop()
        graph.left = graph.held()
        counts["operations"] += len(graph.operations)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Put graphs, streams and their moments into `torch.cuda`."""
    main, handles = _Stream(), iter(range(1 << 30))
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.Stream, cuda.stream, cuda.Event = Graph, _capture, _Stream, _on, _Moment
    cuda.current_stream, cuda.graph_pool_handle = (lambda *_: main), (lambda: next(handles))
