"""Forwards captured once as CUDA graphs and replayed: one graph for each padded shape, over buffers that stay.

Owns buffers, graphs and when they are dropped; the body is that of every backend, with its decoder layers compiled
where Triton is (`FusedLayers`). A tree's forward is some hundred small kernels whose launches cost more than their
work; a replay is one launch. Elsewhere than on CUDA the body is called over the same buffers. Captures and replays are
tested on a pretended device (`tests/pretend`), and where there is a GPU.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from opt_tree.backend import Inputs, Mask
from opt_tree.backends.body import Body
from opt_tree.backends.compiled import CompileError
from opt_tree.backends.fused import FusedLayers, can_fuse
from opt_tree.backends.grouped_attention import attention_by
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.backends.packed import Packed, attention_kernels
from opt_tree.cache import KVCache
from opt_tree.errors import counted, one_line
from opt_tree.target import Drafted, Output

_WARM_UPS = 2


class Captured(WithHiddenStates):
    """Replays a graph for every padded shape; other forwards (a long prefill) are eager.

    A model needs `Buckets` for it: each of their shapes is captured when it first comes, or beforehand
    (`models.compiling.warm_up`). A shape that cannot be captured, for want of memory, runs kernel by kernel from then
    on, with one warning; where the very first one cannot be, CompileError says why. Outputs lie in the graphs' common
    pool, valid until the model runs again, as every `Output` is; a drafter's have the best tokens of each row. A graph
    holds addresses: all are dropped when the cache has moved (`KVCache.storage_version`), when another layer is watched
    and when another drafter takes the model.
    """

    name = "captured"

    def __init__(self, eager: Packed, rows: tuple[int, ...]) -> None:
        """`rows`: the row buckets. Raises CompileError for a model spread over devices or offloaded."""
        super().__init__(eager.network)
        self.eager, self.rows, self.layers, self.works = eager, rows, eager.layers, False
        devices = {weight.device for weight in eager.network.parameters()}
        if len(devices) > 1 or any(hasattr(module, "_hf_hook") for module in eager.network.modules()):
            raise CompileError("its weights are on several devices or moved by hooks; a graph holds one device's work")
        self.fuses = devices.pop().type == "cuda" and can_fuse()
        """Whether decoder layers are compiled. They round otherwise: all graphs have them, or none has."""
        self.epoch = 0
        """Counts how often everything was dropped: whoever captured more than a forward compares it (`held`)."""
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but graphs and addresses: a copy captures its own."""
        dropped = ("_calls", "_cache", "_version", "_drafted", "_pool", "_stream", "_fused")
        return {key: value for key, value in self.__dict__.items() if key not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: what they hold is not what is to be computed any more."""
        self.epoch += 1
        self._calls: dict[tuple[int, int], Callable[[Inputs], tuple[Tensor, ...]]] = {}
        self._cache, self._version = cast(Any, None), -1
        self._drafted: Drafted | None = None
        self._pool, self._stream = cast(Any, None), cast(Any, None)
        self._fused: FusedLayers | None = None

    @property
    def rows_at_once(self) -> int | None:  # type: ignore[override]
        return self.eager.rows_at_once

    def begin_text(self) -> bool:
        if same := self.eager.begin_text():
            return same
        self.forget()
        return False

    def new_cache(self) -> KVCache:
        return self.eager.new_cache()

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        return self.eager.shape(rows, first_slot)

    def watch(self, layers: tuple[int, ...]) -> None:
        self.eager.watch(layers)

    def forward(self, inputs: Inputs, cache: Any) -> Output:
        rows = inputs.numbers.shape[2]
        if rows not in self.rows:
            return self.eager.forward(inputs, cache)
        same = self._cache is cache and self._drafted is inputs.drafted
        if not same or (self._version, self.layers) != (cache.storage_version, self.eager.layers):
            self.forget()
            self._cache, self._version, self.layers = cache, cache.storage_version, self.eager.layers
            self._drafted = inputs.drafted
        shape = rows, _keys(inputs.mask)
        if shape not in self._calls:
            self._calls[shape] = self._prepared(inputs, cache.views)
        logits, *hidden = self._calls[shape](inputs)
        best = None if self._drafted is None else hidden.pop()
        return Output(logits, dict(zip(self.layers, hidden, strict=True)), best)

    def held(self, cache: KVCache) -> tuple[Any, ...]:
        """What a capture of forwards over this cache rests on: it is stale once the answer is another one."""
        return cache, cache.storage_version, self.eager.layers, self.epoch

    def inline(self, inputs: Inputs, cache: KVCache) -> Output:
        """Compute a forward kernel by kernel, for whoever captures more than one. Nothing is picked for a drafter."""
        with self._kernels(inputs.numbers.device), self._layers_compiled():
            body = Body(self.network, self.eager.layers)
            logits, *hidden = body(inputs.numbers, inputs.mask, cache.views, inputs.features)
        return Output(logits, dict(zip(self.eager.layers, hidden, strict=True)))

    def _prepared(self, inputs: Inputs, views: list[Tensor]) -> Callable[[Inputs], tuple[Tensor, ...]]:
        """Return what computes forwards of this shape: a graph's replay, or the body where there can be no graph."""
        buffers = _Buffers(inputs)
        body = Body(self.network, self.layers, self._drafted)
        replay = None
        if buffers.ints.device.type == "cuda":
            try:
                replay = self._capture(body, buffers, views)
            except RuntimeError as error:
                why = one_line(error)
                if not self.works and not self.fuses:
                    raise CompileError(f"its forward cannot be captured: {why}") from error
                if not self.works:  # the first shape decides for all whether layers are compiled
                    name = type(self.network).__name__
                    warnings.warn(f"{name}: its layers are not compiled: {why}", stacklevel=2)
                    self.fuses, self._fused = False, None
                    return self._prepared(inputs, views)
                rows, keys = inputs.numbers.shape[2], _keys(inputs.mask)
                what = f"forwards of {counted(rows, 'row')} over {keys} keys run kernel by kernel"
                warnings.warn(f"{what}: they cannot be captured: {why}", stacklevel=2)
        self.works = True

        def call(inputs: Inputs) -> tuple[Tensor, ...]:
            buffers.fill(inputs)
            if replay is not None:
                return replay()
            with self._kernels(buffers.ints.device), self._layers_compiled():
                return body(*buffers.inputs(views))

        return call

    def _capture(self, body: Body, buffers: "_Buffers", views: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Warm up on scratch rows, capture the body, and return the graph's replay.

        The first warm-up is outside of inference mode: first captures inside have been faulty. All shapes are captured
        on one stream, since libraries keep a workspace for each stream. Other threads may allocate during a capture.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream, graph, device = self._stream, torch.cuda.CUDAGraph(), buffers.ints.device
        with self._kernels(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
                warm_up(body, buffers.inputs(views))
            with self._layers_compiled():
                if self.fuses:  # in inference mode, since torch.compile compiles for the mode of a call
                    with torch.cuda.stream(stream):
                        warm_up(body, buffers.inputs(views))
                torch.cuda.current_stream().wait_stream(stream)
                capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
                with capture:
                    outputs = body(*buffers.inputs(views))

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay

    def _layers_compiled(self) -> AbstractContextManager[None]:
        """Inside, this thread's forwards have compiled layers, if any have."""
        if not self.fuses:
            return nullcontext()
        if self._fused is None:
            self._fused = FusedLayers(self.network)
        return self._fused.standing_in()

    @contextmanager
    def _kernels(self, device: torch.device) -> Iterator[None]:
        """Inside, this thread's bodies take their kernels of attention and products as this model's arithmetic wants.

        Where layers are compiled and the model is not canonical, attention splits the keys over programs.
        """
        split: AbstractContextManager[None] = nullcontext()
        if self.fuses and device.type == "cuda" and not self.eager.packed.canonical:
            from opt_tree.backends.split_attention import SplitAttention

            split = attention_by(SplitAttention)
        with attention_kernels(device), self.eager.packed, split:
            yield


def warm_up(body: Body, inputs: tuple[Any, ...]) -> None:
    """Call the body on copies of its inputs: libraries choose kernels and allocate workspaces before a capture.

    On zeros for the cache: what was made in inference mode cannot be written outside of it, and rows are not to be. All
    layers of one shape share them, so that they take the memory of one layer.
    """
    ints, mask, views, features = inputs
    masks = {kind: one.clone() for kind, one in mask.items()} if isinstance(mask, dict) else mask.clone()
    zeros = {(view.shape, view.dtype): torch.zeros_like(view) for view in views}
    scratch = [zeros[view.shape, view.dtype] for view in views]
    given = None if features is None else features.clone()
    for _ in range(_WARM_UPS):
        body(ints.clone(), masks, scratch, given)


class _Buffers:
    """The inputs of one shape, at addresses that stay."""

    def __init__(self, inputs: Inputs) -> None:
        self.ints = inputs.numbers.clone()
        self.masks = {kind: mask.clone() for kind, mask in _masks(inputs.mask).items()}
        self.features = None if inputs.features is None else inputs.features.clone()

    def fill(self, inputs: Inputs) -> None:
        """Copy a forward's inputs here; nothing waits for them."""
        self.ints.copy_(inputs.numbers)
        for kind, mask in _masks(inputs.mask).items():
            self.masks[kind].copy_(mask)
        if self.features is not None and inputs.features is not None:
            self.features.copy_(inputs.features)

    def inputs(self, views: list[Tensor]) -> tuple[Any, ...]:
        """The arguments of a `Body` over the cache's rows."""
        return self.ints, self.masks.get("", self.masks), views, self.features


def _masks(mask: Mask | dict[str, Mask]) -> dict[str, Mask]:
    """Masks by the kind of layer; "" where there is one for all."""
    return mask if isinstance(mask, dict) else {"": mask}


def _keys(mask: Mask | dict[str, Mask]) -> int:
    return next(iter(_masks(mask).values())).shape[-1]
