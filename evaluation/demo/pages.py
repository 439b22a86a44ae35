"""Pages to step through the turns of an answer file, whatever command wrote it.

    python -m evaluation.demo.pages a.jsonl --html DIR [--question 81]

Files hold no trees: a question (by default the first one) is decoded again by the settings in the file's header, and
its text compared with the file's. Where it is another one, nothing is shown.
"""

import sys

from evaluation.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 for files that cannot be read or decoded again."""

    def command() -> int:
        parser = Parser("python -m evaluation.demo.pages", __doc__)
        parser.add_argument("answers", help="answer file")
        parser.add_argument("--html", metavar="DIR", required=True, help="write the pages into this folder")
        parser.add_argument("--question", metavar="ID", action="append", help="this one; may be given several times")
        return work_of("evaluation.demo.pages:run")(parser.parse_args(arguments))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args, get_type_hints

from evaluation.answers.file import Record
from evaluation.answers.reading import AnswerSet
from evaluation.answers.record import seed_of
from evaluation.questions.prompts import Prompter
from evaluation.run.models import load_run, make_method
from evaluation.run.options import METHODS, Options
from opt_tree import Generation, Pair, explore
from opt_tree.core.files import write_text
from opt_tree.core.target import shared

NEEDED = ("prompt_ids", "token_ids", "decoding_steps", "accept_lengths")


@dataclass(frozen=True)
class Turn:
    """One turn of an answer, decoded again with the same text."""

    question: int | str
    choice: int
    number: int
    """Counted from 1."""
    generation: Generation
    same_steps: bool
    """Whether the steps are the file's, too; they are others where the drafter has changed since."""


class Again:
    """The models and the method that made an answer file, as its header says."""

    def __init__(self, run: AnswerSet) -> None:
        """Raises ValueError where the header does not say it, and for what cannot be loaded here."""
        self.run = run.require(NEEDED, "it cannot be decoded again without")
        self.options = options_of(run)
        self.method = run.settings.get("method", self.options.method)
        if self.method not in {*METHODS} - {"transformers"}:
            raise ValueError(f"{run.path} was written by {self.method}: there are no trees to show")
        self.pair: Pair = load_run(self.options, self.options.check_device())

    def turns(self, questions: Sequence[str]) -> Iterator[Turn]:
        """Decode all turns of these questions, named by their ids; none: of the first one.

        Raises ValueError for a question that the file does not have, and where a text is not the file's.
        """
        for record in chosen(self.run, questions):
            for choice in record["choices"]:
                yield from self._choice(record["question_id"], choice)

    def _choice(self, question: int | str, choice: Record) -> Iterator[Turn]:
        options = self.options
        prompter = Prompter(self.pair.tokenizer, self.pair.stop, options.conv_template, options.system_message)
        decode = make_method(self.method, options, self.pair, prompter)
        ends = [0, *accumulate(choice["decoding_steps"])]
        for turn, (prompt, tokens) in enumerate(zip(choice["prompt_ids"], choice["token_ids"], strict=True)):
            seed = seed_of(options.seed, question, choice.get("index", 0), turn)
            found = decode(prompt, options.max_new_token, seed)
            assert isinstance(found, Generation)
            if found.tokens != tokens:
                where = f"{self.run.path}: question {question}, turn {turn + 1}"
                made = f"on {self.run.settings.get('device')} in {self.run.settings.get('target_dtype')}"
                raise ValueError(
                    f"{where}: decoded again the text is another one from token {shared(found.tokens, tokens)} on; the "
                    f"file was written {made}, by models that may have changed since"
                )
            steps = choice["accept_lengths"][ends[turn] : ends[turn + 1]]
            yield Turn(question, choice.get("index", 0), turn + 1, found, found.accept_lengths == steps)


def chosen(run: AnswerSet, questions: Sequence[str]) -> list[Record]:
    """The answers to these questions, in the file's order; none named: the first one."""
    if not questions:
        return run.answers[:1]
    known = {str(record["question_id"]) for record in run.answers}
    if missing := [name for name in questions if name not in known]:
        raise ValueError(f"{run.path} has no answer to question {', '.join(missing)}")
    return [record for record in run.answers if str(record["question_id"]) in questions]


def options_of(run: AnswerSet) -> Options:
    """The options of the run that wrote a file, from its header."""
    given: dict[str, Any] = dict(run.session.get("options") or {})
    if not given:
        raise ValueError(f"{run.path} has no header beside it that says how it was made: there is nothing to decode by")
    kinds = get_type_hints(Options)
    if unknown := sorted(given.keys() - kinds.keys()):
        raise ValueError(f"{run.path} was made with options that are not known here: {', '.join(unknown)}")
    for name, value in given.items():
        kind = get_args(kinds[name]) or (kinds[name],)
        if type(value) not in kind and not (float in kind and type(value) is int):
            raise ValueError(f"{run.path} was made with an option that is not of its type: {name} {value!r:.40}")
    return Options(**given)


def write_pages(run: AnswerSet, folder: Path, questions: Sequence[str]) -> Iterator[Path]:
    """Write a page a turn of these questions; yield each as it is there. Raises ValueError as `Again` does."""
    again = Again(run)
    several = again.options.num_choices > 1
    for turn in again.turns(questions):
        choice = f"-choice-{turn.choice}" if several else ""
        name = re.sub(r"[^\w.-]", "_", str(turn.question))
        path = folder / f"{run.name}-question-{name}{choice}-turn-{turn.number}.html"
        page = explore(turn.generation, again.pair.tokenizer, facts=facts(run, again, turn))
        write_text(path, page)
        yield path


def run(options: argparse.Namespace) -> int:
    """Write the pages that are asked for."""
    for path in write_pages(AnswerSet.read(options.answers), Path(options.html), options.question or ()):
        print(f"written: {path}")
    return 0


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
