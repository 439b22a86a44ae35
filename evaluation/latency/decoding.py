"""How fast trees of several budgets decode, in turn with plain decoding and transformers' own; where the time goes."""

import functools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from evaluation.answers.metrics import bootstrap, with_interval
from evaluation.command_line import Value
from evaluation.run.baselines import in_loop, transformers_assisted, transformers_greedy
from evaluation.run.options import AUTO
from evaluation.timing import Method, Timings, interleave
from opt_tree import Controller, Decoder, Generation, Pair, TreePolicy
from opt_tree.decoding.presets import plain

BASELINES = ("plain", "transformers", "transformers assisted")
_COLD = 2
"""Steps at a generation's beginning that pay for cold memory."""

Row = dict[str, Value]


def measure(
    pair: Pair,
    trees: Mapping[str, TreePolicy | Controller],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    assistant: PreTrainedModel | None,
) -> Timings:
    """Decode every prompt with every tree and every baseline in turn."""
    methods: dict[str, Method] = {
        name: in_loop(Decoder(pair.target, pair.drafter, tree), pair) for name, tree in trees.items()
    }
    methods["plain"] = in_loop(plain(pair.target), pair)
    methods["transformers"] = functools.partial(transformers_greedy, pair)
    if assistant is not None:
        methods["transformers assisted"] = functools.partial(transformers_assisted, pair, assistant=assistant)
    return interleave(methods, prompts, max_new_tokens)


def overview(timings: Timings) -> list[Row]:
    """A line for each method, the fastest first."""
    return [_row(name, timings) for name in sorted(timings.runs, key=timings.rate, reverse=True)]


def beside_grid(timings: Timings) -> list[Row]:
    """`auto` over the best of the fixed trees, chosen afterwards, and over plain decoding; by either clock.

    With 95 % intervals over prompts, both methods' runs on a prompt drawn together. Nothing where there is no grid.
    """
    grid = [name for name in timings.runs if name not in (AUTO, *BASELINES)]
    if AUTO not in timings.runs or not grid:
        return []
    clocks = {"seconds": "by the clock", "cpu_seconds": "in CPU time"}
    best = {clock: max(grid, key=functools.partial(timings.rate, clock=clock)) for clock in clocks}
    over_best: Row = {"auto over": "the best of the grid"}
    over_best |= {text: f"{_over(timings, best[clock], clock)}, {best[clock]}" for clock, text in clocks.items()}
    over_plain: Row = {"auto over": "plain"}
    return [over_best, over_plain | {text: _over(timings, "plain", clock) for clock, text in clocks.items()}]


def _over(timings: Timings, other: str, clock: str) -> str:
    """How many times as fast `auto` is, and its interval."""
    ours, theirs = (np.array(timings.spent(name, clock)) for name in (AUTO, other))

    def ratio(rows: Int[np.ndarray, "... rows"]) -> Float[np.ndarray, "..."]:
        one, two = ours[rows].sum(-2), theirs[rows].sum(-2)
        return one[..., 0] / one[..., 1] * two[..., 1] / two[..., 0]

    return with_interval(float(ratio(np.arange(len(ours)))), bootstrap(ratio, len(ours)))


def _row(name: str, timings: Timings) -> Row:
    rate = timings.rate(name)
    row: Row = {"method": name, "tokens/s": rate, "tokens/CPU s": timings.rate(name, "cpu_seconds")}
    row |= {f"x {other}": rate / timings.rate(other) for other in BASELINES if other in timings.runs}
    return row | step_times(timings.generations(name))


def step_times(generations: Sequence[Generation]) -> Row:
    """Tokens a step, and medians over the steps of where their time goes; nothing for what has no trace."""
    if not generations:
        return {}
    steps = sum(len(generation.steps) for generation in generations)
    times = [step.times for generation in generations for step in generation.steps[_COLD:]]
    row: Row = {"tokens/step": sum(len(generation.tokens) for generation in generations) / steps}
    if not times:
        return row

    def median(seconds: Sequence[float]) -> float:
        return 1000 * statistics.median(seconds)

    return row | {
        "step ms": median([t.total for t in times]),
        "draft forwards ms": median([t.draft_forward for t in times]),
        "target forward ms": median([t.target_forward for t in times]),
        "growing the tree ms": median([t.draft - t.draft_forward for t in times]),
        "outside the forwards ms": median([t.other for t in times]),
        "outside %": 100 * statistics.median([t.other / t.total for t in times]),
    }
