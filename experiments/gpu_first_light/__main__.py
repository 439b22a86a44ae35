"""What a first GPU should answer, in one call of under ten minutes.

    python -m experiments.gpu_first_light                  # all parts, in order of value a minute
    python -m experiments.gpu_first_light --parts exact,buckets
    python -m experiments.gpu_first_light --dry-run        # the same code, small; on a CPU graphs are called

Nothing is downloaded: the embedded pair, as it is and inflated to the shapes of 1B and 7B models, and the public model
`smollm2` where it is on this machine already. After each part what is known so far is written to FILE.json, and as
tables to FILE.md; a part that fails says why, and the next one begins.
"""

import sys

from evaluation.command_line import parse, run_command, work_of
from experiments.gpu_first_light.options import Options


def main(arguments: list[str] | None = None) -> int:
    """Try the parts in turn. Returns 0; 1 where a part failed; 2 for bad input."""

    def command() -> int:
        options = parse(Options, "python -m experiments.gpu_first_light", __doc__, arguments)
        return work_of("experiments.gpu_first_light.__main__:attempt_all")(options)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())

import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation.command_line import table
from evaluation.timing import environment
from experiments.gpu_first_light.options import ESTIMATES
from experiments.gpu_first_light.parts import PARTS, Place
from opt_tree.core.files import write_text


def attempt(part: str, place: Place) -> dict[str, Any]:
    """Run a part and print its table; where it fails, say so: the others are still worth their minutes."""
    try:
        rows = PARTS[part](place)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(f"{part} failed: {found['error']}\n", flush=True)
        return found
    print(f"{part}\n{table(rows)}\n", flush=True)
    return {"rows": rows}


def write(name: str, found: dict[str, dict[str, Any]], place: Place) -> None:
    """Write what is known so far, whole, in both forms."""
    figures = {"dry_run": place.dry, "environment": environment(place.device), "parts": found}
    lines = [f"{'A dry run: its times mean nothing. ' if place.dry else ''}{figures['environment']}", ""]
    for part, what in found.items():
        lines += [f"## {part}: {PARTS[part].__doc__}", "", "```", what.get("error") or table(what["rows"]), "```", ""]
    write_text(Path(f"{name}.json"), json.dumps(figures, indent=1) + "\n")
    write_text(Path(f"{name}.md"), "\n".join(lines))


def attempt_all(options: Options) -> int:
    """Attempt each part, and write after each; return 1 where one failed, else 0."""
    if not options.dry_run and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --dry-run tries the code on a CPU")
    chosen = tuple(filter(None, options.shapes.split(",")))
    place, begin = Place(options.dry_run, chosen), time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    if not options.dry_run:
        print(f"about {sum(ESTIMATES[part] for part in options.chosen) / 60:.0f} minutes, by a guess", flush=True)
    if options.dry_run:
        torch.set_num_threads(1)
    for part in tqdm(options.chosen, desc="first light", unit="part", leave=False, disable=None):
        started = time.perf_counter()
        if started - begin > 60 * options.minutes:
            found[part] = {"error": f"not begun: {options.minutes:g} minutes were over"}
        else:
            found[part] = attempt(part, place)
        found[part]["seconds"] = round(time.perf_counter() - started, 1)
        write(options.output, found, place)
    print(f"written: {options.output}.json, {options.output}.md")
    return int(any("trace" in what for what in found.values()))
