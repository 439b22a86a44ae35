"""Several processes on one question set, started by `accelerate launch --multi_gpu` or torchrun: who does what, where.

Nothing passes between them but files: each writes a part of its own, and owns it while it does. (`--multi_gpu` is the
launcher's name for several processes; without GPUs they run on the CPU. Its `--cpu` starts a single one.)
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from evaluation.answers.file import AnswerFile
from evaluation.run.options import PUBLISHED, Options

Item = TypeVar("Item")
MOMENT = 5.0
"""Seconds that a process waits for another one of its run, which looks at the same file."""
DRAFTING = {"nodes", "threshold", "max_depth", "draft_dtype", "sharpening", "drafter", *PUBLISHED}
"""Settings that plain decoding has no use for."""


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


@dataclass(frozen=True)
class Work:
    """One method's part of a run: its name, its answer file, and what must agree for answers to be of one kind."""

    method: str
    whole: AnswerFile
    settings: dict[str, Any]
    file: AnswerFile
    """What this process writes: the answer file, or its own part of it."""
    overwrite: bool = False

    def resolve(self, found: dict[str, Any]) -> "Work":
        """Add the settings that are known once the models are loaded."""
        known = {key: value for key, value in found.items() if self.method in ("opt", "chain") or key not in DRAFTING}
        return replace(self, settings=self.settings | known)

    def answer_id(self, question: int | str) -> str:
        """The same for the same question and settings, and of the length of FastChat's ids."""
        digest = hashlib.sha256(f"{json.dumps(self.settings, sort_keys=True)}/{question}".encode()).hexdigest()
        return digest[:22]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs away from what this process writes; ValueError where one is at it."""
        with ExitStack() as locks:
            if self.file is self.whole:
                locks.enter_context(self.whole.lock())
                for part in self.whole.parts():  # of a run of several processes that may still be there
                    with part.lock():
                        pass
            else:
                with self.whole.lock(MOMENT):  # for a moment, as the other processes of this run do
                    locks.enter_context(self.file.lock())
            yield

    def done(self) -> set[int | str]:
        """The questions that have an answer, and are not to be answered again."""
        return set() if self.overwrite else {record["question_id"] for record in self.whole.read()}

    def replaced(self, processes: Processes) -> list[AnswerFile]:
        """What --overwrite removes with the first answer: all that is there but what other processes answer now."""
        if not self.overwrite:
            return []
        others = [self.whole.part(rank).path for rank in range(processes.size) if rank != processes.rank]
        return [self.whole, self.file, *(part for part in self.whole.parts() if part.path not in others)]


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
