"""Milliseconds of a forward against the tokens in it; with --nodes or --lanes, how fast trees decode on this machine.

    python -m evaluation.latency [--output FILE]
    python -m evaluation.latency --nodes 8,16,24,60,auto --thresholds 0.45 --bench-name heldout --limit 10
    python -m evaluation.latency --nodes 6,15 --lanes 1,2,4,8

The first measures target and drafter as decoding runs them (`forwards`). The second decodes with trees of several
budgets, in turn with plain decoding and transformers' own: tokens/s, and where a step's time goes. The third decodes so
many questions side by side (`batches`).
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import at_least, main_of, option, whole_numbers
from evaluation.run.options import MOST_LANES, Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is measured, on what."""

    tokens: list[int] = option(  # noqa: RUF009
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512), "tokens in a forward, several numbers"
    )
    contexts: list[int] = option((128, 512, 1024), "committed tokens before it, several numbers")  # noqa: RUF009
    repeats: int = option(30, "of every size, after a warm-up")
    patience: float = option(5.0, "seconds after which a size is not repeated further")
    output: str = option("latency.json", "where the measurement goes")
    nodes: str | None = option(
        None, "comma list of budgets, or auto among them: decode with them, instead of measuring forwards"
    )
    lanes: str | None = option(
        None, "comma list: decode the questions plainly, with --nodes and by transformers, so many side by side"
    )
    thresholds: str = option("0.2", "with --nodes: comma list, each tried at each budget")
    max_new_tokens: int = option(96, "with --nodes: new tokens a question, at most")
    assistant: str | None = option(
        None, "with --nodes: causal LM that assists transformers; by default the draft model, or the embedded one"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, repeats=1, max_new_tokens=1)
        if self.lanes and min(whole_numbers(self.lanes, MOST_LANES)) < 1:
            raise ValueError(f"--lanes must be at least 1 each, got {self.lanes}")
        for name in ("tokens", "contexts"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {min(getattr(self, name))}")


main = main_of("evaluation.latency", Options, __doc__, "evaluation.latency.__main__:run")

if __name__ == "__main__":
    sys.exit(main())

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from evaluation.answers.metrics import times_as_fast, with_interval
from evaluation.command_line import counted, machine_of, numbers, table
from evaluation.latency import batches
from evaluation.latency.forwards import ForwardTime, Probe, forwards_table, measure
from evaluation.run.baselines import InLoop, transformers_methods
from evaluation.run.inflate import describe
from evaluation.run.models import gather, load, load_assistant, resolved
from evaluation.run.options import AUTO
from evaluation.timing import Method, Timings, environment, interleave, step_figures
from opt_tree import CausalLM, Controller, Decoder, OptTree, Pair, TreePolicy
from opt_tree.core.files import check_writable, write_text
from opt_tree.decoding.presets import plain
from opt_tree.decoding.step_costs import auto
from opt_tree.policies.base import MOST_NODES

BASELINES = ("plain", "transformers", "transformers, assisted")
Row = batches.Row
Trees = Mapping[str, TreePolicy | Controller]


# Forwards.


def forwards(options: Options) -> dict[str, Any]:
    """Measure forwards and print the table; return where the measurement is."""
    output = Path(options.output).expanduser()
    check_writable(output)  # before minutes of measuring
    measured, models, place = measure_forwards(options)
    document = {"models": models, "environment": place, "cells": [asdict(one) for one in measured]}
    write_text(output, json.dumps(document, indent=1) + "\n")
    title = f"{models['target']}; drafter {models['drafter']}; {machine_of(place)}"
    print(title, "milliseconds of a forward, medians:", forwards_table(measured), sep="\n")
    return {"measured": options.output}


def measure_forwards(options: Options) -> tuple[list[ForwardTime], dict[str, Any], dict[str, Any]]:
    """Load the models and measure them; also return what they are, and where it was.

    Raises ValueError for a drafter without a model, models that are scored path by path, and contexts beyond theirs.
    """
    pair = load(options, options.check_device())
    if not pair.drafter.models:
        raise ValueError(
            f"{options.drafter} runs no model: there are no forwards of a drafter to time; --nodes decodes"
        )
    probes = []
    for name, lm in (("target", pair.target), *(("drafter", lm) for lm in pair.drafter.models[:1])):
        if not isinstance(lm, CausalLM):
            raise ValueError(f"the {name} {lm.name} is scored path by path: no row count says what a tree costs it")
        probes.append(Probe(name, lm, name == "drafter" and bool(pair.drafter.features)))
    tokens, contexts = sorted(set(options.tokens)), sorted(set(options.contexts))
    fitting = [context for context in contexts if probes[0].fits(context, 1)]
    if not fitting:
        raise ValueError(
            f"--contexts {min(contexts)} and one token more are beyond the target's {pair.target.max_context}"
        )
    models = {"target": name_of(pair), "drafter": pair.drafter.describe(), "inflate": options.inflate, **resolved(pair)}
    measured = measure(probes, fitting, tokens, options.repeats, options.patience)
    return measured, models | {"base_model_path": options.base_model_path}, environment(pair.target.device)


def name_of(pair: Pair) -> str:
    """What the target is, in one phrase."""
    return describe(pair.target.model, pair.drafter) or f"target {pair.target.name}, {pair.target.size}"


# Decoding.


def decode(options: Options) -> dict[str, Any]:
    """Decode the questions' first turns with every tree and by every baseline; print and return the tables."""
    material = gather(options)
    pair, prompts = material.pair, material.first_prompts()
    trees, auto_rows = trees_of(options, pair), []
    if options.lanes:
        rows = batches.measure(pair, trees, prompts, options.max_new_tokens, whole_numbers(options.lanes))
    else:
        methods = methods_of(pair, trees, load_assistant(options, options.assistant, pair))
        timings = interleave(methods, prompts, options.max_new_tokens)
        rows, auto_rows = overview(timings), auto_over_others(timings)
    place = environment(pair.target.device)
    print(f"{name_of(pair)}; drafter {options.drafter}; {machine_of(place)}")
    questions = f"{counted(len(prompts), 'question')} of {material.questions.name}"
    print(f"{questions}, greedy, {options.max_new_tokens} new tokens at most, in turn")
    print(table(rows))
    if auto_rows:
        print(table(auto_rows))
    return {"environment": place, "rows": rows, "auto": auto_rows}


def trees_of(options: Options, pair: Pair) -> Trees:
    """Every tree that --nodes and --thresholds ask for, by its name."""
    budgets = options.nodes.split(",") if options.nodes else []
    fixed = [budget for budget in budgets if budget != AUTO]
    sizes = whole_numbers(",".join(fixed), MOST_NODES) if fixed else ()
    pairs = [(n, t) for n in sizes for t in numbers(options.thresholds)]
    trees: dict[str, TreePolicy | Controller] = {f"OPT-Tree {n}/{t:g}": OptTree(n, t) for n, t in pairs}
    return trees | ({AUTO: auto(pair.target, pair.drafter)} if AUTO in budgets else {})


def methods_of(pair: Pair, trees: Trees, assistant: PreTrainedModel | None) -> dict[str, Method]:
    """Every tree and every baseline."""
    decoders = {name: Decoder(pair.target, pair.drafter, tree) for name, tree in trees.items()}
    decoders["plain"] = plain(pair.target)
    ours = {name: InLoop(decoder, stop=pair.stop, forget=True) for name, decoder in decoders.items()}
    others = transformers_methods(pair, assistant)
    return ours | {name: method for name, method in others.items() if name in BASELINES}


def overview(timings: Timings) -> list[Row]:
    """A line for each method, the fastest first."""
    return [_row(name, timings) for name in sorted(timings.runs, key=timings.rate, reverse=True)]


def _row(name: str, timings: Timings) -> Row:
    rate = timings.rate(name)
    row: Row = {"method": name, "tokens/s": rate, "tokens/CPU s": timings.rate(name, "cpu_seconds")}
    for other in BASELINES:
        if other in timings.runs:
            row[f"x {other}"], edges = times_as_fast(timings.spent(name), timings.spent(other))
            row[f"x {other}, 95 %"] = None if edges is None or other == name else f"{edges[0]:.2f} to {edges[1]:.2f}"
    return row | step_figures(timings.generations(name))


def auto_over_others(timings: Timings) -> list[Row]:
    """How many times as fast `auto` is as the best fixed tree, chosen afterwards, and as plain decoding; by two clocks.

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
    return with_interval(*times_as_fast(timings.spent(AUTO, clock), timings.spent(other, clock)))


def run(options: Options) -> dict[str, Any]:
    """Measure what was asked for."""
    return (decode if options.nodes or options.lanes else forwards)(options)
