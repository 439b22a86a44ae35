"""Read answer files and say how fast they were written, how much was accepted, and whether the text is the baseline's.

    python -m evaluation.report a.jsonl [more.jsonl] [--baseline b.jsonl] [--plots DIR]

Prints tables for people and, last, one JSON line for machines. Reads Spec-Bench's files too, as far as they go.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers import metrics
from evaluation.answers.file import AnswerSet, Record
from evaluation.run.options import run_command

_SHOWN_DIVERGENCES = 5


def read_timed(path: str | Path) -> AnswerSet:
    """Read an answer file; ValueError where a line lacks tokens and times."""
    return AnswerSet.read(path).require(("turns", "new_tokens", "wall_time"), "nothing to report")


def report(run: AnswerSet, baseline: AnswerSet | None) -> dict[str, Any]:
    """Every figure of one file, as a JSON object."""
    groups = metrics.by_category(run.answers)
    taken = metrics.steps(run.answers)
    figures: dict[str, Any] = {
        "file": str(run.path),
        "settings": run.settings or None,
        "target": run.session.get("target"),
        "environment": run.session.get("environment"),
        "failed": len(run.failed),
        "overall": compare(run.answers, baseline),
        "categories": {name: compare(answers, baseline) for name, answers in groups.items()},
        "acceptance_by_depth": None if taken is None else metrics.acceptance_by_depth(taken),
        "calibration": None if taken is None else metrics.calibration(taken),
        "step_milliseconds": metrics.step_time(run.answers),
    }
    if baseline is not None:
        figures["baseline"] = str(baseline.path)
    return figures


def compare(answers: Sequence[Record], baseline: AnswerSet | None) -> dict[str, Any]:
    """A summary and, with a baseline, speed-up and exact match on the questions both answered."""
    figures = metrics.summary(answers)
    if baseline is not None:
        figures["speed_up"] = metrics.speed_up(answers, baseline.answers)
        figures["exact_match"] = metrics.exact_match(answers, baseline.answers)
    return figures


def print_report(paths: Sequence[str | Path], baseline: str | Path | None, plots: str | Path | None = None) -> None:
    """Print tables of all files, the JSON line, and draw the plots. Raises ValueError and OSError for bad files."""
    base = None if baseline is None else read_timed(baseline)
    runs = [read_timed(path) for path in paths]
    if base is not None and all(run.path.resolve() != base.path.resolve() for run in runs):
        runs.append(base)
    reports = [report(run, base) for run in runs]
    _print_heads(runs)
    print(table([(run.name, figures["overall"]) for run, figures in zip(runs, reports, strict=True)]))
    for other in runs[1:]:
        if base is not None and other.path.resolve() != base.path.resolve():
            over = metrics.speed_up(runs[0].answers, other.answers)
            reports[0].setdefault("speed_up_over", {})[other.name] = over
            print(f"{runs[0].name} is {_ratio({'speed_up': over})} times as fast as {other.name}")
    for run, figures in zip(runs, reports, strict=True):
        if base is not None and run.path.resolve() == base.path.resolve() and len(runs) > 1:
            continue
        _print_details(run, figures, base)
    if plots is not None:
        from evaluation.report.plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all(runs, Path(plots)):
            print(f"drawn: {path}")
    print(json.dumps(reports[0] if len(reports) == 1 else {"reports": reports}))


def _print_heads(runs: Sequence[AnswerSet]) -> None:
    """Say once what was measured where."""
    seen = set()
    for run in runs:
        if not run.session:
            continue
        place = run.session["environment"]
        dtype = run.settings.get("target_dtype")
        head = f"{run.session['target']}, {dtype}; {place['device']}, {place['threads']} threads"
        if head not in seen:
            seen.add(head)
            print(head)


def _print_details(run: AnswerSet, figures: dict[str, Any], base: AnswerSet | None) -> None:
    """Categories, failures, divergences, acceptance, calibration and time of one file."""
    print()
    if len(figures["categories"]) > 1:
        print(table([*figures["categories"].items(), ("all", figures["overall"])], run.name))
    if run.failed:
        failed = ", ".join(str(record["question_id"]) for record in run.failed)
        print(f"{len(run.failed)} questions failed and are in no figure: {failed}")
    if base is not None:
        _print_match(figures["overall"]["exact_match"], base)
    depths = figures["acceptance_by_depth"]
    if depths:
        print("acceptance by depth (of the steps that drafted it): " + _by_depth(depths))
    _print_calibration(figures["calibration"], run)
    times = figures["step_milliseconds"]
    if times:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in times.items() if value >= 0.005)
        print(f"a step takes {sum(times.values()):.2f} ms: {parts}")


def _by_depth(depths: Sequence[dict[str, Any]]) -> str:
    return "  ".join(
        f"{row['depth']}: {_percent(row['rate'] if row['drafted'] is not None else row['reach'])}" for row in depths
    )


def _print_match(match: dict[str, Any], base: AnswerSet) -> None:
    if match["rate"] is None:
        return
    line = f"exact match with {base.name}: {match['equal']} of {match['compared']} turns ({_percent(match['rate'])})"
    if match["other_prompt"]:
        line += f"; {match['other_prompt']} more had another prompt, because an earlier turn differed"
    print(line)
    for where in match["divergences"][:_SHOWN_DIVERGENCES]:
        ours, theirs = (json.dumps(text, ensure_ascii=False) for text in where["texts"])
        print(
            f"  question {where['question_id']}, choice {where['choice']}, turn {where['turn'] + 1}: first differs at "
            f"{where['unit']} {where['position']}: {ours} here, {theirs} there"
        )
    if len(match["divergences"]) > _SHOWN_DIVERGENCES:
        print(f"  and {len(match['divergences']) - _SHOWN_DIVERGENCES} more (all in the JSON line)")


def _print_calibration(figures: dict[str, Any] | None, run: AnswerSet) -> None:
    if figures is None:
        return
    print(
        f"E(A) + 1 was {figures['expected_length']:.2f}, A + 1 came to {figures['accepted_length']:.2f}: slope "
        f"{figures['slope']:.2f} (standard error {figures['slope_error']:.2f}), Pearson {_number(figures['pearson'])}, "
        f"Spearman {_number(figures['spearman'])}, over {figures['steps']} untrimmed steps"
    )
    if not figures["miscalibrated"]:
        return
    what = {"slope": "the slope is far from 1", "mean": "the means are far apart"}
    settings = run.settings
    stored = settings.get("sharpening")
    if settings.get("temperature", 0) > 0:
        advice = "above temperature 0 it is used as it is, a fitted temperature serves greedy decoding only"
    elif stored:
        advice = (
            f"its stored temperature {stored:.3g} was fitted elsewhere, fit it on prompts like these: {_fit(settings)}"
        )
    else:
        advice = f"fit it, and trees are chosen by what the target will say: {_fit(settings)}"
    print(f"the draft law is miscalibrated: {' and '.join(what[name] for name in figures['miscalibrated'])}; {advice}")


def _fit(settings: dict[str, Any]) -> str:
    """The command that fits the law of the drafter of a run."""
    command = "python -m opt_tree.training.calibrate"
    for option, key in (("target", "base_model_path"), ("drafter", "draft_model_path"), ("eagle", "ea_model_path")):
        if settings.get(key, "demo") != "demo" or (option == "eagle" and key in settings):
            command += f" --{option} {settings[key]}"
    return command


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(figures: dict[str, Any]) -> str:
    speed = figures.get("speed_up")
    if not speed:
        return "-"
    interval = speed["interval"]
    return f"{speed['micro']:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


_COLUMNS = [
    ("", lambda name, figures: name),
    ("questions", lambda name, figures: str(figures["questions"])),
    ("tokens", lambda name, figures: str(figures["new_tokens"])),
    ("tokens/step", lambda name, figures: _number(figures["tokens_per_step"])),
    ("nodes/step", lambda name, figures: _number(_minus_one(figures["verified_tokens_per_step"]), 1)),
    ("tokens/s", lambda name, figures: _number(figures["tokens_per_second"], 1)),
    ("decode only", lambda name, figures: _number(figures["decode_tokens_per_second"], 1)),
    ("speed-up [95 %]", lambda name, figures: _ratio(figures)),
    ("macro", lambda name, figures: _number((figures.get("speed_up") or {}).get("macro"))),
    ("same text", lambda name, figures: _percent((figures.get("exact_match") or {}).get("rate"))),
]


def _minus_one(value: float | None) -> float | None:
    return None if value is None else value - 1


def table(rows: Sequence[tuple[str, dict[str, Any]]], title: str = "") -> str:
    """Lay out summaries, a row each; columns that no row fills are left out."""
    columns = [[head, *(cell(name, figures) for name, figures in rows)] for head, cell in _COLUMNS]
    columns = [column for column in columns if any(cell not in ("-", "") for cell in column[1:])]
    columns[0][0] = title
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 for files that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("answers", nargs="+", help="answer files")
    parser.add_argument(
        "--baseline", help="answer file to compare with, such as a.plain.jsonl of a run with --baseline"
    )
    parser.add_argument("--plots", metavar="DIR", help="draw the plots into this folder")

    def report(options: argparse.Namespace) -> int:
        print_report(options.answers, options.baseline, options.plots)
        return 0

    return run_command(parser, report, arguments)


if __name__ == "__main__":
    sys.exit(main())
