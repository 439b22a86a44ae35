"""Milliseconds of a forward against the tokens in it, and the node budget and threshold that this machine should use.

    python -m evaluation.latency [--plot latency.png] [--answers a.jsonl ...]
    python -m evaluation.latency --nodes 8,16,24,60 --thresholds 0.45 --bench-name heldout --limit 10

The first measures target and drafter as decoding runs them (`forwards`); with answer files, it prints flags for the
evaluation commands (`budget`). The file it writes can be read again (`--measured`) for other answers. The second
decodes with trees of several budgets, in turn with plain decoding and transformers' own: tokens/s, and where a step's
time goes (`decoding`). With `--lanes 1,2,4,8` it decodes so many questions side by side (`batches`).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.answers.file import read_timed
from evaluation.command_line import at_least, main_of, numbers, option, table, whole_numbers
from evaluation.latency import batches, decoding
from evaluation.latency.advice import advice_table, forward_times, forwards_table, recommend
from evaluation.latency.budget import Acceptance
from evaluation.latency.forwards import Probe, measure
from evaluation.run.inflate import describe
from evaluation.run.machine import environment
from evaluation.run.material import gather
from evaluation.run.models import check_device, load, load_assistant, resolved
from evaluation.run.options import AUTO, MOST_LANES, MOST_NODES, Asked
from opt_tree import CausalLM, Controller, OptTree, TreePolicy
from opt_tree.decoding.step_costs import auto
from opt_tree.policies import Shared


@dataclass(frozen=True)
class Options(Asked):
    """What is measured, on what."""

    tokens: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512), "tokens in a forward", type=int, nargs="+"
    )
    contexts: tuple[int, ...] = option((128, 512, 1024), "committed tokens before it", type=int, nargs="+")
    repeats: int = option(30, "of every size, after a warm-up")
    patience: float = option(5.0, "seconds after which a size is not repeated further")
    measured: str | None = option(None, "read this file of an earlier run instead of measuring")
    output: str = option("latency.json", "where the measurement goes")
    plot: str | None = option(None, "draw it to this file (.png, .pdf, .svg)")
    answers: tuple[str, ...] = option(
        (), "answer files of --method opt, best at several --nodes: advise by them", type=str, nargs="+"
    )
    nodes: str | None = option(
        None, "comma list of budgets, or auto among them: decode with them, instead of measuring forwards"
    )
    lanes: str | None = option(
        None, "comma list: decode the questions plainly, with --nodes and by transformers, so many side by side"
    )
    shared: bool = option(False, "with --lanes: also share the nodes of --nodes over all lanes, at one price of a node")
    thresholds: str = option("0.2", "with --nodes: comma list, each tried at each budget")
    max_new_tokens: int = option(96, "with --nodes: new tokens a question, at most")
    assistant: str | None = option(
        None, "with --nodes: causal LM that assists transformers; by default the draft model, or the embedded one"
    )
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, repeats=1, max_new_tokens=1)
        if self.shared and not (self.lanes and self.nodes):
            raise ValueError("--shared shares the --nodes of several --lanes: name both")
        if self.lanes and min(whole_numbers(self.lanes, MOST_LANES)) < 1:
            raise ValueError(f"--lanes must be at least 1 each, got {self.lanes}")
        for name in ("tokens", "contexts"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {min(getattr(self, name))}")


def take(options: Options) -> dict[str, Any]:
    """Load the models and measure their forwards."""
    pair = load(options, check_device(options))
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
    measured = measure(probes, fitting, tokens, options.repeats, options.patience)
    return {
        "models": {
            "target": describe(pair.target.model, pair.drafter) or f"target {pair.target.name}, {pair.target.size}",
            "drafter": pair.drafter.describe(),
            "base_model_path": options.base_model_path,
            "inflate": options.inflate,
            **resolved(pair),
        },
        "environment": environment(pair.target.device),
        "cells": [asdict(one) for one in measured],
    }


def read_measured(path: str) -> dict[str, Any]:
    """Read a file that this command wrote."""
    try:
        measured = json.loads(Path(path).expanduser().read_text())
        forward_times(measured)
        measured["models"], measured["environment"]["device"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a measurement of this command: {error}") from error
    return measured


def forwards(options: Options) -> dict[str, Any]:
    """Measure forwards or read them, print the table, draw it, and advise; return the figures."""
    for file in options.answers:
        Acceptance.of(read_timed(file).answers, file)  # before minutes of measuring
    if options.measured:
        measured = read_measured(options.measured)
    else:
        output = Path(options.output).expanduser()
        with output.open("a"):  # likewise
            pass
        measured = take(options)
        output.write_text(json.dumps(measured, indent=1) + "\n")
    models, place = measured["models"], measured["environment"]
    title = f"{models['target']}; drafter {models['drafter']}; {place['device']}, {place['threads']} threads"
    print(title, "milliseconds of a forward, medians:", forwards_table(forward_times(measured)), sep="\n")
    if options.plot:
        from evaluation.latency.plots import draw  # matplotlib only where a plot is asked for

        draw(forward_times(measured), title.replace("; ", ";\n"), Path(options.plot).expanduser())
    summary: dict[str, Any] = {"measured": options.measured or options.output, "plot": options.plot}
    if not options.answers:
        return summary
    advice, notes = recommend(measured, options.answers)
    print(f"\n{advice_table(advice)}", *(f"- {note}" for note in notes), f"\n{advice.flags}", sep="\n")
    speeds = {"tokens_per_second": advice.best.rate, "speedup": advice.best.rate / advice.plain_rate}
    best = asdict(advice.best) | speeds
    return summary | {"flags": advice.flags, "threshold": advice.threshold, "best": best, "notes": notes}


def decode(options: Options) -> dict[str, Any]:
    """Decode the questions' first turns with every budget and threshold, print the table and return its rows."""
    budgets = options.nodes.split(",") if options.nodes else []
    fixed = [budget for budget in budgets if budget != AUTO]
    sizes = whole_numbers(",".join(fixed), MOST_NODES) if fixed else ()
    pairs = [(n, t) for n in sizes for t in numbers(options.thresholds)]
    trees: dict[str, TreePolicy | Controller] = {f"OPT-Tree {n}/{t:g}": OptTree(n, t) for n, t in pairs}
    if options.shared:
        trees |= {f"shared {n}/{t:g}": Shared(n, t, most=8 * n) for n, t in pairs}
    given = gather(options)
    pair, prompts = given.pair, given.first_prompts()
    if AUTO in budgets:
        trees[AUTO] = auto(pair.target, pair.drafter)
    if options.lanes:
        lanes = list(whole_numbers(options.lanes))
        rows, beside = batches.measure(pair, trees, prompts, options.max_new_tokens, lanes), []
    else:
        assistant = load_assistant(options, options.assistant, pair)
        timings = decoding.measure(pair, trees, prompts, options.max_new_tokens, assistant)
        rows, beside = decoding.overview(timings), decoding.beside_grid(timings)
    place = environment(pair.target.device)
    target = describe(pair.target.model, pair.drafter) or f"target {pair.target.name}, {pair.target.size}"
    print(f"{target}; drafter {options.drafter}; {place['device']}, {place['threads']} threads")
    asked = f"{len(prompts)} questions of {given.questions.name}"
    print(f"{asked}, greedy, {options.max_new_tokens} new tokens at most, in turn")
    print(table(rows))
    if beside:
        print(table(beside))
    return {"environment": place, "rows": rows, "auto": beside}


def run(options: Options) -> dict[str, Any]:
    return (decode if options.nodes or options.lanes else forwards)(options)


main = main_of("latency", Options, __doc__, run)
