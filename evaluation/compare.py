"""Which tree and which verifier are best for a pair and a node budget: every valid combination is one line.

    python -m evaluation.compare --policies opt:0.2,eagle2,sequoia,binary --budgets 25,60 --drafters draft,eagle
    python -m evaluation.compare --policies chains:3,dyspec --verifiers multi_round,traversal --temperatures 0.6,1
    python -m evaluation.compare --preset paper --plots figures

Goes on where a killed run stopped; combinations that would not be exact are listed as refused and not run. Mean
acceptance length (tokens/step) is mean(accepted + 1) over steps, the last one trimmed where the answer stops.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation import standings
from evaluation.answers import AnswerFile, Record
from evaluation.bench import Bench
from evaluation.cells import PRESETS, VERIFIERS, Cell, grid
from evaluation.environment import environment
from evaluation.options import add_options, option


@dataclass(frozen=True)
class Options:
    """What is compared, on what."""

    preset: str | None = option(None, "a ready list of cells instead of a grid", choices=tuple(PRESETS))
    quick: bool = option(False, "with --preset: fewer cells and questions")
    policies: str | None = option(None, "comma list of trees, parameters behind colons: opt:0.2,eagle2,kary:3,...")
    verifiers: str = option("match", "comma list: " + ", ".join(VERIFIERS))
    temperatures: str = option("0", "comma list; at 0 the judge is greedy")
    budgets: str = option("60", "comma list of nodes, at most that many each step")
    drafters: str = option("draft", "comma list of draft, eagle")
    laws: str = option("sharpened", "comma list of bare, sharpened: the drafter's law at temperature 0")
    lossy: bool = option(False, "allow verifiers that do not keep the target's law")
    base_model_path: str = option("demo", "target: a folder, a Hub id or 'demo', the embedded one")
    draft_model_path: str = option("demo", "independent draft model, likewise")
    ea_model_path: str = option("demo", "EAGLE head, likewise")
    bench_name: str = option("demo", "question set, as for evaluation.eval_opt_classic")
    question_file: str | None = option(None, "any JSONL with `turns` or `question`, instead of --bench-name")
    data_dir: str | None = option(None, "where question sets lie")
    conv_template: str | None = option(None, "FastChat's conversation of this name instead of the chat template")
    limit: int | None = option(None, "questions, from the first (default: 8, quick: 3)")
    max_new_tokens: int | None = option(None, "new tokens a question, at most (default: 64, quick: 32)")
    rates_questions: int | None = option(
        None, "questions from the set's end, not compared, to measure acceptance rates on (default: 8, quick: 3)"
    )
    expect_every: int = option(4, "compute the exact block efficiency on every so many steps; 0: never")
    dtype: str = option("auto", "of the target: auto, float32, bfloat16, float16")
    device: str | None = option(None, "by default cuda where there is one, else cpu")
    threads: int = option(1, "CPU threads")
    seed: int = option(0, "of sampling")
    output: str = option("compare.jsonl", "one JSON line a cell; its header and the measured rates lie beside it")
    overwrite: bool = option(False, "delete the output instead of going on with it")
    plots: str | None = option(None, "draw what the output has data for into this folder")

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_new_tokens", 1), ("rates_questions", 1), ("expect_every", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")

    @property
    def cells(self) -> list[Cell]:
        """What is asked for, valid or not."""
        if self.preset is not None:
            return PRESETS[self.preset](self.quick)
        if self.policies is None:
            return []
        temperatures, budgets = _numbers(self.temperatures, float), _numbers(self.budgets, int)
        policies, judges = self.policies.split(","), self.verifiers.split(",")
        return grid(policies, judges, temperatures, budgets, self.drafters.split(","), self.laws.split(","))


def _numbers(text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"not a comma list of numbers: {text!r}") from error


def run(options: Options) -> dict[str, Any]:
    """Measure what is not in the output yet; print the table and draw the plots; return the figures."""
    file, cells = AnswerFile(options.output), options.cells
    refusals = {cell: cell.refusal(options.lossy) for cell in cells}
    refused = _lines({cell: why for cell, why in refusals.items() if why is not None})
    valid = [cell for cell, why in refusals.items() if why is None]
    for line in refused:
        print(line["question_id"])
    if cells and not valid:
        raise ValueError("every combination asked for is refused")
    if not cells and not file.path.is_file():
        raise ValueError(f"nothing to do: name --policies or a --preset, or an --output that exists, not {file.path}")
    if valid:
        measure(options, valid, refused, file)
    records = [record for record in file.read() if "cell" in record]
    summary = standings.summarise(records)
    print(standings.text(summary, file.header()))
    if options.plots is not None:
        from evaluation.compare_plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all(records, Path(options.plots)):
            print(f"drawn: {path}")
    return {"output": str(file.path), "cells": list(map(standings.brief, summary)), "refused": refused}


def measure(options: Options, cells: Sequence[Cell], refused: Sequence[Record], file: AnswerFile) -> None:
    """Append a line for each cell that has none yet, on disk before the next one begins."""
    torch.set_num_threads(options.threads)
    bench = Bench(options, cells)
    file.check_writable()
    if options.overwrite:
        file.remove()
        bench.rates_file.remove()
    file.check_settings(bench.settings)
    session = {"environment": environment(bench.pair.target.device), "sharpening": bench.sharpening}
    for different in file.write_header(bench.settings, session | {"arguments": dataclasses.asdict(options)}):
        print(f"warning: other cells of {file.path} were measured elsewhere: {different}", file=sys.stderr)
    for known in (file, bench.rates_file):
        known.fold([])  # drops what a death left half-written
    done = {record["question_id"] for record in file.read()}
    for line in refused:
        if line["question_id"] not in done:
            file.append(line)
    left = [cell for cell in cells if cell.key not in done]
    if left:
        bench.warm_up()
    with tqdm(left, unit="cell", initial=len(cells) - len(left), total=len(cells)) as bar:
        for cell in bar:
            bar.set_postfix_str(cell.key)
            file.append(bench.measure(cell))


def _lines(refused: Mapping[Cell, str]) -> list[Record]:
    """One line for each tree and verifier, whatever the budgets, temperatures and drafters."""
    lines = {}
    for cell, why in refused.items():
        key = f"refused: {cell.policy} with {cell.verifier}: {why}"
        lines[key] = {"question_id": key, "refused": why, "policy": cell.policy, "verifier": cell.verifier}
    return list(lines.values())


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.compare", description=(__doc__ or "").partition("\n")[0]
    )
    add_options(parser, Options)
    try:
        print(json.dumps(run(Options(**vars(parser.parse_args(arguments))))))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
