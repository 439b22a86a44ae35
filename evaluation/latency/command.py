"""Milliseconds of a forward against the tokens in it, and the node budget and threshold that this machine should use.

    python -m evaluation.latency [--plot latency.png] [--answers a.jsonl ...]

Measures target and drafter as decoding runs them (`evaluation.forwards`). With answer files, prints flags for the
evaluation commands (`evaluation.budget`). The file it writes can be read again (`--measured`) for other answers.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from evaluation.answers.file import AnswerSet
from evaluation.latency.budget import Acceptance, Advice, Law, Outside, advise
from evaluation.latency.forwards import Cell, Probe, curve, draw, measure
from evaluation.report.command import read_timed
from evaluation.run.machine import environment
from evaluation.run.models import check_device, load, resolved
from evaluation.run.options import Machine, Options, add_models, add_options, run_command
from evaluation.run.processes import Crew
from opt_tree import CausalLM, Sharpened
from opt_tree.inflate import describe

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (128, 512, 1024)


def recommend(measured: dict[str, Any], files: Sequence[str]) -> tuple[Advice, list[str]]:
    """Put a measurement and answer files together; also return what the advice assumes."""
    runs = [read_timed(file) for file in files]
    law = Law(tuple(Acceptance.of(run.answers, str(run.path)) for run in runs))
    cells = [Cell(**cell) for cell in measured["cells"]]
    usual = statistics.fmean(
        len(prompt) + len(answer) / 2
        for run in runs
        for record in run.answers
        for choice in record["choices"]
        for prompt, answer in zip(choice.get("prompt_ids", []), choice.get("token_ids", []), strict=True)
    )
    context = min({cell.context for cell in cells}, key=lambda context: abs(context - usual))
    apart = sorted({difference for run in runs for difference in elsewhere(run, measured)})
    outside: Outside = "ignored" if apart else "remainder" if measured["environment"]["cuda"] else "timed"
    advice = advise(law, curve(cells, "target", context), curve(cells, "drafter", context), outside)
    tried = ", ".join(f"{one.nodes:.0f}" for one in law.measured)
    notes = [
        f"latency behind {context} tokens of context (the answers' mean is {usual:.0f})",
        f"tokens a step and draft layers were measured at {tried} nodes; between and beyond, linear in log2(nodes + 1)",
        "a layer that raises E(A) by just the threshold brings what its time is worth at the best budget's speed; one "
        f"unit of E(A) brought {law.calibration():.2f} accepted tokens in these answers",
        f"predicted at {law.measured[0].nodes:.0f} nodes: {advice.own.rate:.1f} tokens/s, measured "
        f"{law.measured[0].rate:.1f}",
        "another threshold changes how many layers are drafted: answer with the flags, then ask again, until they stay",
    ]
    if apart:
        notes.append(
            f"the answers come from elsewhere ({'; '.join(apart)}): only their acceptance is used, and what a step "
            "takes outside the two models' forwards is not counted"
        )
    elif not 0.8 < (drift := advice.own.rate / law.measured[0].rate) < 1.25:
        notes.append(
            f"this machine now seems to run at {drift:.2f} times the speed it had when it answered; the advice holds "
            "as far as everything slowed alike: measure again while nothing else runs"
        )
    return advice, notes


def elsewhere(run: AnswerSet, measured: dict[str, Any]) -> list[str]:
    """Name what differs between an answer file's run and the measurement, of all that changes times."""
    if run.header is None:
        return [f"{run.path} has no header"]
    there = {**run.session.get("environment", {}), **run.header["settings"]}
    here = {**measured["environment"], **measured["models"]}
    keys = ("device", "threads", "torch", "target_dtype", "draft_dtype", "inflate", "base_model_path")
    # Both the settings and the environment know a device: the settings' is its kind, the environment's its name.
    there["device"] = run.session.get("environment", {}).get("device")
    here["device"] = measured["environment"]["device"]
    return [f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys if there.get(key) != here.get(key)]


def table(cells: Sequence[Cell]) -> str:
    """Milliseconds, a line for each number of tokens, a column for each model and context."""
    columns = list(dict.fromkeys((cell.model, cell.context) for cell in cells))
    columns.sort(key=lambda column: (column[0] != "target", column[1]))
    ms = {(cell.model, cell.context, cell.tokens): cell.ms for cell in cells}
    lines = [["tokens", *(f"{model} @{context}" for model, context in columns)]]
    for count in sorted({cell.tokens for cell in cells}):
        values = (ms.get((model, context, count)) for model, context in columns)
        lines.append([str(count), *("" if value is None else f"{value:.2f}" for value in values)])
    return align(lines)


def advice_table(advice: Advice) -> str:
    """One line a budget, the best one marked."""
    lines = [["nodes", "tokens/step", "draft layers", "layer ms", "step ms", "tokens/s", "x plain", ""]]
    for choice in advice.choices:
        mark = " best" if choice == advice.best else ""
        mark += " (beyond the answers)" if choice.extrapolated else ""
        lines.append(
            [
                str(choice.nodes),
                f"{choice.length:.2f}",
                f"{choice.layers:.2f}",
                f"{1000 * choice.layer_seconds:.2f}",
                f"{1000 * choice.step_seconds:.2f}",
                f"{choice.rate:.1f}",
                f"{choice.rate / advice.plain_rate:.2f}",
                mark.strip(),
            ]
        )
    return align(lines)


def align(lines: Sequence[Sequence[str]]) -> str:
    """Right-align the columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def take(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the models and measure them."""
    for name, values in (
        ("--tokens", arguments.tokens),
        ("--contexts", arguments.contexts),
        ("--repeats", [arguments.repeats]),
    ):
        if min(values) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(values)}")
    kind = "eagle" if arguments.ea_model_path else "classic"
    options = Options(
        base_model_path=arguments.base_model_path,
        draft_model_path=arguments.draft_model_path,
        ea_model_path=arguments.ea_model_path or "demo",
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        inflate=arguments.inflate,
    )
    device = check_device(options, Crew())
    options.set_threads(torch.device(device))
    pair = load(kind, options, device)
    drafter = pair.drafter.drafter if isinstance(pair.drafter, Sharpened) else pair.drafter
    probes = [Probe("target", pair.target), Probe("drafter", drafter.lm, bool(drafter.features))]  # type: ignore[attr-defined]
    tokens, contexts = sorted(set(arguments.tokens)), sorted(set(arguments.contexts))
    fitting = [context for context in contexts if probes[0].fits(context, 1)]
    if not fitting:
        raise ValueError(
            f"--contexts {min(contexts)} and one token more are beyond the target's {pair.target.max_context}"
        )
    cells = measure(probes, fitting, tokens, arguments.repeats, arguments.patience)
    return {
        "models": {
            "target": describe(pair.target.model, pair.drafter) or f"target {size(pair.target)}",
            "drafter": size(drafter.lm),  # type: ignore[attr-defined]
            "base_model_path": options.base_model_path,
            "inflate": options.inflate,
            **resolved(pair),
        },
        "environment": environment(pair.target.device),
        "cells": [asdict(cell) for cell in cells],
    }


def size(lm: CausalLM) -> str:
    """Name, parameters and dtype of a model."""
    count = sum(parameter.numel() for parameter in lm.model.parameters())
    return f"{lm.name}, {count / 1e6:.1f}M, {str(lm.dtype).removeprefix('torch.')}"


def read_measured(path: str) -> dict[str, Any]:
    """Read a file that this command wrote."""
    try:
        measured = json.loads(Path(path).expanduser().read_text())
        [Cell(**cell) for cell in measured["cells"]]
        measured["models"], measured["environment"]["device"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a measurement of this command: {error}") from error
    return measured


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, draw, advise. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.latency",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add_models(parser)
    add("--dtype", default="auto", help="of the target: auto, float32, bfloat16, float16")
    add_options(parser, Machine)
    add("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="N", help="tokens in a forward")
    add("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="committed tokens before it")
    add("--repeats", type=int, default=30, help="of every size, after a warm-up")
    add("--patience", type=float, default=5.0, help="seconds after which a size is not repeated further")
    add("--measured", help="read this file of an earlier run instead of measuring")
    add("--output", default="latency.json", help="where the measurement goes")
    add("--plot", help="draw it to this file (.png, .pdf, .svg)")
    add(
        "--answers", nargs="+", default=[], help="answer files of --method opt, best at several --nodes: advise by them"
    )
    return run_command(parser, run, arguments)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for."""
    for file in arguments.answers:
        Acceptance.of(read_timed(file).answers, file)  # before minutes of measuring
    if arguments.measured:
        measured = read_measured(arguments.measured)
    else:
        output = Path(arguments.output).expanduser()
        with output.open("a"):  # likewise
            pass
        measured = take(arguments)
        output.write_text(json.dumps(measured, indent=1) + "\n")
    models, place = measured["models"], measured["environment"]
    title = f"{models['target']}; drafter {models['drafter']}; {place['device']}, {place['threads']} threads"
    cells = [Cell(**cell) for cell in measured["cells"]]
    print(title)
    print("milliseconds of a forward, medians:")
    print(table(cells))
    if arguments.plot:
        draw(cells, title.replace("; ", ";\n"), Path(arguments.plot).expanduser())
    summary: dict[str, Any] = {"measured": arguments.measured or arguments.output, "plot": arguments.plot}
    if arguments.answers:
        advice, notes = recommend(measured, arguments.answers)
        print(f"\n{advice_table(advice)}")
        for note in notes:
            print(f"- {note}")
        print(f"\n{advice.flags}")
        best = asdict(advice.best) | {
            "tokens_per_second": advice.best.rate,
            "speedup": advice.best.rate / advice.plain_rate,
        }
        summary |= {"flags": advice.flags, "threshold": advice.threshold, "best": best, "notes": notes}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
