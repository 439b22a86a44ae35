"""How often the child of each rank is the accepted one: the rates that Sequoia's and Medusa's trees are computed from.

    python -m evaluation.acceptance                                          # the embedded pair, temperature 0
    python -m evaluation.acceptance --drafter eagle:demo --question-file prompts.jsonl --output eagle.json
    python -m evaluation.acceptance --temperature 1 --children WithoutReplacement,IID

Writes a JSON file for `opt_tree.policies.AcceptanceRates.load`. Measure on other questions than those that trees are
compared on (`--question-begin`, `--question-end`): rates fitted to the test set flatter the trees made of them.
"""

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from evaluation.command_line import at_least, check_writable, main_of, option, table
from evaluation.run.conversation import Conversation
from evaluation.run.material import gather
from evaluation.run.options import MOST_NODES, Asked
from evaluation.run.rates import KINDS, Counting, Counts, measure
from opt_tree import Sampling


def rows(counts: Counts) -> list[dict[str, str]]:
    """One row a rank: the rate over all depths with its standard error and trials, then depth by depth."""

    def cell(tried: int, accepted: int) -> str:
        return f"{accepted / tried:.3f}" if tried else ""

    tried, accepted = counts.tried.sum(0), counts.accepted.sum(0)
    lines = []
    for rank in range(len(tried)):
        n, hits = int(tried[rank]), int(accepted[rank])
        error = f"{(hits / n * (1 - hits / n) / n) ** 0.5:.3f}" if n else ""
        line = {"rank": str(rank), "accepted": cell(n, hits), "+-": error, "tried": str(n)}
        depths = enumerate(zip(counts.tried[:, rank], counts.accepted[:, rank], strict=True), 1)
        lines.append(line | {f"at depth {depth}": cell(int(n), int(hits)) for depth, (n, hits) in depths})
    return lines


@dataclass(frozen=True)
class Options(Asked):
    """What is measured, on what."""

    bare: bool = option(False, "without the sharpening stored beside the drafter")
    children: str = option("TopK", "comma list of " + ", ".join(KINDS))
    temperature: float = option(0.0, "0: greedy")
    max_new_tokens: int = option(128, "new tokens a turn, at most")
    seed: int = option(0, "of sampling")
    width: int = option(12, "ranks that are measured")
    depth: int = option(4, "layers that are measured")
    least_trials: int = option(50, "ranks and depths tried less often are left out")
    output: str = option("acceptance.json", "where the rates go")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, max_new_tokens=1, width=1, depth=1, least_trials=1)
        if self.width * self.depth > MOST_NODES:
            raise ValueError(f"--width {self.width} times --depth {self.depth} must be at most {MOST_NODES}")
        if unknown := sorted(set(self.children.split(",")) - set(KINDS)):
            raise ValueError(f"unknown children {', '.join(unknown)}; there are {', '.join(KINDS)}")
        check_writable(Path(self.output))


def run(options: Options) -> dict[str, Any]:
    """Measure every kind of siblings asked for; print tables, write the file, and return what it holds."""
    sampling = Sampling(options.temperature)
    given = gather(options, options.bare)
    questions, chosen = given.questions, given.chosen
    conversation = Conversation(given.prompter, options.max_new_tokens, seed=options.seed)
    counting = Counting(conversation, options.width, options.depth)
    document: dict[str, Any] = {
        "target": options.base_model_path,
        "drafter": options.drafter,
        "bare": options.bare,
        "questions": {"name": questions.name, "sha256": questions.sha256, "ids": [question.id for question in chosen]},
        **{key: getattr(options, key) for key in ("temperature", "max_new_tokens", "seed", "width", "depth")},
        "machine": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        "rates": {},
        "tried": {},
        "accepted": {},
    }
    for kind in options.children.split(","):
        counts = measure(given.pair, kind, sampling, chosen, counting)
        document["rates"][kind] = counts.rates(options.least_trials).to_dict()
        document["tried"][kind], document["accepted"][kind] = counts.tried.tolist(), counts.accepted.tolist()
        print(f"\n{kind}: how often the child of each rank is the accepted one, given that its parent was")
        print(table(rows(counts)))
    Path(options.output).write_text(json.dumps(document) + "\n")
    print(f"\nwritten: {options.output}")
    return document


main = main_of("acceptance", Options, __doc__, run)

if __name__ == "__main__":
    sys.exit(main())
