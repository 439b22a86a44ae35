"""What a model was at some time: its weights, modules, hooks and adapters, and what of it has changed since.

Owns the comparison at the beginning of every text. Packed weights, compiled packages and kept rows of a context are the
model's as it was; who holds them asks here whether it still is. It takes about half the time of a plain forward.
"""

import math
from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_tree.backends.mapped import Mapped, mapped

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number. Numbers are compared by their bits: NaN is equal to itself."""
_PLAIN = (Tensor, nn.Parameter)


class Change(NamedTuple):
    """What is found to have changed first."""

    what: str
    """A clause for a reader: "lm_head.weight was changed"."""
    rebuilt: bool
    """Whether modules, hooks or parameters are others; else values alone."""


class Snapshot:
    """A model at the time when this was made. A copy, or what is unpickled, is of the copied model as it then is."""

    def __init__(self, model: Any) -> None:
        self.model, self._before = model, None
        modules = dict(model.named_modules())
        output = getattr(model, "get_output_embeddings", lambda: None)()
        if output is not None and output not in modules.values():  # a head borrows the target's
            modules["its output layer"] = output
        self._modules = [
            _Module(name, module, _parts(module), _hooks(module), adapters_of(module))
            for name, module in modules.items()
        ]
        found = {id(weight): _Weight(name, weight) for name, weight in _named_weights(modules)}
        self._weights = list(found.values())

    def __getstate__(self) -> dict[str, Any]:
        """The model, and what has changed in it already: addresses are no copy's."""
        return {"model": self.model, "before": self.change()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]
        self._before = state["before"]

    def change(self) -> Change | None:
        """What has changed since, the first of it; None: nothing that shows.

        PyTorch counts changes of a weight, but for those through `.data` and under inference mode. These are looked for
        on a CPU, where any one number that is another is seen; see `Sample` and `Mapped`.
        """
        if self._before is not None:
            return self._before
        for known in self._modules:
            if what := known.change():
                return Change(f"{known.name or type(known.module).__name__} {what}", True)
        for weight in self._weights:
            if not weight.same():
                return Change(f"{weight.name} was changed", False)
        return None


class _Module(NamedTuple):
    """A module, what it was made of, what was hooked into it, and which of its adapters were at work."""

    name: str
    module: nn.Module
    parts: tuple[Any, ...]
    hooks: tuple[Any, ...]
    adapters: tuple[Any, ...]

    def change(self) -> str:
        if not _same(self.parts, _parts(self.module)):
            return "has other parts"
        if not _same(self.hooks, _hooks(self.module)):
            return "has another hook or forward"
        return "" if self.adapters == adapters_of(self.module) else "has other adapters at work"


class _Weight:
    """A weight and its numbers, as far as they are compared."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.version, self.address, self.sample = version(tensor), _address(tensor), sample(tensor)

    def same(self) -> bool:
        if (version(self.tensor), _address(self.tensor)) != (self.version, self.address):
            return False
        return self.sample is None or fits(self.sample, self.tensor)


def version(tensor: Tensor) -> int:
    """How often PyTorch has seen a tensor change; of one made in inference mode nobody counts that."""
    return -1 if tensor.is_inference() else tensor._version


class Sample(NamedTuple):
    """What a tensor is known by. One number that changes changes the sum; rows or columns that change places do not."""

    numbers: Tensor
    """The bits of one number of every row and every column."""
    total: int
    """The sum of all bits, 64 at a time: 15 ms for 270 MB on one core, where one row's forward takes 25 to 37."""


def sample(tensor: Tensor) -> Sample | Mapped | None:
    """Note what a tensor is known by; None for what is not a plain tensor of the CPU's.

    Of one that lies in a file the system knows whether it was written to: no number is read.
    """
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or not tensor.numel():
        return None
    if (found := mapped(tensor.detach())) is not None:
        return found
    return Sample(_strided(tensor).clone(), _total(tensor))


def fits(known: Sample | Mapped, tensor: Tensor) -> bool:
    """Whether a tensor that had this sample has it still."""
    if isinstance(known, Mapped):
        return known.same(tensor.detach())
    return torch.equal(known.numbers, _strided(tensor)) and known.total == _total(tensor)


def _total(tensor: Tensor) -> int:
    parts = tensor.detach().reshape(-1).view(torch.uint8)
    rest = parts.numel() % 8
    eights = parts[: parts.numel() - rest]
    if eights.storage_offset() % 8:  # a view of a larger tensor
        eights = eights.clone()
    return int(eights.view(torch.int64).sum()) + int(parts[parts.numel() - rest :].sum())


def _strided(tensor: Tensor) -> Tensor:
    """Every n-th number, as bits. n is coprime to the number of columns and less than both sides: so none is missed."""
    rows = tensor.shape[0] if tensor.ndim else 1
    columns = tensor.numel() // rows
    step = max(min(rows, columns) - 1, 1)
    while math.gcd(step, columns) > 1:
        step -= 1
    return tensor.detach().reshape(-1).view(_BITS[tensor.itemsize])[::step]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # quantised and distributed ones have none
        return 0


def _named_weights(modules: dict[str, nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved; others are computed, some anew as a text grows (rotary factors)."""
    for name, module in modules.items():
        passing = module._non_persistent_buffers_set
        own = {**module._parameters, **{key: one for key, one in module._buffers.items() if key not in passing}}
        yield from ((f"{name}.{key}".lstrip("."), one) for key, one in own.items() if isinstance(one, Tensor))


def _parts(module: nn.Module) -> tuple[Any, ...]:
    own = module.__dict__
    return (*own["_modules"].values(), *own["_parameters"].values())


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Hooks, and what stands in the place of its forward; but ours, which stay for one forward of some thread."""
    own = module.__dict__
    found = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    if (forward := own.get("forward")) is not None:
        found.append(forward)
    return tuple(hook for hook in found if not (getattr(hook, "__module__", None) or "").startswith("opt_tree."))


def adapters_of(module: nn.Module) -> tuple[Any, ...]:
    """What of a layer of PEFT's says which adapters take part and how much: attributes, where no weight changes."""
    if "_disable_adapters" not in module.__dict__:
        return ()
    active, scaling = getattr(module, "_active_adapter", None), getattr(module, "scaling", None)
    return (
        module.__dict__["_disable_adapters"],
        list(active) if isinstance(active, list) else active,
        dict(scaling) if isinstance(scaling, dict) else None,
    )


def _same(known: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    return len(known) == len(found) and all(map(is_, known, found))
