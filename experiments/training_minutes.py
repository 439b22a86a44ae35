"""Accepted tokens by kind of head after equal minutes of training on one core, from one stream of hidden states.

    python -m experiments.training_minutes --features DIR --output DIR [--kinds EAGLE-1,EAGLE-3] [--minutes 4]

Each kind is trained with three seeds for so many minutes of process time; `--jobs` are trained side by side. Every head
gets a temperature fitted on prompts that nothing is reported on, and answers 24 questions of two sets under OPT-Tree,
bare and fitted, greedily in float32. What is there is not made again: the same command goes on, and one with more kinds
adds them.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import check_bounds, main_of, option

EAGLE = ("opt_tree.training.heads.train", "--kind")
KINDS = {
    "EAGLE-1": ("eagle", (*EAGLE, "eagle")),
    "EAGLE-3": ("eagle", (*EAGLE, "eagle3", "--vocab", "4096")),
    "ParallelSpec": ("parallelspec", ("opt_tree.training.heads.parallel_spec",)),
    "DSpark": ("dspark", ("opt_tree.training.heads.dspark",)),
}
"""The kind of drafter, and the command that trains it by its paper's recipe."""


@dataclass(frozen=True)
class Options:
    """What is trained."""

    features: str = option("", "folder of `opt_tree.training.heads.features` of the embedded target")
    output: str = option("", "folder of the heads and of what was measured")
    kinds: str = option("EAGLE-1,EAGLE-3", f"of {', '.join(KINDS)}; commas or semicolons between them")
    minutes: float = option(4.0, "of process time that each head is trained for")
    jobs: int = option(1, "heads that are trained side by side, on the cores that this process may use", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("features", "output"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing")
        for kind in self.named:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
        if self.minutes <= 0:
            raise ValueError(f"--minutes must be above 0, got {self.minutes:g}")

    @property
    def named(self) -> list[str]:
        """The kinds."""
        return [name.strip() for name in self.kinds.replace(";", ",").split(",")]


main = main_of("experiments.training_minutes", Options, __doc__, "experiments.training_minutes:run")

if __name__ == "__main__":
    sys.exit(main())

import contextlib
import io
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from tqdm import tqdm

from evaluation.command_line import table
from evaluation.compare.__main__ import run as compare
from evaluation.compare.options import Options as Compared
from evaluation.questions.sets import load_set
from opt_tree.core.files import write_text
from opt_tree.models import DEMO
from opt_tree.models.checkpoints import CALIBRATION, TRAINING
from opt_tree.training.fitting import calibrate

SEEDS, SETS = (0, 1, 2), ("demo", "mt_bench")
THRESHOLD, TOKENS, FITTED_ON = 0.05, 64, 16
"""Of OPT-Tree; new tokens of an answer at most; prompts that a temperature is fitted on."""


def runs(options: Options) -> Iterator[tuple[str, int, Path]]:
    """Yield each kind and seed with its folder."""
    for seed in SEEDS:
        for kind in options.named:
            yield kind, seed, Path(options.output) / f"{kind}-{seed}"


def train(kind: str, seed: int, folder: Path, options: Options, stopping: Event) -> None:
    """Train one head, unless it is there, until `stopping` is set. Raises ValueError where it fails."""
    if (folder / "final" / TRAINING).exists() or stopping.is_set():
        return
    minutes = f"{options.minutes:g}"
    module, *words = KINDS[kind][1]
    words += ["--target", str(DEMO / "target"), "--features", options.features, "--output", str(folder)]
    words += ["--minutes", minutes, "--save-minutes", minutes, "--seed", str(seed), "--average", "0.98"]
    words += ["--resume"] if (folder / "checkpoint.pt").exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    if _status_of([sys.executable, "-m", module, *words], folder / "log", stopping):
        raise ValueError(f"training {kind} with seed {seed} failed; all of it is in {folder / 'log'}")


def _status_of(command: list[str], log: Path, stopping: Event) -> int:
    with log.open("a") as file, subprocess.Popen(command, stdout=file, stderr=file) as child:
        while child.poll() is None:
            if stopping.wait(0.2):
                child.terminate()
        return child.returncode


def fitted(spec: str, head: Path) -> float:
    """Return the temperature of a head: fitted now, or before."""
    if not (head / CALIBRATION).exists():
        pair = calibrate.load_pair("demo", spec, dtype="float32", bare=True)
        prompts = [pair.encode(question.turns[0]) for question in load_set("heldout").questions[:FITTED_ON]]
        found = calibrate.fit(pair, prompts, calibrate.OptTree(16, THRESHOLD), TOKENS)
        write_text(head / CALIBRATION, json.dumps({"temperature": round(found, 4), "prompts": len(prompts)}) + "\n")
    return float(json.loads((head / CALIBRATION).read_text())["temperature"])


def measure(spec: str, head: Path, bench: str) -> list[dict[str, Any]]:
    """Return a row for each budget, bare and fitted."""
    asked = Compared(
        drafter=spec,
        policies=f"opt:{THRESHOLD}",
        budgets="12,60",
        sharpening="bare,fitted",
        dtype="float32",
        bench_name=bench,
        limit=24,
        max_new_tokens=TOKENS,
        batch_size=8,
        output=str(head / f"{bench}.jsonl"),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return list(compare(asked)["cells"])


def rows_of(options: Options) -> list[dict[str, Any]]:
    """Train what is missing, then measure what is missing; return a row for each measured line."""
    stopping = Event()
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for done in [pool.submit(train, *one, options, stopping) for one in runs(options)]:
                done.result()
        except BaseException:
            stopping.set()
            raise
    found = []
    for kind, seed, folder in tqdm(list(runs(options)), desc="heads", disable=None):
        head = folder / "final"
        spec, note = f"{KINDS[kind][0]}:{head}", json.loads((head / TRAINING).read_text())
        if abs(note["minutes"] - options.minutes) > 0.1 * options.minutes + 0.1:
            said = f"{note['minutes']} minutes, not {options.minutes:g}"
            raise ValueError(f"{head} was trained for {said}: another --output")
        temperature = fitted(spec, head)
        for bench in SETS:
            for cell in measure(spec, head, bench):
                row = {"kind": kind, "seed": seed, "set": bench, "made on": note["on"], "temperature": temperature}
                keys = ("budget", "sharpening", "tokens_per_step", "expected_length", "draft_forwards_per_step")
                found.append(row | {key: cell.get(key) for key in keys})
    return found


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each set and kind: tokens a step, the mean over seeds and from where to where."""
    values: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        columns = values.setdefault((row["set"], row["kind"]), {})
        columns.setdefault(f"{row['budget']} nodes, {row['sharpening']}", []).append(row["tokens_per_step"])
    lines = []
    for (bench, kind), columns in sorted(values.items(), key=lambda one: one[0]):
        shown = {column: (statistics.fmean(each), min(each), max(each)) for column, each in columns.items()}
        told = {column: "{:.2f} [{:.2f}, {:.2f}]".format(*known) for column, known in shown.items()}
        lines.append({"set": bench, "kind": kind, "seeds": max(map(len, columns.values())), **told})
    return lines


def run(options: Options) -> dict[str, Any]:
    """Print the table; return the rows."""
    rows = rows_of(options)
    print(table(means(rows)))
    return {"minutes": options.minutes, "rows": rows}
