"""A CUDA device without one: tensors that say they lie there, over tensors of the host, in a torch built for CPUs.

Every operation runs on the inner tensors, so numbers are the CPU's. What a device forbids is refused: host and device
tensors in one operation, numpy over its memory, its addresses. What it makes expensive is counted, by the line that
asked for it: reads by the host (each waits), uploads that block or do not, kernels. `pretend.graphs` adds captured
graphs. What it cannot show: a device's own kernels and rounding, races of streams, memory, time.

One process has one such device: `install` before anything is asked of CUDA. It rests on private names of torch;
`install` raises where they have changed, and whoever calls it skips.
"""

import contextlib
import ctypes
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
NO_PLACE = 77
"""The status of a process that cannot be made to believe."""
LIBRARY = ("opt_tree", "examples", "evaluation", "experiments")

_aten = torch.ops.aten
_CUDA = torch.device("cuda:0")
_HOST = torch.device("cpu")
_ONE_KERNEL = ("linear", "scaled_dot_product_attention", "layer_norm", "rms_norm", "dropout")
"""Composite operations that are one kernel, more or less, where they are fast; all others are taken apart."""
_NO_KERNEL = (
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("_unsafe_view", "_reshape_alias", "resize_", "set_", "_fused_sdp_choice"),
)
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "equal", "bincount")
"""Results have as many elements as their values say, or are on the host: the host waits."""
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_COPIES = ("_to_copy", "copy_")


class Log:
    """What happened: kernels by name; reads, blocking and other uploads by line."""

    def __init__(self) -> None:
        self.kernels, self.reads, self.uploads, self.blocking = (Counter[str]() for _ in range(4))
        self.idle = 0
        """How often the host waited for an event behind which nothing was launched: the device had nothing to do."""

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.reads.total() + self.blocking.total()


_logs: list[Log] = []
waited = 0
"""How often the host has waited since the process began."""
launched = 0
"""How many kernels, copies and replays were launched."""
captures: list[Any] = []
"""The graph that is being captured, if any."""
_warns = [False]
"""Whether every wait is a warning: `torch.cuda.set_sync_debug_mode("warn")`."""


@contextmanager
def logged() -> Iterator[Log]:
    """Note what happens inside."""
    _logs.append(Log())
    try:
        yield _logs[-1]
    finally:
        _logs.pop()


def note(kind: str, what: str | None = None, copies: list[Any] | None = None) -> None:
    """Count one event, by the line of the library that it comes from.

    `copies`: those to the host that have arrived behind a wait; without, all.
    """
    global waited, launched
    if captures and kind != "kernels":
        captures[-1].refuse(f"{kind} at {_site()}")
    launched += kind == "kernels"
    if kind in ("reads", "blocking"):
        waited += 1
        for copied in _coming[:] if copies is None else copies:
            with torch.inference_mode():
                copied[0].copy_(copied[1])
            _coming[:] = [one for one in _coming if one is not copied]
    if _warns[0] and kind in ("reads", "blocking"):
        warnings.warn(f"called a synchronizing CUDA operation at {_site()}", stacklevel=4)
    for log in _logs:
        getattr(log, kind)[what or _site()] += 1


def _site() -> str:
    """The innermost line of the library, else of anybody."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = Path(frame.f_code.co_filename)
        if name.is_relative_to(ROOT) and name.relative_to(ROOT).parts[0] in LIBRARY:
            return f"{name.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class OnDevice(torch.Tensor):
    """A tensor of the pretended device."""

    inner: torch.Tensor
    """What it says it is, on the host; views of one are views of the other."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        if inner.is_inference() != torch.is_inference_mode_enabled():
            with torch.inference_mode(inner.is_inference()):
                return OnDevice(inner)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_CUDA,
            requires_grad=False,
        )
        made.inner = inner
        if captures:
            captures[-1].holds(made)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {_CUDA} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        raise RuntimeError("an address of the device was asked for on the host")

    def __deepcopy__(self, memo: dict) -> Any:
        again = _made(getattr(self, "_is_param", False), self.inner.detach().clone(), self.requires_grad)
        return memo.setdefault(id(self), again)

    def __reduce_ex__(self, _: Any) -> Any:
        return _made, (getattr(self, "_is_param", False), self.inner, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _made(parameter: bool, inner: torch.Tensor, grad: bool) -> Any:
    made = OnDevice(inner)
    return torch.nn.Parameter(made, grad) if parameter else made


def _meant(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


_NUMBERS = frozenset((int, float, bool, type(None), torch.dtype, torch.device))
"""Most of what an operation takes; asking whether a number is a tensor takes longest."""


def mapped(change: Callable[[Any], Any], tree: Any, kind: type = torch.Tensor) -> Any:
    """Change every `kind` in what an operation takes or returns: torch's own walk takes longer than the operation."""
    made = type(tree)
    if made in _NUMBERS:
        return tree
    if isinstance(tree, kind):
        return change(tree)
    if made is tuple or made is list:
        return made([mapped(change, one, kind) for one in tree])
    return {key: mapped(change, one, kind) for key, one in tree.items()} if made is dict else tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of what an operation takes or returns."""
    found: list[torch.Tensor] = []
    mapped(found.append, tree)
    return found


_operations: dict[int, tuple[str, bool, Any]] = {}
"""Names of operations, and whether they are taken apart, by identity: torch's own hash of one is slow."""


def _operation(func: Any) -> tuple[str, bool, Any]:
    if id(func) not in _operations:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        apart = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
        name = func.overloadpacket.__name__
        _operations[id(func)] = name, apart and name not in _ONE_KERNEL, func
    return _operations[id(func)]


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one operation, some tensors of which are the device's."""
    name, apart, _ = _operation(func)
    if apart:
        return func.decompose(*args, **kwargs)
    if name in _COPIES or name == "_copy_from":
        return _copy(name, args, kwargs)
    if name == "_local_scalar_dense":
        note("reads")
        return func(args[0].inner)
    if name == "_fused_sdp_choice":
        return 0
    known, hosts = {}, []

    def inner(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, OnDevice):
            known[id(x.inner)] = x
            return x.inner
        hosts.append(x)
        return x

    given = mapped(inner, args), mapped(inner, kwargs) if kwargs else {}
    if hosts:
        _refuse_mixed(func, name, args, hosts)
    if name in _SIZED_BY_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note("reads")
    if name in _INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1]):
        note("reads")
    if _meant(kwargs.get("device")):
        given[1]["device"] = _HOST
    if name in ("_softmax", "_log_softmax") and args[2]:  # in float32 of half numbers: a CPU does it in two steps
        given = (given[0][0].float(), given[0][1], False), {}
    found = func(*given[0], **given[1])
    if not func.is_view and name not in _NO_KERNEL:
        note("kernels", name)
    if captures:
        captures[-1].record(func, given, found, func.is_view)
    if name == "equal":
        return found

    def outer(x: torch.Tensor) -> OnDevice:
        own = known.get(id(x))
        if own is None:
            return OnDevice(x)
        if own.shape != x.shape or own.stride() != x.stride():
            raise NotImplementedError(f"the pretended device cannot change a tensor's shape in place: {func}")
        return own

    return mapped(outer, found)


def _refuse_mixed(func: Any, name: str, args: tuple, hosts: list[torch.Tensor]) -> None:
    """Tensors of the host beside the device's: numbers and indices are taken, the latter by an upload that blocks."""
    if name in _INDEXING and isinstance(args[0], OnDevice):
        indices = [one for one in args[1] if one is not None and not isinstance(one, OnDevice)]
        for _ in indices:
            note("blocking")
        hosts = [x for x in hosts if all(x is not one for one in indices)]
    if any(host.dim() for host in hosts):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{_CUDA} and cpu! (in {func}, at {_site()})"
        )


def _copy(name: str, args: tuple, kwargs: dict) -> Any:
    """Copies between places, and casts."""
    if name == "_to_copy":
        source, asked = args[0], kwargs.get("device")
        there = _meant(asked) if asked is not None else isinstance(source, OnDevice)
        free = kwargs.get("non_blocking", False)
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
        inner = _inner(source)
        found = _aten._to_copy.default(inner, **options)
        if free and isinstance(source, OnDevice) and not there:
            return _set_out(found)
        _moved(isinstance(source, OnDevice), there, free)
        if captures:
            captures[-1].record(_aten._to_copy.default, ((inner,), options), found, False)
        return OnDevice(found) if there else found
    into, source = (args[1], args[0]) if name == "_copy_from" else args[:2]
    _moved(isinstance(source, OnDevice), isinstance(into, OnDevice), len(args) > 2 and args[2])
    given = (_inner(into), _inner(source))
    found = _aten.copy_.default(*given)
    if captures:
        captures[-1].record(_aten.copy_.default, (given, {}), found, False)
    return into


def _moved(here: bool, there: bool, free: Any) -> None:
    if here == there:
        return note("kernels", "copy") if here else None
    note("reads" if here else "uploads" if free else "blocking")


def _factories() -> Iterator[tuple[str, Any]]:
    """Every overload that makes a tensor of none."""
    apart = ("sparse", "quantized", "nested", "from_file", "_make_dep", "mkldnn", "cudnn")
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::") or any(word in full for word in apart):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(_aten, name, None), overload or "default", None)
        if op is None:
            continue
        kinds = [str(argument.type) for argument in op._schema.arguments]
        on_a_device = any(argument.name == "device" for argument in op._schema.arguments)
        if on_a_device and len(op._schema.returns) == 1 and not any("Tensor" in kind for kind in kinds):
            yield full.removeprefix("aten::"), op


def _factory(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} | {"device": _HOST}
        found = op(*args, **kwargs)
        if op.overloadpacket.__name__ not in _NO_KERNEL:
            note("kernels", op.overloadpacket.__name__)
        if captures:
            captures[-1].record(op, (args, kwargs), found, False)
        return OnDevice(found)

    return kernel


_ANSWERS = {
    **{"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_lazy_init": None},
    **{"_is_in_bad_fork": False, "synchronize": None, "manual_seed": None, "manual_seed_all": None},
    **{"get_amp_supported_dtype": [torch.bfloat16], "empty_cache": None, "get_device_name": "pretended"},
    **{"mem_get_info": (1 << 36, 1 << 36), "memory_allocated": 0, "max_memory_allocated": 0, "set_device": None},
    **{"reset_peak_memory_stats": None, "get_device_capability": (8, 0), "is_bf16_supported": True},
    **{"get_device_properties": None, "get_rng_state": torch.zeros(1), "set_rng_state": None},
}
_kept: list[Any] = []
_coming: list[tuple[torch.Tensor, torch.Tensor]] = []
"""What is on its way to the host, and what it will be: until somebody waits for the device it is anything."""


def _set_out(found: torch.Tensor) -> torch.Tensor:
    """A copy to the host that does not block."""
    note("kernels", "copy to the host")
    _coming.append((torch.full_like(found, 77), found))
    return _coming[-1][0]


class _Event:
    """`torch.Event`: copies that were begun before it are there behind it, and no others."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        self.before, self.launched = list(_coming), launched

    def synchronize(self) -> None:
        if due := [copied for copied in self.before if any(copied is one for one in _coming)]:
            for log in _logs:
                log.idle += launched == self.launched
            note("reads", None, due)


def install() -> torch.device:
    """Have this process believe in one CUDA device; once."""
    if _kept:
        return _CUDA
    if torch.cuda.is_available():
        raise RuntimeError("there is a CUDA device")
    sys.modules["triton"] = None  # type: ignore[assignment]  # its kernels would run there
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    library = torch.library.Library("aten", "IMPL")
    for name, op in _factories():
        with contextlib.suppress(RuntimeError):  # some have a kernel that cannot be replaced, and are not asked for
            library.impl(name, _factory(op), "CUDA")
    # `torch.tensor(data, device=...)` copies below the tensor's own dispatch. Attention is not taken apart outside of
    # inference mode, and would ask for code that is not there.
    for op in (_aten.copy_.default, _aten.scaled_dot_product_attention.default):
        library.impl(op.overloadpacket.__name__, lambda *a, _op=op, **k: _run(_op, a, k), "CUDA")
    _kept.append(library)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.accelerator.synchronize = lambda *_: None
    torch.Event = _Event  # type: ignore[misc, assignment]
    torch.cuda.set_sync_debug_mode = lambda mode: _warns.__setitem__(0, mode == "warn")
    _guard()
    _generators()
    return _CUDA


def _guard() -> None:
    """Guard the device by nothing: torch's registry of guards, in libc10, has slots by kind of device, and a guard that
    is written in Python has the one of PrivateUse1 (20); it goes into that of CUDA (1) as well.
    """

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    _kept.append(Guard())
    torch._C._acc.register_python_privateuseone_device_guard(_kept[-1])
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[1] = registry[20]


def _generators() -> None:
    """A generator of the device is one of the host."""
    real = torch.Generator

    class Generator(real):
        def __new__(cls, device: Any = "cpu") -> Any:
            return real.__new__(real, "cpu" if _meant(device) else device)

    torch.Generator = Generator  # type: ignore[misc]
