"""Which tree and which verifier are best for a pair and a node budget: every valid combination is one line.

    python -m evaluation.compare --policies opt:0.2,eagle2,sequoia,binary --budgets 25,60 --drafter lm:demo,eagle:demo
    python -m evaluation.compare --policies chains:3,dyspec --verifiers multi_round,traversal --temperatures 0.6,1
    python -m evaluation.compare --policies mine.py:Trunk,opt:0.2 --drafter mine.py:Bigrams
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.comparison import read
from evaluation.answers.file import AnswerFile
from evaluation.compare.combinations import Combination
from evaluation.compare.measure import Bench, peers_key
from evaluation.report import print_comparison
from evaluation.timing import contested, environment
from opt_tree.system.files import check_writable


def run(options: Options) -> dict[str, Any]:
    """Measure what is not in the output yet; print the table and draw the plots; return the figures."""
    file = AnswerFile(options.output)
    valid, refused = sift(options.combinations, lambda cell: cell.refusal(options.lossy))
    if not valid and not file.path.is_file():
        raise ValueError(f"nothing to do: name --policies or a --preset, or an --output that exists, not {file.path}")
    if valid:
        refused += measure(options, valid, file)
    found = print_comparison(file.path)
    if options.plots is not None:
        from evaluation.compare.plots import draw_all  # matplotlib only where a plot is asked for

        for path in draw_all([record for record in read(file.path) if "cell" in record], Path(options.plots)):
            print(f"drawn: {path}")
    return found | {"refused": refused}


def sift(
    cells: Sequence[Combination], refusal: Callable[[Combination], str | None]
) -> tuple[list[Combination], list[dict[str, str]]]:
    """Return those that are not refused, and what was said of the others: for each reason a policy and verifier once.

    Raises ValueError where all are refused.
    """
    reasons = {cell: refusal(cell) for cell in cells}
    told = dict.fromkeys((cell.policy, cell.verifier, why) for cell, why in reasons.items() if why is not None)
    for policy, verifier, why in told:
        print(f"refused: {policy} with {verifier}: {why}")
    if told and None not in reasons.values():
        raise ValueError("every combination asked for is refused")
    about = [dict(zip(("policy", "verifier", "refused"), one, strict=True)) for one in told]
    return [cell for cell, why in reasons.items() if why is None], about


def measure(options: Options, cells: Sequence[Combination], file: AnswerFile) -> list[dict[str, str]]:
    """Append a line for each cell that has none yet, on disk before the next one begins; return what is refused.

    For each temperature what transformers does comes first, then each cell.
    """
    bench = Bench(options, cells)
    cells, refused = sift(cells, bench.refusal)
    check_writable(file.path)
    with file.lock():
        if options.overwrite:
            bench.rates_file.remove()
        else:
            file.check_settings(bench.settings)
        session = {"environment": environment(bench.pair.target.device), "sharpening": bench.sharpening}
        session["arguments"] = dataclasses.asdict(options)
        for different in file.begin(bench.settings, session, [file] if options.overwrite else ()):
            print(f"warning: other cells of {file.path} were measured elsewhere: {different}", file=sys.stderr)
        done = {} if options.overwrite else {record["question_id"]: record.get("code", {}) for record in file.read()}
        for cell in cells:
            then = done.get(cell.key, cell.code)
            if changed := sorted(name for name, digest in cell.code.items() if then.get(name) != digest):
                raise ValueError(f"{', '.join(changed)} changed since {cell.key} was measured; pass --overwrite")
        temperatures = sorted({cell.temperature for cell in cells}) if options.peers or options.size.peers else []
        tasks = {peers_key(temperature): partial(bench.measure_peers, temperature) for temperature in temperatures}
        tasks |= {cell.key: partial(bench.measure, cell) for cell in cells}
        left = {key: task for key, task in tasks.items() if key not in done}
        busy = None
        if left:
            bench.warm_up()
        with tqdm(left.items(), unit="cell", initial=len(tasks) - len(left), total=len(tasks)) as bar:
            for key, task in bar:
                bar.set_postfix_str(key)
                file.append(task())
                busy = busy or contested()
    if busy:
        print(busy, file=sys.stderr)
    return refused
