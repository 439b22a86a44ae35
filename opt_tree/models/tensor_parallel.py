"""A model that is spread over processes (tensor parallel): rank 0 decides, the others run its forwards with it.

Owns what passes between the ranks. Nothing makes ranks that decide for themselves decide alike: seeds, clocks, stop
rules and rounding differ, and a forward that one rank runs alone waits for ever. So one rank runs the loop; the others
are told the integers of each forward and, at the end, what came out. Knows nothing of trees, drafters and the loop.
"""

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor, nn

from opt_tree.backend import layer_shapes
from opt_tree.backends.packed import Packed
from opt_tree.backends.quantised import QuantisedLinear
from opt_tree.cache import KVCache
from opt_tree.errors import UnsupportedModelError
from opt_tree.models.quantised_layers import linear_of
from opt_tree.target import Forward

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another process that holds a part of the model has ended."""


class Ranks:
    """The processes that a model is spread over. Each holds a part of every layer's weights, keys and values."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.leads = torch.distributed.get_rank(group) == 0
        self.leading: int | None = None
        """The model's number among those that rank 0 is running at present; None: nobody follows."""

    def led(self, models: Sequence[Any], action: Callable[[], T]) -> T:
        """See `together`: what a decoder asks of a model that is spread."""
        return together(models, action)

    def check_led(self, name: str) -> None:
        """Raise ValueError where rank 0 decodes and nobody follows."""
        if self.leading is None:
            raise ValueError(f"{name} is spread over processes, which decide together in generate() alone")

    def share(self, message: Any = None) -> Any:
        """Return what rank 0 calls this with, at every rank."""
        told = [message]
        try:
            torch.distributed.broadcast_object_list(told, torch.distributed.get_global_rank(self.group, 0), self.group)
        except RuntimeError as error:
            raise LostRankError(f"another rank of the model has ended ({str(error).splitlines()[0]})") from error
        return told[0]


class LedCache(KVCache):
    """The rows of one rank. It notes what is called at rank 0, for the caches of the others to do the same."""

    def __init__(self, shapes: list) -> None:
        super().__init__(shapes)
        self.calls: list[tuple[str, tuple]] = []
        """Those since the last forward: a method's name and its arguments."""

    def reset(self) -> None:
        super().reset()
        self.calls = [("reset", ())]

    def commit(self, kept: list[int]) -> None:
        super().commit(kept)
        self.calls.append(("commit", (kept,)))

    def can_cut(self, length: int) -> bool:
        return False

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.calls.append(("truncate", (length,)))


class Spread(Packed):
    """Computes forwards of a model whose weights other processes have a part of."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.packed.pack(False)

    def new_cache(self) -> LedCache:
        return LedCache(layer_shapes(self.network))


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes that a model's weights are spread over; None: it is whole in this one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    meshes = {weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)}
    if not any(mesh.size() > 1 for mesh in meshes):
        return None
    (mesh, *others) = meshes
    if others or mesh.ndim != 1:
        raise UnsupportedModelError(f"{type(model).__name__} is spread in several ways: {sorted(map(str, meshes))}")
    return Ranks(mesh.get_group())


def whole(weight: Tensor) -> Tensor:
    """A weight as a tensor of this process; one that is spread is put together, which every rank has to ask for."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def replicated(layer: Any) -> Any:
    """An output layer that any rank can call alone: the layer itself, or a whole copy of one that is spread."""
    if isinstance(layer, QuantisedLinear) or whole(layer.weight) is layer.weight:
        return layer
    return linear_of(whole(layer.weight.detach()), None if layer.bias is None else whole(layer.bias.detach()))


def check_whole(lm: Any, what: str) -> None:
    """Raise UnsupportedModelError for a model that is spread: `what` would run a part of it at one rank alone."""
    if lm.ranks is not None:
        raise UnsupportedModelError(f"{what} runs a part of {lm.name} by itself, which is spread over processes")


def tell(lm: Any, forward: Forward) -> None:
    """At rank 0, in `together`: have the others run the same rows. What is committed they are told with the next."""
    if lm.ranks.leads and lm.ranks.leading is not None:
        rows = forward.tokens, forward.positions, forward.visible, forward.features, False, forward.last_only
        lm.ranks.share(("run", (lm.ranks.leading, lm.cache.calls, rows)))
        lm.cache.calls = []


def together(models: Sequence[Any], action: Callable[[], T]) -> T:
    """Let rank 0 act and the others run its forwards of these models; return, or raise, the same at every rank.

    Without a model that is spread this is a plain call. A rank that is lost ends all others with an error.
    """
    spread = [lm for lm in models if getattr(lm, "ranks", None) is not None]
    if not spread or spread[0].ranks.leading is not None:  # inside another call of this, the others follow already
        return action()
    ranks = spread[0].ranks
    if not ranks.leads:
        return _follow(spread)
    try:
        for number, lm in enumerate(spread):
            lm.ranks.leading = number
        result = action()
        ranks.share(("done", result))
    except BaseException as error:
        with contextlib.suppress(Exception):  # the others may be what was lost
            ranks.share(("failed", _portable(error)))
        raise
    finally:
        for lm in spread:
            lm.ranks.leading = None
    return result


def _follow(spread: Sequence[Any]) -> Any:
    """Run the forwards that rank 0 runs until its action is done; return what came of it, or raise its error."""
    while True:
        kind, content = spread[0].ranks.share()
        if kind == "done":
            return content
        if kind == "failed":
            raise content
        number, calls, rows = content  # as `tell` sends them
        lm = spread[number]
        try:
            for name, arguments in calls:
                getattr(lm.cache, name)(*arguments)
            lm.run(Forward(lm, *rows))
        except BaseException:
            torch.distributed.destroy_process_group()  # the others wait for this rank's part: let them hear of it
            raise


def _portable(error: BaseException) -> BaseException:
    """An error that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
