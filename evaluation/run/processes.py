"""Several processes on one question set, started by `accelerate launch --multi_gpu` or torchrun.

Owns ranks and what passes between them: who does what, what the leader says, what the others bring it. Machines need
no folder that all of them see. (`--multi_gpu` is the launcher's name for several processes; without GPUs they run on
the CPU. Its `--cpu` starts a single one.)
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed

Item = TypeVar("Item")


class LostProcess(Exception):
    """Another process of this run has ended before its time."""


@dataclass(frozen=True)
class Processes:
    """This process among its equals. Alone, every method is a no-op or a plain call."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> "Processes":
        """Meet the other processes that a launcher started, if one did."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        # On the host, whatever the device: nothing but text passes here. One process may be hours behind another at
        # the end, so nothing times out in earnest; one that dies closes its connections, which all others notice.
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's items: every size-th one, which also spreads the categories."""
        return list(items[self.rank :: self.size])

    def gather(self, own: Item) -> list[Item]:
        """What each process brings, by rank, at the leader; an empty list at the others."""
        if self.size == 1:
            return [own]
        brought: list[Item | None] | None = [None] * self.size if self.leads else None
        with _lost():
            torch.distributed.gather_object(own, brought)
        return brought or []  # type: ignore[return-value]

    def told(self, find: Callable[[], Item]) -> Item:
        """What the leader finds, at every process."""
        found = [find() if self.leads else None]
        if self.size > 1:
            with _lost():
                torch.distributed.broadcast_object_list(found)
        return found[0]  # type: ignore[return-value]

    def lead(self, action: Callable[[], None]) -> None:
        """Let the leader act; what it refuses (ValueError, OSError), all refuse."""
        self.agree(action if self.leads else lambda: None)

    def agree(self, action: Callable[[], None]) -> None:
        """Let every process act; what one refuses (ValueError, OSError), all refuse."""
        refusal = None
        try:
            action()
        except (ValueError, OSError) as error:
            if self.size == 1:
                raise
            refusal = str(error) if self.leads else f"process {self.rank} on {platform.node()}: {error}"
        refusals = self.gather(refusal)
        if first := self.told(lambda: next(filter(None, refusals), None)):
            raise ValueError(first)

    def leave(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()


@contextmanager
def _lost() -> Iterator[None]:
    """Say in our own words that a process does not answer."""
    try:
        yield
    except RuntimeError as error:  # gloo's only kind: a connection that was closed
        raise LostProcess(f"another process of this run has ended ({str(error).splitlines()[0]})") from error
