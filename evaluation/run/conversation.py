"""One question answered by one method, its turns in order.

Knows no loop: a method is a function from a prompt to new tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import opt_tree
from evaluation.answers.record import add_turn, seed_of
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question
from evaluation.run.baselines import InLoop
from evaluation.timing import Method, Timed
from opt_tree import Generation
from opt_tree.target import Asking, run_alone
from opt_tree.tools.ceiling import Ceilings

T = TypeVar("T")

Task = Callable[[Method], Asking[T]]
"""What is done with a method: a generator of the forwards of the library's loop, where that is the method."""


def alone(method: Method, asking: Asking[T]) -> T:
    """Do a task by itself."""
    return method.decoder.compute(asking) if isinstance(method, InLoop) else run_alone(asking)


def side_by_side(method: Method, tasks: Iterable[Task[T]], width: int) -> Iterator[tuple[int, T]]:
    """Give each task the method; yield its place and what it returns as it ends.

    Where the library's loop decodes, `width` of them run side by side, each with a decoder of its own.
    """
    if not isinstance(method, InLoop):
        yield from ((place, alone(method, task(method))) for place, task in enumerate(tasks))
        return
    jobs = ((lambda own, task=task: task(replace(method, decoder=own))) for task in tasks)
    yield from opt_tree.side_by_side(method.decoder, jobs, width)


@dataclass(frozen=True)
class Conversation:
    """How questions are put: the same for every method."""

    prompter: Prompter
    max_new_tokens: int
    choices: int = 1
    seed: int = 0

    def attempt(self, question: Question, method: Method) -> Asking[list[dict[str, Any]] | Exception]:
        """Answer a question, or return what went wrong: out of memory, a prompt too long. Others still count."""
        try:
            return (yield from self.answer(question, method))
        except Exception as error:
            return error

    def answer(self, question: Question, method: Method) -> Asking[list[dict[str, Any]]]:
        """Return every choice of one question. Whatever goes wrong in one turn goes wrong for the question."""
        choices = []
        for index in range(self.choices):
            choice: dict[str, Any] = {"index": index, "turns": []}
            for turn in range(len(question.turns)):
                prompt = self.prompter.encode(question.turns[: turn + 1], choice["turns"])
                order = prompt, self.max_new_tokens, seed_of(self.seed, question.id, index, turn)
                if isinstance(method, InLoop):
                    result: Generation | Timed = yield from method.ask(*order)
                else:
                    result = method(*order)
                add_turn(choice, prompt, result, self.prompter.text(result.tokens), self._reason(result))
                if isinstance(method, InLoop) and isinstance(watch := method.decoder.policy, Ceilings):
                    choice.setdefault("ceilings", []).extend(round(one.tokens, 4) for one in watch.found)
            choices.append(choice)
        return choices

    def _reason(self, result: Generation | Timed) -> str:
        """Why a turn ended; transformers does not say it."""
        if isinstance(result, Generation):
            return result.finish_reason
        stopped = self.prompter.stop(result.tokens)
        return stopped or ("length" if len(result.tokens) == self.max_new_tokens else "context")
