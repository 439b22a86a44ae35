"""How prompts are decoded side by side: plainly, with trees, and by transformers' padded batch; in turn.

Speed, memory, tokens and nodes a step. Counts are the same on a busy machine.
"""

import ctypes
import functools
import gc
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from evaluation.command_line import Value
from evaluation.run.baselines import transformers_batch
from evaluation.timing import schedule
from opt_tree import Decoder, Generation, Pair
from opt_tree.controllers import Controller
from opt_tree.decoding.presets import plain
from opt_tree.policies import TreePolicy

Row = dict[str, Value]
Answers = Sequence[Generation] | Sequence[list[int]]
Way = Callable[[Sequence[list[int]], int, int], Answers]
"""From prompts, how many go side by side and a limit of new tokens to each one's answer, or its new tokens."""
_PROCESS = Path("/proc/self")


class Found(NamedTuple):
    """What one way gave with one number of lanes."""

    answers: Answers
    seconds: float
    cpu_seconds: float
    peak_mb: float | None
    """By how much memory grew on the way, at most."""

    @property
    def texts(self) -> list[list[int]]:
        return [one.tokens if isinstance(one, Generation) else one for one in self.answers]

    @property
    def rate(self) -> float:
        """New tokens a CPU second."""
        return sum(map(len, self.texts)) / self.cpu_seconds

    def a_step(self) -> Row:
        """Tokens and drafted nodes a step; nothing of what has no steps."""
        steps = [step for one in self.answers if isinstance(one, Generation) for step in one.steps]
        if not steps:
            return {"tokens/step": None, "nodes/step": None}
        tokens = sum(map(len, self.texts))
        return {"tokens/step": tokens / len(steps), "nodes/step": sum(s.tree.nodes for s in steps) / len(steps)}


def measure(
    pair: Pair,
    trees: Mapping[str, TreePolicy | Controller],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    lanes: Sequence[int],
) -> list[Row]:
    """Decode all prompts in every way with every number of lanes; a line each.

    `tokens/CPU s` counts the time of all threads of this process, which a busy machine distorts less than the clock's.
    """
    ways: dict[str, Way] = {"plain": _in_loop(plain(pair.target), pair)}
    ways |= {name: _in_loop(Decoder(pair.target, pair.drafter, tree), pair) for name, tree in trees.items()}
    ways["transformers"] = lambda group, width, limit: [
        tokens
        for start in range(0, len(group), width)
        for tokens in transformers_batch(pair, group[start : start + width], limit)
    ]
    for way, count in itertools.product(ways.values(), lanes):
        way(prompts[: max(count, 2)], count, 4)  # `Auto` measures what so many lanes cost, where it is not known yet
    cells = [(name, count) for name in ways for count in lanes]
    found = {}
    for (name, count), _ in schedule(cells, tqdm([0], desc="batches", leave=False, disable=None)):
        found[name, count] = _measured(functools.partial(ways[name], prompts, count, max_new_tokens))
    return [_row(name, count, found) for name, count in cells]


def _in_loop(decoder: Decoder, pair: Pair) -> Way:
    def answer(group: Sequence[list[int]], width: int, limit: int) -> Answers:
        if decoder.drafter is not None:
            decoder.drafter.clear()  # another way may have shown it these texts
        return decoder.generate_batch(group, width, limit, stop=pair.stop)

    return answer


def _measured(action: Callable[[], Answers]) -> Found:
    before = _begin_peak()
    clocks = time.perf_counter(), time.process_time()
    answers = action()
    seconds, cpu_seconds = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    return Found(answers, seconds, cpu_seconds, None if before is None else _resident("VmHWM") - before)


def _begin_peak() -> float | None:
    """Give back what is free and begin to watch the peak; return the memory in use, in MB. None: Linux alone tells."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _resident("VmRSS")


def _resident(which: str) -> float:
    found = re.search(rf"{which}:\s*(\d+) kB", (_PROCESS / "status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def _row(name: str, lanes: int, found: Mapping[tuple[str, int], Found]) -> Row:
    own, least = found[name, lanes], min(count for _, count in found)
    same = sum(a == b for a, b in zip(own.texts, found["plain", least].texts, strict=True))
    return {
        "method": name,
        "lanes": lanes,
        "s": own.seconds,
        "tokens/s": sum(map(len, own.texts)) / own.seconds,
        "tokens/CPU s": own.rate,
        f"x lanes {least}": own.rate / found[name, least].rate,
        "x plain": own.rate / found["plain", lanes].rate,
        "x transformers": own.rate / found["transformers", lanes].rate,
        **own.a_step(),
        "MB more": own.peak_mb,
        "same text": f"{same}/{len(own.texts)}",
    }
