"""The one interleaved measurement: several ways to do something take turns, so that a busy machine hurts them alike.

Owns who goes when, what the runs add up to, and on which machine it was. Knows nothing of models and questions.
"""

import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import opt_tree
from evaluation.answers.metrics import between, times_as_fast
from evaluation.command_line import Value
from opt_tree import Generation
from opt_tree.errors import counted

Task = TypeVar("Task")
Place = TypeVar("Place")
Row = dict[str, Value]
BASELINES = ("plain", "transformers", "transformers, assisted")
_WARM_UP = 16
_COLD = 2
"""Steps at a generation's beginning that pay for cold memory."""


def in_turn(tasks: Sequence[Task], turn: int) -> list[Task]:
    """Each goes first in its turn: what a task leaves in the machine's caches hits all alike."""
    first = turn % len(tasks)
    return [*tasks[first:], *tasks[:first]]


def schedule(tasks: Sequence[Task], places: Iterable[Place], limit: float = math.inf) -> Iterator[tuple[Task, Place]]:
    """Yield every task at every place, place after place, the tasks of each in another order.

    After `limit` seconds no further place is begun, nor one that would likely last beyond; the first always is.
    """
    begin, longest = time.perf_counter(), 0.0
    for turn, place in enumerate(places):
        started = time.perf_counter()
        if turn and started - begin + longest > limit:
            return
        for task in in_turn(tasks, turn):
            yield task, place
        longest = max(longest, time.perf_counter() - started)


@dataclass(frozen=True)
class Timed:
    """New tokens and the wall time they took, prefill included."""

    tokens: list[int]
    seconds: float
    generation: Generation | None = field(default=None, repr=False)
    """The trace, where the library's loop decoded."""
    cpu_seconds: float = math.nan
    """Of all threads of this process, where `interleave` ran it: what a busy machine distorts less."""


Method = Callable[[list[int], int, int], Generation | Timed]
"""A way to decode: from a prompt, the number of new tokens at most and a seed to the new tokens and their cost."""


@dataclass(frozen=True)
class Timings:
    """Runs of several methods over the same prompts: `runs[method][prompt]` lists the repetitions."""

    runs: dict[str, list[list[Timed]]]

    def spent(self, method: str, clock: str = "seconds") -> list[tuple[int, float]]:
        """Return the new tokens of each prompt and the time they took, by the median of its repetitions.

        `clock`: "seconds" by the wall, or "cpu_seconds".
        """
        return [
            (len(repeated[0].tokens), statistics.median(getattr(run, clock) for run in repeated))
            for repeated in self.runs[method]
        ]

    def rate(self, method: str, clock: str = "seconds") -> float:
        """Tokens per second over all prompts (sum over sum), prefill included."""
        tokens, seconds = map(sum, zip(*self.spent(method, clock), strict=True))
        return tokens / seconds

    def texts(self, method: str) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [repeated[0].tokens for repeated in self.runs[method]]

    def generations(self, method: str) -> list[Generation]:
        """All traces of a method, repetitions included; none for transformers' own decoding."""
        return [run.generation for repeated in self.runs[method] for run in repeated if run.generation]


def interleave(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    rounds: int = 1,
    limit: float = math.inf,
    seed: int = 0,
) -> Timings:
    """Run every method on every prompt, `rounds` times, after one short warm-up each; see `schedule` for `limit`."""
    for method in methods.values():
        method(prompts[0], _WARM_UP, seed)
    runs: dict[str, list[list[Timed]]] = {name: [[] for _ in prompts] for name in methods}
    places = [*range(len(prompts))] * rounds
    with tqdm(total=len(places) * len(methods), desc="comparing", unit="answer", leave=False, disable=None) as bar:
        for name, index in schedule(list(methods), places, limit):
            begin = time.process_time()
            run = methods[name](prompts[index], max_new_tokens, seed)
            spent = time.process_time() - begin
            timed = Timed(run.tokens, run.seconds, run) if isinstance(run, Generation) else run
            runs[name][index].append(replace(timed, cpu_seconds=spent))
            bar.update()
    return Timings({name: [repeated for repeated in by_prompt if repeated] for name, by_prompt in runs.items()})


def step_figures(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens a step, and medians over the steps of where their time goes; nothing for what has no trace.

    Tokens a step is the mean acceptance length: tokens over steps, the target's own token included. A generation's
    first steps pay for cold memory; their times are left out where there are others.
    """
    if not generations:
        return {}
    times = [step.times for generation in generations for step in generation.steps[_COLD:] or generation.steps]
    steps = [step for generation in generations for step in generation.steps]
    milliseconds = {
        "step ms": [time.total for time in times],
        "draft forwards ms": [time.draft_forward for time in times],
        "target forward ms": [time.target_forward for time in times],
        "growing the tree ms": [time.draft - time.draft_forward for time in times],
        "outside the forwards ms": [time.other for time in times],
    }
    return {
        "tokens/step": sum(len(generation.tokens) for generation in generations) / len(steps),
        **{name: 1000 * statistics.median(seconds) for name, seconds in milliseconds.items()},
        "outside %": 100 * statistics.median(time.other / time.total for time in times),
    }


def overview(timings: Timings, intervals: bool = True) -> list[Row]:
    """A line for each method, the fastest first: its speed beside the baselines', its texts, where a step's time goes.

    `intervals`: of the ratios, over prompts.
    """
    return [_row(name, timings, intervals) for name in sorted(timings.runs, key=timings.rate, reverse=True)]


def _row(name: str, timings: Timings, intervals: bool) -> Row:
    rate = timings.rate(name)
    row: Row = {"method": name, "tokens/s": rate, "tokens/CPU s": timings.rate(name, "cpu_seconds")}
    for other in BASELINES:
        if other in timings.runs:
            row[f"x {other}"] = rate / timings.rate(other)
            if intervals:
                _, edges = times_as_fast(timings.spent(name), timings.spent(other))
                row[f"x {other}, 95 %"] = None if other == name else between(edges)
    if "plain" in timings.runs:
        same = sum(one == other for one, other in zip(timings.texts(name), timings.texts("plain"), strict=True))
        row["same text"] = f"{same}/{len(timings.texts(name))}"
    return row | step_figures(timings.generations(name))


def environment(device: torch.device) -> dict[str, Any]:
    """Describe this process's software and hardware: in every header, so that figures can be judged later."""
    return {
        "opt_tree": opt_tree.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "accelerate", "numpy")},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def contested() -> str | None:
    """Say that the machine had more to do than it has cores, where it had: times are then of its queue."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= cores + 0.5:
        return None
    return (
        f"these times and ratios are worth nothing: the load of this machine is {load:.1f}, it has "
        f"{counted(cores, 'core')}, and what was timed waited for other work"
    )


def commit() -> str | None:
    """The commit of this checkout, with `+` for uncommitted changes; None outside a checkout."""
    try:
        # An installed copy may lie inside some other project's checkout: only a tracked file's commit is ours.
        for asked in (
            f"ls-files --error-unmatch {Path(__file__).name}",
            "describe --always --abbrev=40 --exclude=* --dirty=+",
        ):
            git = ["git", "-C", str(Path(__file__).parent), *asked.split()]
            told = subprocess.run(git, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        return told
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The CPU's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file() and (model := re.search(r"^model name\s*:\s*(.*)", info.read_text(), re.MULTILINE)):
        name = model[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {counted(cores or 1, 'core')}"
