"""Read answer files and say how fast they were written, how much was accepted, and whether the text is the baseline's.

    python -m evaluation.report a.jsonl [more.jsonl] [--baseline b.jsonl] [--plots DIR]

Reads Spec-Bench's files too, as far as they go. `--json` prints all figures as one line, the last one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.file import AnswerSet, read_timed
from evaluation.answers.metrics import by_category, ratio, speed_up, summary
from evaluation.answers.steps import acceptance_by_depth, by_position, calibration, step_time, steps_of
from evaluation.command_line import make_parser, print_json, run_command
from evaluation.report.text import print_details, print_heads, print_overview


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


def print_report(
    paths: Sequence[str | Path], baseline: str | Path | None, plots: str | Path | None = None
) -> dict[str, Any]:
    """Print tables of all files, draw the plots, return the figures. Raises ValueError and OSError for bad files."""
    base = None if baseline is None else read_timed(baseline)
    runs = [read_timed(path) for path in paths]
    if base is not None and all(run.path.resolve() != base.path.resolve() for run in runs):
        runs.append(base)
    others = [run for run in runs if base is None or run.path.resolve() != base.path.resolve()]
    reports = {run.path: figures_of(run, base) for run in runs}
    print_heads(runs)
    print_overview([(run.name, reports[run.path]["overall"]) for run in runs])
    for other in runs[1:]:
        if base is not None and other in others:
            over = speed_up(runs[0].answers, other.answers)
            reports[runs[0].path].setdefault("speed_up_over", {})[other.name] = over
            if over is not None:
                print(f"{runs[0].name} is {ratio(over)} times as fast as {other.name}")
    for run in others or runs:
        print_details(run, reports[run.path], base)
    if plots is not None:
        from evaluation.report.plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all(runs, Path(plots)):
            print(f"drawn: {path}")
    return next(iter(reports.values())) if len(reports) == 1 else {"reports": list(reports.values())}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 for files that cannot be read."""

    def command() -> int:
        parser = make_parser("python -m evaluation.report", __doc__)
        parser.add_argument("answers", nargs="+", help="answer files")
        parser.add_argument(
            "--baseline", help="answer file to compare with, such as a.plain.jsonl of a run with --baseline"
        )
        parser.add_argument("--plots", metavar="DIR", help="draw the plots into this folder")
        parser.add_argument("--json", action="store_true", help="print all figures as one JSON line, too")
        options: argparse.Namespace = parser.parse_args(arguments)
        print_json(options.json, print_report(options.answers, options.baseline, options.plots))
        return 0

    return run_command(command)
