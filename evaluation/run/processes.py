"""Several processes on one question set, started by `accelerate launch --multi_gpu` or torchrun: who does what, where.

Nothing passes between them but files: each writes a part of its own, and owns it while it does. (`--multi_gpu` is the
launcher's name for several processes; without GPUs they run on the CPU. Its `--cpu` starts a single one.)
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from evaluation.run.options import Options

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """This process among its equals."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @classmethod
    def launched(cls) -> "Processes":
        """Read what a launcher says in the environment; alone without one."""
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "size": "WORLD_SIZE"}
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        return cls() if alone else cls(**{key: int(os.environ.get(name, "0")) for key, name in names.items()})

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's items: every size-th one, which also spreads the categories."""
        return list(items[self.rank :: self.size])


def place(options: Options, processes: Processes) -> str:
    """Return the device of this process, and give it its threads.

    Raises ValueError when the GPU options ask for what is not there.
    """
    count = torch.cuda.device_count()
    device = options.device or ("cuda" if count else "cpu")
    if not device.startswith("cuda"):
        if options.max_gpu_memory or options.num_gpus_per_model > 1 or options.processes not in (None, 1):
            raise ValueError(
                f"--num-gpus-total, --num-gpus-per-model and --max-gpu-memory speak of GPUs, but the device is {device}"
                "; on a CPU several processes are: accelerate launch --multi_gpu --num_processes N"
            )
        return options.check_device()
    if options.processes not in (None, processes.size):
        raise ValueError(
            f"--num-gpus-total {options.num_gpus_total} with {options.num_gpus_per_model} a model means "
            f"{options.processes} processes, {processes.size} were launched; accelerate launch --multi_gpu "
            f"--num_processes {options.processes} -m evaluation.eval_opt_... launches them"
        )
    needed = (processes.local_rank + 1) * options.num_gpus_per_model
    if needed > count:
        raise ValueError(f"process {processes.rank} needs {needed} GPUs on this machine, which has {count}")
    if device == "cuda":
        device = f"cuda:{processes.local_rank * options.num_gpus_per_model}"
    torch.cuda.set_device(device)
    return device
