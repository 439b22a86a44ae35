"""Several processes on one question set, started by `accelerate launch --multi_gpu` or torchrun.

Owns ranks and barriers: who does what, and when. Answers travel through files, not through here: every process must
see the answer file's folder. (`--multi_gpu` is the launcher's name for several processes; without GPUs they run on the
CPU. Its `--cpu` starts a single one.)
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed

Item = TypeVar("Item")


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
        # On the host, whatever the device: nothing but barriers and one line of text passes here. One process may be
        # hours behind another at the end, so no barrier times out in earnest.
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's items: every size-th one, which also spreads the categories."""
        return list(items[self.rank :: self.size])

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            torch.distributed.barrier()

    def lead(self, action: Callable[[], None]) -> None:
        """Let the leader act; what it refuses (ValueError, OSError), all refuse."""
        refusal: list[str | None] = [None]
        if self.leads:
            try:
                action()
            except (ValueError, OSError) as error:
                if self.size == 1:
                    raise
                refusal = [str(error)]
        if self.size > 1:
            torch.distributed.broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise ValueError(refusal[0])

    def leave(self) -> None:
        """Leave."""
        if self.size > 1:
            torch.distributed.destroy_process_group()
