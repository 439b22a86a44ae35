"""Pages to step through the turns of an answer file, whatever command wrote it.

    python -m evaluation.demo.pages a.jsonl --html DIR [--question 81]

Files hold no trees: a question (by default the first one) is decoded again by the settings in the file's header, and
its text compared with the file's. Where it is another one, nothing is shown.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from evaluation.answers.file import AnswerSet
from evaluation.command_line import make_parser, run_command
from evaluation.run.again import Again, Turn
from opt_tree import explore


def write_pages(run: AnswerSet, folder: Path, questions: Sequence[str]) -> Iterator[Path]:
    """Write a page a turn of these questions; yield each as it is there. Raises ValueError as `Again` does."""
    again = Again(run)
    several = again.options.num_choices > 1
    for turn in again.turns(questions):
        choice = f"-choice-{turn.choice}" if several else ""
        name = re.sub(r"[^\w.-]", "_", str(turn.question))
        path = folder / f"{run.name}-question-{name}{choice}-turn-{turn.number}.html"
        page = explore(turn.generation, again.pair.tokenizer, facts=facts(run, again, turn))
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        yield path


def facts(run: AnswerSet, again: Again, turn: Turn) -> dict[str, str]:
    """What the page says beside the figures."""
    steps = turn.generation.steps
    said = {
        "answer file": f"{run.path.name}, question {turn.question}, turn {turn.number}",
        "text": "decoded again for this page: the file's, token for token",
        "trees": "as accepted in the file" if turn.same_steps else "not those of the file: what drafts has changed",
        "target": run.session.get("target") or again.pair.target.name,
        "drafter": again.pair.drafter.describe(),
    }
    return said | ({"policy": str(steps[0].policy)} if steps else {})


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 for files that cannot be read or decoded again."""

    def command() -> int:
        parser = make_parser("python -m evaluation.demo.pages", __doc__)
        parser.add_argument("answers", help="answer file")
        parser.add_argument("--html", metavar="DIR", required=True, help="write the pages into this folder")
        parser.add_argument("--question", metavar="ID", action="append", help="this one; may be given several times")
        options: argparse.Namespace = parser.parse_args(arguments)
        for path in write_pages(AnswerSet.read(options.answers), Path(options.html), options.question or ()):
            print(f"written: {path}")
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
