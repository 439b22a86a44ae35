"""Read answer files and say how fast they were written, how much was accepted, and whether the text is the baseline's.

    python -m evaluation.report a.jsonl [more.jsonl] [--baseline b.jsonl] [--plots DIR] [--format csv|latex|markdown]
    python -m evaluation.report compare.jsonl

Parts that several processes left beside a file are taken into it. Reads the output of `evaluation.compare`, a line for
each combination, and Spec-Bench's files, as far as they go. `--json` prints all figures as one line, the last one.
"""

import sys

from evaluation.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 for files that cannot be read."""
    parser = Parser("python -m evaluation.report", __doc__)
    parser.add_argument("answers", nargs="+", help="answer files")
    parser.add_argument(
        "--baseline", help="answer file to compare with; by default a.plain.jsonl, where a run with --baseline left it"
    )
    parser.add_argument("--plots", metavar="DIR", help="draw the plots into this folder")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON line, too")
    parser.add_argument(
        "--format", choices=("csv", "latex", "markdown"), help="print all figures as one table: a line a category"
    )
    return run_command(lambda: work_of("evaluation.report:run")(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.answers import comparison
from evaluation.answers.file import AnswerFile, Busy, Record
from evaluation.answers.frames import Labelled, figures_frame, formatted
from evaluation.answers.metrics import number, percent, ratio, row, speed_up, summary, with_interval
from evaluation.answers.reading import ASKED, ROUNDING, AnswerSet, read_timed, settings_apart
from evaluation.answers.steps import acceptance_by_depth, alone, by_position, calibration, step_time, steps_of
from evaluation.command_line import Value, counted, machine_of, print_json, table

if TYPE_CHECKING:
    from pandas import DataFrame


def figures_of(run: AnswerSet, baseline: AnswerSet | None) -> dict[str, Any]:
    """Every figure of one file, as a JSON object."""
    base = None if baseline is None else baseline.answers
    taken = steps_of(run.answers)
    figures: dict[str, Any] = {
        "file": str(run.path),
        "settings": run.settings or None,
        "target": run.session.get("target"),
        "environment": run.session.get("environment"),
        "failed": len(run.failed),
        "overall": summary(run.answers, base),
        "categories": {name: summary(answers, base) for name, answers in by_category(run.answers).items()},
        "acceptance_by_depth": None if taken is None else acceptance_by_depth(taken),
        "calibration": None if taken is None else calibration(taken),
        "by_position": by_position(run.answers),
        "step_milliseconds": step_time(run.answers),
    }
    if baseline is not None:
        figures["baseline"] = str(baseline.path)
    return figures


def by_category(answers: Sequence[Record]) -> dict[str, list[Record]]:
    """Answers of each category, in order of first appearance; one category is no division."""
    groups: dict[str, list[Record]] = {}
    for answer in answers:
        groups.setdefault(str(answer.get("category", "all")), []).append(answer)
    return groups


def read_runs(paths: Sequence[str | Path], baseline: str | Path | None) -> tuple[list[AnswerSet], AnswerSet | None]:
    """Read answer files and their baseline, which is the last of them unless it is one of the paths."""
    runs = [read_timed(path) for path in paths]
    if baseline is None:
        return runs, None
    base = next((run for run in runs if run.path.resolve() == AnswerFile(baseline).path.resolve()), None)
    if base is None:
        runs.append(base := read_timed(baseline))
    return runs, base


def plain_beside(paths: Sequence[str | Path]) -> Path | None:
    """The plain decoding that a run with --baseline left beside its answers, where no other baseline is named."""
    stems = {str(AnswerFile(path).path).removesuffix(".jsonl") for path in paths}
    found = [plain for stem in sorted(stems) if (plain := Path(f"{stem}.plain.jsonl")).is_file()]
    return found[0] if len(found) == 1 else None


def print_report(
    paths: Sequence[str | Path], baseline: str | Path | None, plots: str | Path | None = None
) -> dict[str, Any]:
    """Print tables of all files, draw the plots, return the figures. Raises ValueError and OSError for bad files."""
    runs, base = read_runs(paths, baseline or plain_beside(paths))
    for run in runs:
        if base is not None and (apart := settings_apart(run, base, (*ASKED, "max_new_token", *ROUNDING))):
            print(f"note: {run.name} and its baseline differ in {'; '.join(apart)}", file=sys.stderr)
    others = [run for run in runs if run is not base]
    reports = {run.path: figures_of(run, base) for run in runs}
    print_heads(runs)
    print(table([row(run.name, reports[run.path]["overall"]) for run in runs]))
    for other in runs[1:]:
        if base is not None and other in others:
            over = speed_up(runs[0].answers, other.answers)
            reports[runs[0].path].setdefault("speed_up_over", {})[other.name] = over
            if over is not None:
                print(f"{runs[0].name} is {ratio(over)} times as fast as {other.name}")
    for run in others or runs:
        print_details(run, reports[run.path], base)
    _draw(runs, plots)
    return next(iter(reports.values())) if len(reports) == 1 else {"reports": list(reports.values())}


def _draw(runs: Sequence[AnswerSet], plots: str | Path | None) -> None:
    if plots is not None:
        from evaluation.answers.plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all(runs, Path(plots)):
            print(f"drawn: {path}", file=sys.stderr)


def figures(*files: str | Path, baseline: str | Path | None = None) -> "DataFrame":
    """Read answer files, or files of `evaluation.compare`, into a row of figures for each category and for all.

    Columns: file, category (of a comparison what is combined, instead), and every figure of the report by name. With a
    baseline's file, whose rows come last, also speed_up (micro), its 95 % interval (speed_up_low, speed_up_high),
    same_text.

        evaluation.figures("a.jsonl", baseline="a.plain.jsonl").to_latex()

    Raises ValueError and OSError for files that cannot be read.
    """
    rows: list[Labelled] = []
    baseline = baseline or plain_beside(files)
    answers, base = read_runs([path for path in files if not comparison.is_comparison(path)], baseline)
    for run in answers:
        groups = by_category(run.answers)
        for category, group in [*groups.items(), ("all", run.answers)] if len(groups) > 1 else [("all", run.answers)]:
            rows.append(({"file": run.name, "category": category}, summary(group, base and base.answers)))
    for path in filter(comparison.is_comparison, files):
        rows += comparison.rows_of(path)
    return figures_frame(rows)


# A comparison.


def print_comparison(path: str | Path) -> dict[str, Any]:
    """Print a table for each temperature and budget, and one of transformers' ways; return their figures.

    Raises ValueError for a file that `evaluation.compare` did not write.
    """
    records, header = comparison.read(path), AnswerFile(path).header()
    with comparison.as_written(path):
        lines = comparison.summarise([record for record in records if "cell" in record])
        peers = [
            {"name": name, "temperature": record["temperature"], **summary(answers, record["peers"][comparison.PLAIN])}
            for record in records
            for name, answers in record.get("peers", {}).items()
        ]
        print(_blocks(lines, peers, header))
        return {"file": str(path), "cells": lines, "peers": peers}


def _blocks(
    lines: Sequence[Mapping[str, Any]], peers: Sequence[dict[str, Any]], header: Mapping[str, Any] | None
) -> str:
    """The tables for people."""
    blocks = []
    if header is not None and header["sessions"]:
        place = header["sessions"][-1].get("environment", {})
        machine = f"{machine_of(place)}, torch {place.get('torch')}"
        blocks.append(f"{machine}, target {header['settings'].get('target_dtype')}; 95 % intervals over questions")
    for (temperature, budget), group in groupby(lines, key=lambda line: (line["temperature"], line["budget"])):
        members = list(group)
        asked = counted(members[0]["questions"], "question")
        head = f"temperature {temperature:g}, at most {counted(budget, 'node')}, {asked}:"
        blocks.append(f"{head}\n{table([_combination_row(line) for line in members])}")
    for temperature, ways in groupby(peers, key=lambda peer: peer["temperature"]):
        rows = [row(peer["name"], peer) for peer in ways]
        blocks.append(f"temperature {temperature:g}, plain decoding and transformers in turn:\n{table(rows)}")
    return "\n\n".join(blocks)


_FOLLOW = ("greedy", "match")
"""What follows the target's own text down the tree: its path ends where the target leaves the tree."""


def _combination_row(line: Mapping[str, Any]) -> dict[str, Value]:
    speed, promise = line["speed_up"], line["promise"]
    # Of equal siblings, drawn independently, at most one can be accepted: their sum is no expectation.
    promised = line["children"] != "IID"
    known: dict[str, Value] = {
        "drafter": line["drafter"],
        "tree": line["policy"],
        "children": line["children"],
        "verifier": line["verifier"],
        "sharpening": line["sharpening"],
        "tokens/step": with_interval(line["tokens_per_step"], line["interval"]),
        "block efficiency": line["block_efficiency"].get(line["verifier"]),
        "ceiling": line["ceiling"],
        "left at last layer": percent(line["left_at_last_layer"]) if line["verifier"] in _FOLLOW else None,
        "E(A)+1": line["expected_length"] if promised else None,
        "E(A)/A": with_interval(promise["ratio"], promise["interval"]) if promised and promise else None,
        "draft forwards": line["draft_forwards_per_step"],
        "draft tokens": f"{line['draft_tokens_per_step']:.0f}",
        "draft ms": line.get("draft_ms_per_step"),
        "verified": f"{line['verified_tokens_per_step']:.1f}",
        "tokens/s": f"{line['tokens_per_second']:.0f}" if speed else None,  # of a batch nobody knows it
        "speed-up": ratio(speed),
        "= plain": "{}/{}".format(*line["same_as_plain"]) if line["verifier"] == "greedy" else None,
    }
    for sharpening in comparison.SHARPENING:  # all of them in each row: columns have one order in every table
        minus = line["minus_opt"].get(sharpening)
        known[f"minus opt, {sharpening}"] = minus and with_interval(minus["difference"], minus["interval"], "+")
    for key, (head, unit) in comparison.SIZES.items():
        known[head] = "" if line.get(key) is None else f"{line[key] / unit:.1f}"
    return known


# Answers in words.

_LEAST_STEPS = 20


def print_heads(runs: Sequence[AnswerSet]) -> None:
    """Say once what was measured where."""
    heads = dict.fromkeys(
        f"{run.session.get('target')}, {run.settings.get('target_dtype')}; "
        f"{machine_of(run.session.get('environment', {}))}"
        for run in runs
        if run.session
    )
    if heads:
        print(*heads, sep="\n")


def print_details(run: AnswerSet, figures: dict[str, Any], base: AnswerSet | None) -> None:
    """Categories, failures, divergences, acceptance, calibration and time of one file."""
    print()
    if not alone(run.answers):
        print(f"{run.name}: questions were decoded side by side; its times are a batch's, hence no speed is shown")
    if len(figures["categories"]) > 1:
        named = [*figures["categories"].items(), ("all", figures["overall"])]
        print(table([row(name, found, run.name) for name, found in named]))
    if run.failed:
        failed = ", ".join(str(record["question_id"]) for record in run.failed)
        print(f"{counted(len(run.failed), 'question')} failed, in no figure: {failed}")
    if base is not None:
        _print_match(figures["overall"]["exact_match"], run, base)
    depths = figures["acceptance_by_depth"]
    if depths:
        rates = (f"{one['depth']}: {percent(one['reach' if one['drafted'] is None else 'rate'])}" for one in depths)
        print("acceptance by depth (of the steps that drafted it): " + "  ".join(rates))
    _print_positions(figures["by_position"])
    _print_calibration(figures["calibration"], run)
    times = figures["step_milliseconds"]
    if times:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in times.items() if value >= 0.005)
        print(f"a step takes {sum(times.values()):.2f} ms: {parts}")


def _print_positions(blocks: Sequence[dict[str, Any]]) -> None:
    """Say how steps change as the context grows, where it grows far enough to tell."""
    blocks = [block for block in blocks if block["steps"] >= _LEAST_STEPS]
    if len(blocks) > 1:
        told = (
            f"{block['context_up_to']}: {number(2)(block['tokens_per_step'])}"
            + (f" ({number(1)(block['tokens_per_second'])}/s)" if block["tokens_per_second"] else "")
            for block in blocks
        )
        print("tokens a step (a second) while the context is up to so many tokens: " + "  ".join(told))


def _print_match(match: dict[str, Any], run: AnswerSet, base: AnswerSet) -> None:
    if match["rate"] is None:
        return
    line = f"{match['equal']} of {counted(match['compared'], 'turn')} ({percent(match['rate'])})"
    line = f"exact match of {run.name} with {base.name}: {line}"
    if match["other_prompt"]:
        line += f"; {match['other_prompt']} more had another prompt, because an earlier turn differed"
    print(line)
    if any(where["unit"] == "token" for where in match["divergences"]):
        print(f"  why they differ: python -m evaluation.exactness {run.path} {base.path}")


def _print_calibration(figures: dict[str, Any] | None, run: AnswerSet) -> None:
    if figures is None:
        return
    follows = "the same at every step"
    if figures["pearson"] is not None:
        follows = (
            f"slope {figures['slope']:.2f} (standard error {figures['slope_error']:.2f}), Pearson "
            f"{number(2)(figures['pearson'])}, Spearman {number(2)(figures['spearman'])}"
        )
    print(
        f"E(A) + 1 was {figures['expected_length']:.2f}, A + 1 came to {figures['accepted_length']:.2f}: {follows}, "
        f"over {figures['steps']} untrimmed steps"
    )
    if not figures["miscalibrated"]:
        return
    what = {"slope": "the slope is far from 1", "mean": "the means are far apart"}
    wrong = " and ".join(what[name] for name in figures["miscalibrated"])
    fit = "python -m opt_tree.training.fitting.calibrate fits it on prompts like these"
    if run.settings.get("temperature", 0) > 0:
        fit = "above temperature 0 it is used as it is, a fitted temperature serves greedy decoding only"
    print(f"the drafter is miscalibrated: {wrong}; {fit}")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for of these files."""
    for file in map(AnswerFile, options.answers):
        if file.parts():
            with suppress(Busy):  # what is being written is read as far as it goes
                file.join()
    if options.format is not None:
        if options.json:
            raise ValueError("--format is a table by itself: leave out --json")
        print(formatted(figures(*options.answers, baseline=options.baseline), options.format).rstrip("\n"))
        _draw([read_timed(path) for path in options.answers if not comparison.is_comparison(path)], options.plots)
        return 0
    compared = [path for path in options.answers if comparison.is_comparison(path)]
    others = [path for path in options.answers if path not in compared]
    found = [print_comparison(path) for path in compared]
    if others:
        found.append(print_report(others, options.baseline, options.plots))
    print_json(options.json, found[0] if len(found) == 1 else {"reports": found})
    return 0
