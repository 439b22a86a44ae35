"""Accepted tokens by minutes of training on one core: kinds of heads x seeds, from one stream of hidden states.

    python -m experiments.training_minutes --features DIR --output DIR [--kinds EAGLE-1,EAGLE-3] [--minutes 3,6,12]

Each head is trained for the last of the minutes, of process time, and kept at the others on the way; the learning rate
falls to nothing at the last. `--jobs` are trained side by side. Every head gets a temperature fitted on prompts that
nothing is reported on, and answers the question sets under OPT-Tree, bare and fitted, greedily in float32. What is
there is not made again: the same command goes on, and one with more kinds adds them.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from evaluation.command_line import at_least, main_of, numbers, option


class Kind(NamedTuple):
    """How a kind of head is trained, and how its drafter is named."""

    command: tuple[str, ...]
    spec: str


EAGLE = ("opt_tree.training.heads.train", "--kind")


KINDS = {
    "EAGLE-1": Kind((*EAGLE, "eagle"), "eagle"),
    "EAGLE-3": Kind((*EAGLE, "eagle3", "--vocab", "4096"), "eagle"),
    "EAGLE-3, warm": Kind((*EAGLE, "eagle3", "--vocab", "4096", "--warm"), "eagle"),
    "ParallelSpec": Kind(("opt_tree.training.heads.parallel_spec",), "parallelspec"),
    "DSpark": Kind(("opt_tree.training.heads.dspark",), "dspark"),
}
"""By their papers' recipes; but EAGLE-3, warm, which begins as the target's last layer and keeps its output rows."""


@dataclass(frozen=True)
class Options:
    """What is trained, and what it is measured on."""

    features: str = option("", "folder of `opt_tree.training.heads.features` of the embedded target")
    output: str = option("", "folder of the heads and of what was measured")
    kinds: str = option("EAGLE-1,EAGLE-3", f"of {'; '.join(KINDS)}; semicolons or commas between them")
    seeds: str = option("0,1,2", "a head each")
    minutes: str = option("3,6,12", "of process time at which a head is kept")
    jobs: int = option(1, "heads that are trained side by side, on the cores that this process may use")
    average: float = option(0.98, "decay a step of the running mean of the weights that is kept, for every kind")
    budgets: str = option("12,60", "nodes of OPT-Tree's trees")
    threshold: float = option(0.05, "of OPT-Tree")
    sets: str = option("demo,mt_bench", "question sets; the heads on the way answer the first alone")
    data_dir: str | None = option(None, "where question sets are looked for, too")
    limit: int = option(24, "questions of each set")
    max_new_tokens: int = option(64, "of an answer, at most")
    prompts: int = option(16, "held-out prompts that fit each temperature")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        at_least(self, limit=1, max_new_tokens=1, prompts=1, jobs=1)
        for name in ("features", "output"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing")
        for kind in self.named:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; there are {'; '.join(KINDS)}")
        if list(numbers(self.minutes)) != sorted({*numbers(self.minutes)}) or numbers(self.minutes)[0] <= 0:
            raise ValueError(f"--minutes must rise from above 0, got {self.minutes}")

    @property
    def named(self) -> list[str]:
        """The kinds; a name may have a comma of its own."""
        return [name.strip() for name in self.kinds.split(";" if ";" in self.kinds else ",")]


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

from evaluation.command_line import table, whole_numbers
from evaluation.compare.__main__ import run as compare
from evaluation.compare.options import Options as Compared
from opt_tree.core.files import write_text
from opt_tree.models import DEMO
from opt_tree.models.checkpoints import CALIBRATION, TRAINING
from opt_tree.training.fitting import calibrate

PROMPTS = Path(__file__).parents[1] / "evaluation" / "questions" / "heldout.jsonl"


def runs(options: Options) -> Iterator[tuple[str, int, Path]]:
    """Yield each kind and seed with its folder."""
    for seed in whole_numbers(options.seeds):
        for kind in options.named:
            yield kind, seed, Path(options.output) / f"{kind.replace(', ', '-')}-{seed}"


def train(kind: str, seed: int, folder: Path, options: Options, stopping: Event) -> None:
    """Train one head, unless it is there, until `stopping` is set. Raises ValueError where it fails."""
    if (folder / "final" / TRAINING).exists() or stopping.is_set():
        return
    *marks, minutes = options.minutes.split(",")
    module, *words = KINDS[kind].command
    words += ["--target", str(DEMO / "target"), "--features", options.features, "--output", str(folder)]
    words += ["--minutes", minutes, "--seed", str(seed), "--average", str(options.average)]
    words += ["--marks", ",".join(marks)] if marks else []
    words += ["--save-minutes", (marks or [minutes])[0]]
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


def fitted(spec: str, head: Path, options: Options) -> float:
    """Return the temperature of a head: fitted now, or before."""
    if not (head / CALIBRATION).exists():
        pair = calibrate.load_pair("demo", spec, dtype="float32", bare=True)
        rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()[: options.prompts]]
        prompts = [pair.encode(row["turns"][0]) for row in rows]
        found = calibrate.fit(pair, prompts, calibrate.OptTree(16, options.threshold), options.max_new_tokens)
        write_text(head / CALIBRATION, json.dumps({"temperature": round(found, 4), "prompts": len(prompts)}) + "\n")
    return float(json.loads((head / CALIBRATION).read_text())["temperature"])


def measure(spec: str, head: Path, bench: str, options: Options) -> list[dict[str, Any]]:
    """Return a row for each budget, bare and fitted."""
    asked = Compared(
        drafter=spec,
        policies=f"opt:{options.threshold}",
        budgets=options.budgets,
        sharpening="bare,fitted",
        dtype="float32",
        bench_name=bench,
        data_dir=options.data_dir,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
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
    *marks, last = options.minutes.split(",")
    sets, found = options.sets.split(","), []
    for kind, seed, folder in tqdm(list(runs(options)), desc="heads", disable=None):
        for minutes, name in [*((mark, f"minutes-{float(mark):g}") for mark in marks), (last, "final")]:
            head = folder / name
            spec, note = f"{KINDS[kind].spec}:{head}", json.loads((head / TRAINING).read_text())
            if abs(note["minutes"] - float(minutes)) > 0.1 * float(minutes) + 0.1:
                raise ValueError(f"{head} was trained for {note['minutes']} minutes, not {minutes}: another --output")
            temperature = fitted(spec, head, options)
            for bench in sets if name == "final" else sets[:1]:
                for cell in measure(spec, head, bench, options):
                    row = {"kind": kind, "seed": seed, "minutes": float(minutes), "set": bench, "made on": note["on"]}
                    keys = ("budget", "sharpening", "tokens_per_step", "expected_length", "draft_forwards_per_step")
                    found.append({**row, "temperature": temperature, **{key: cell.get(key) for key in keys}})
    return found


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each kind, set and minutes: tokens a step, the mean over seeds and from where to where."""
    values: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        columns = values.setdefault((row["set"], row["minutes"], row["kind"]), {})
        columns.setdefault(f"{row['budget']} nodes, {row['sharpening']}", []).append(row["tokens_per_step"])
    lines = []
    for place, columns in sorted(values.items(), key=lambda one: one[0]):
        line = dict(zip(("set", "minutes", "kind"), place, strict=True)) | {"seeds": max(map(len, columns.values()))}
        shown = {column: (statistics.fmean(each), min(each), max(each)) for column, each in columns.items()}
        lines.append(line | {column: "{:.2f} [{:.2f}, {:.2f}]".format(*known) for column, known in shown.items()})
    return lines


def run(options: Options) -> dict[str, Any]:
    """Print the table; return the rows."""
    rows = rows_of(options)
    print(table(means(rows)))
    return {"rows": rows}
