"""Does the advice hold? The advised tree against a grid that is measured afterwards, in turn, on other prompts.

    python -m experiments.advised --bench-name heldout --limit 16
    python -m experiments.advised --base-model-path smollm2 --compile --bench-name heldout --limit 10

`opt_tree.advise` is asked with the package's own prompts. Then its setting, `auto`, the fixed trees of a small grid and
plain decoding answer the questions of the set by turns, timed in seconds of the processor. Within 3 % of the best of
them is what is hoped for.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is advised on, and what is measured."""

    max_new_tokens: int = option(64, "new tokens a question, at most", least=2)
    nodes: str = option("4,5,8,12,16", "comma list of the grid's budgets")
    thresholds: str = option("0.12,0.3,0.6", "comma list of the grid's thresholds")
    seconds: float = option(90.0, "of recording")


main = main_of("experiments.advised", Options, __doc__, "experiments.advised:run")

if __name__ == "__main__":
    sys.exit(main())

import math
from typing import Any

import torch

from evaluation.answers.metrics import times_as_fast
from evaluation.command_line import numbers, table, whole_numbers
from evaluation.latency import methods_of
from evaluation.run.models import gather
from evaluation.timing import Timings, environment, interleave
from opt_tree import Controller, OptTree, TreePolicy, advise
from opt_tree.decoding import advising
from opt_tree.decoding.advice import AUTO
from opt_tree.decoding.step_costs import auto
from opt_tree.training.prompts import default_prompts


def run(options: Options) -> dict[str, Any]:
    """Ask, measure, compare."""
    given = gather(options)
    pair = given.pair
    found = advise(pair, default_prompts(heldout=True)[:24], options.max_new_tokens, options.seconds, 1)
    print(found)
    trees: dict[str, TreePolicy | Controller] = {
        f"OptTree({n}, {t:g})": OptTree(n, t) for n in whole_numbers(options.nodes) for t in numbers(options.thresholds)
    }
    best = found.here.best.name
    trees = {best: advising.grid()[best], **trees, AUTO: auto(pair.target, pair.drafter)}
    timings = interleave(methods_of(pair, trees), given.first_prompts(), options.max_new_tokens)
    rows = [
        {"setting": name, "x plain": over(timings, name, "plain")[0], "expected": found.here.grid.get(name, math.nan)}
        for name in trees
    ]
    rows.sort(key=lambda row: -row["x plain"])
    print(table(rows))
    fastest = rows[0]["setting"]
    lines = {}
    for name in (best, AUTO):
        rate, low, high = over(timings, name, fastest)
        expected = found.here.grid[name]
        lines[name] = {"over the best": rate, "from": low, "to": high, "x plain": over(timings, name, "plain")[0]}
        lines[name] |= {"expected": expected}
        print(f"{name}: {rate:.3f} of the best, {fastest} (95 % {low:.3f} to {high:.3f}); expected {expected:.2f}")
    return {
        "advised": found.setting.name,
        "verdict": found.verdict,
        "interval": [found.setting.low, found.setting.high],
        "best": fastest,
        "grid": len(trees),
        "lines": lines,
        "rows": rows,
        "environment": environment(pair.target.device),
    }


def over(timings: Timings, one: str, other: str) -> tuple[float, float, float]:
    """How many times as fast one is as the other, with a 95 % interval over prompts, drawn together."""
    clock = "cpu_seconds" if torch.get_num_threads() == 1 else "seconds"  # what a neighbour takes is none's
    ratio, interval = times_as_fast(timings.spent(one, clock), timings.spent(other, clock))
    low, high = interval or (math.nan, math.nan)
    return ratio, low, high
