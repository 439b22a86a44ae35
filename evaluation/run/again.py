"""Turns of an answer file decoded again, by the file's own settings: for what a file does not hold, its trees.

Owns the way back from a header to options, and the comparison with what the file says. Writes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from evaluation.answers.file import AnswerSet, Record
from evaluation.answers.record import seed_of
from evaluation.questions.prompts import Prompter
from evaluation.run.models import check_device, load_run, make_method
from evaluation.run.options import DRAFTER_FLAGS, Options
from opt_tree import Generation, Pair
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
        if self.method == "transformers":
            raise ValueError(f"{run.path} was written by transformers: there are no trees to show")
        self.pair: Pair = load_run(self.options, check_device(self.options))

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
            seed = seed_of(options.seed, question, choice["index"], turn)
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
            yield Turn(question, choice["index"], turn + 1, found, found.accept_lengths == steps)


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
    for flag, prefix in DRAFTER_FLAGS.items():
        path = given.pop(flag.removeprefix("--").replace("-", "_"), None)
        if path is not None:
            given["drafter"] = prefix + path
    known = {field.name for field in fields(Options)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{run.path} was made with options that are not known here: {', '.join(unknown)}")
    return Options(**given)
