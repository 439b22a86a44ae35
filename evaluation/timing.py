"""The one interleaved clock: several ways to do something take turns, so that a busy machine hurts them alike.

Owns who goes when, and what the runs add up to. Knows nothing of models.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tqdm import tqdm

from opt_tree import Generation

Task = TypeVar("Task")
Place = TypeVar("Place")
_WARM_UP = 16


def in_turn(tasks: Sequence[Task], turn: int) -> list[Task]:
    """Each goes first in its turn: what a task leaves in the machine's caches hits all alike."""
    first = turn % len(tasks)
    return [*tasks[first:], *tasks[:first]]


def shuffled(tasks: Sequence[Task], turn: int) -> list[Task]:
    """Another order every turn, for many small tasks: in a cycle each would always follow the same one."""
    return random.Random(turn).sample(tasks, len(tasks))


def schedule(
    tasks: Sequence[Task],
    places: Iterable[Place],
    limit: float = math.inf,
    order: Callable[[Sequence[Task], int], list[Task]] = in_turn,
) -> Iterator[tuple[Task, Place]]:
    """Yield every task at every place, place after place, the tasks of each in another order.

    After `limit` seconds no further place is begun, nor one that would likely last beyond; the first always is.
    """
    begin, longest = time.perf_counter(), 0.0
    for turn, place in enumerate(places):
        started = time.perf_counter()
        if turn and started - begin + longest > limit:
            return
        for task in order(tasks, turn):
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


Method = Callable[[list[int], int], Timed]
"""A way to decode: from a prompt and the number of new tokens at most."""


@dataclass(frozen=True)
class Timings:
    """Runs of several methods over the same prompts: `runs[method][prompt]` lists the repetitions."""

    runs: dict[str, list[list[Timed]]]

    def spent(self, method: str, clock: str = "seconds") -> list[tuple[int, float]]:
        """Of each prompt the new tokens and the time they took, by the median of its repetitions.

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
) -> Timings:
    """Run every method on every prompt, `rounds` times, after one short warm-up each; see `schedule` for `limit`."""
    for method in methods.values():
        method(prompts[0], _WARM_UP)
    runs: dict[str, list[list[Timed]]] = {name: [[] for _ in prompts] for name in methods}
    places = [index for _, index in itertools.product(range(rounds), range(len(prompts)))]
    with tqdm(total=len(places) * len(methods), desc="comparing", unit="answer", leave=False, disable=None) as bar:
        for name, index in schedule(list(methods), places, limit):
            begin = time.process_time()
            run = methods[name](prompts[index], max_new_tokens)
            runs[name][index].append(replace(run, cpu_seconds=time.process_time() - begin))
            bar.update()
    return Timings({name: [repeated for repeated in by_prompt if repeated] for name, by_prompt in runs.items()})
