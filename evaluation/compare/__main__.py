"""Which tree and which verifier are best for a pair and a node budget: every valid combination is one line.

    python -m evaluation.compare --policies opt:0.2,eagle2,sequoia,binary --budgets 25,60 --drafter lm:demo,eagle:demo
    python -m evaluation.compare --policies chains:3,dyspec --verifiers multi_round,traversal --temperatures 0.6,1
    python -m evaluation.compare --preset paper --plots figures

Goes on where a killed run stopped; combinations that would not be exact are listed as refused and not run. Mean
acceptance length (tokens/step) is mean(accepted + 1) over steps, the last one trimmed where the answer stops.
"""

import sys

from evaluation.command_line import main_of
from evaluation.compare.options import Options

main = main_of("evaluation.compare", Options, __doc__, "evaluation.compare.__main__:run")

if __name__ == "__main__":
    sys.exit(main())

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.file import AnswerFile, Record
from evaluation.answers.metrics import percent, with_interval
from evaluation.answers.reading import comparison
from evaluation.command_line import counted, machine_of, table
from evaluation.compare.combinations import Combination
from evaluation.compare.figures import brief, speeds, summarise
from evaluation.compare.measure import Bench, peers_key
from evaluation.timing import environment
from opt_tree.core.files import check_writable


def run(options: Options) -> dict[str, Any]:
    """Measure what is not in the output yet; print the table and draw the plots; return the figures."""
    file, cells = AnswerFile(options.output), options.combinations
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
    everything = file.read()
    records = [record for record in everything if "cell" in record]
    if not all({"cell", "peers", "refused"} & record.keys() for record in everything):
        raise ValueError(f"{file.path} is another command's: python -m evaluation.report reads answers")
    with comparison(file.path):
        summary = summarise(records)
        print(text(summary, file.header()))
    if len({line["drafter"] for line in summary}) > 1 or len(everything) > len(records):
        print(f"\nall drafters in one table, beside transformers: python -m evaluation.report {file.path}")
    if options.plots is not None:
        from evaluation.compare.plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all(records, Path(options.plots)):
            print(f"drawn: {path}")
    return {
        "output": str(file.path),
        "cells": list(map(brief, summary)),
        "peers": speeds(everything),
        "refused": refused,
    }


def measure(options: Options, cells: Sequence[Combination], refused: Sequence[Record], file: AnswerFile) -> None:
    """Append a line for each cell that has none yet, on disk before the next one begins."""
    bench = Bench(options, cells)
    check_writable(file.path)
    with file.lock():
        if options.overwrite:
            bench.rates_file.remove()
        else:
            file.check_settings(bench.settings)
            file.fold()  # drops what a death left half-written
        session = {"environment": environment(bench.pair.target.device), "sharpening": bench.sharpening}
        session["arguments"] = dataclasses.asdict(options)
        for different in file.begin(bench.settings, session, [file] if options.overwrite else ()):
            print(f"warning: other cells of {file.path} were measured elsewhere: {different}", file=sys.stderr)
        done = set() if options.overwrite else {record["question_id"] for record in file.read()}
        tasks = _tasks(options, cells, bench)
        left = {key: task for key, task in tasks.items() if key not in done}
        new = [line for line in refused if line["question_id"] not in done]
        if left:
            bench.warm_up()
        with tqdm(left.items(), unit="cell", initial=len(tasks) - len(left), total=len(tasks)) as bar:
            for key, task in bar:
                bar.set_postfix_str(key)
                line = task()
                while new:  # what is refused is no answer: it must not be what replaces the lines before
                    file.append(new.pop(0))
                file.append(line)
        for line in new:
            file.append(line)


def _tasks(options: Options, cells: Sequence[Combination], bench: Bench) -> dict[str, Callable[[], Record]]:
    """What is measured, by the name of its line: for each temperature what transformers does, then each cell."""
    tasks: dict[str, Callable[[], Record]] = {}
    if options.peers or options.size.peers:
        for temperature in sorted({cell.temperature for cell in cells}):
            tasks[peers_key(temperature)] = partial(bench.measure_peers, temperature)
    return tasks | {cell.key: partial(bench.measure, cell) for cell in cells}


def _lines(refused: Mapping[Combination, str]) -> list[Record]:
    """One line for each tree and verifier, whatever the budgets, temperatures and drafters."""
    lines = {}
    for cell, why in refused.items():
        key = f"refused: {cell.policy} with {cell.verifier}: {why}"
        lines[key] = {"question_id": key, "refused": why, "policy": cell.policy, "verifier": cell.verifier}
    return list(lines.values())


def text(lines: Sequence[Mapping[str, Any]], header: Mapping[str, Any] | None) -> str:
    """The table for people: a block for each drafter, temperature and budget."""
    blocks = []
    if header is not None and header["sessions"]:
        place = header["sessions"][-1].get("environment", {})
        machine = f"{machine_of(place)}, torch {place.get('torch')}"
        blocks.append(f"{machine}, target {header['settings'].get('target_dtype')}; 95 % intervals over questions")
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["drafter"], line["temperature"], line["budget"]), []).append(line)
    for (drafter, temperature, budget), members in groups.items():
        head = f"{drafter}, temperature {temperature:g}, at most {counted(budget, 'node')}"
        asked = counted(members[0]["questions"], "question")
        blocks.append(f"{head}, {asked}:\n{table([_row(line) for line in members])}")
    return "\n\n".join(blocks)


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    efficiency = line["block_efficiency"].get(line["verifier"])
    speed, promise = line["speed_up"], line.get("promise")  # which older lines lack
    row = {
        "tree": line["policy"],
        "children": line["children"],
        "verifier": line["verifier"],
        "sharpening": line["sharpening"],
        "tokens/step": with_interval(line["tokens_per_step"], line["interval"]),
        **({} if efficiency is None else {"block efficiency": efficiency}),
        # Of equal siblings, drawn independently, at most one can be accepted: their sum is no expectation.
        "E(A)+1": "" if line["children"] == "IID" else line["expected_length"],
        **(
            {}
            if line["children"] == "IID" or not promise
            else {"E(A)/A": with_interval(promise["ratio"], promise["interval"])}
        ),
        "draft forwards": line["draft_forwards_per_step"],
        "draft tokens": f"{line['draft_tokens_per_step']:.0f}",
        **({"draft ms": f"{line['draft_ms_per_step']:.2f}"} if "draft_ms_per_step" in line else {}),
        "verified": f"{line['verified_tokens_per_step']:.1f}",
        "accepted/node": "" if line["nodes_accepted"] is None else f"{line['nodes_accepted']:.3f}",
        "repeated": percent(line["repeated_8grams"]),
        "ended": f"{line['turns_ended']}/{line['turns']}",
        **(_speeds(line) if speed else {}),  # of a batch nobody knows them
        **({"= plain": "{}/{}".format(*line["same_as_plain"])} if line["verifier"] == "greedy" else {}),
    }
    for sharpening, minus in line["minus_opt"].items():
        row[f"minus opt, {sharpening}"] = with_interval(minus["difference"], minus["interval"], "+")
    return row


def _speeds(line: Mapping[str, Any]) -> dict[str, str]:
    speed = line["speed_up"]
    return {
        "tokens/s": f"{line['tokens_per_second']:.0f}",
        "speed-up": with_interval(speed["micro"], speed["interval"]),
    }
