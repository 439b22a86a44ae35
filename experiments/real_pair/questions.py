"""What is asked: the named sets, spread evenly, and which questions are for the fit alone."""

from collections.abc import Iterator
from typing import NamedTuple

from evaluation.questions.sets import load_set

_FOR_FIT = 2
"""The place, of ten, of a question for the fit alone."""
_ASKED = "Complete the code I provided."
_COMPLETE = "Complete this function.\n```python\n{}\n```"


class Asked(NamedTuple):
    """One question."""

    set: str
    id: str
    message: str
    given: str
    """How the answer begins: it is not decoded."""
    fit: bool
    """Whether the drafter's temperature and the acceptance rates are made on it, and nothing else is."""


def asked(name: str, count: int, data_dir: str | None, fetch: bool) -> list[Asked]:
    """Return the questions of a set.

    `humaneval`: the answer begins with the function's head and documentation, so that its body alone is decoded;
    `humaneval_repeated`: it does not, and an answer repeats them first. `mbpp`: the function alone is asked for.
    """
    whole = load_set(name.removesuffix("_repeated"), None, data_dir, fetch).questions
    chosen = [whole[place * len(whole) // count] for place in range(min(count, len(whole)))]
    return [
        Asked(name, str(question.id), *_worded(name, question.turns[0]), place % 10 == _FOR_FIT)
        for place, question in enumerate(chosen)
    ]


def in_rounds(sets: list[list[Asked]]) -> Iterator[Asked]:
    """The first of each set, then the second of each: wherever it is stopped, the sets are of one size."""
    for place in range(max(map(len, sets))):
        yield from (questions[place] for questions in sets if place < len(questions))


def _worded(name: str, turn: str) -> tuple[str, str]:
    """The message, and what the answer begins with."""
    if name.startswith("humaneval"):
        code = turn.removeprefix(_ASKED).strip("\n")
        return _COMPLETE.format(code), "" if name.endswith("_repeated") else f"```python\n{code}\n"
    if name == "mbpp":
        first, *tests = turn.split('"""')[1].strip().split("\n")
        return f"{first}\nIt must pass: {' '.join(tests)}\nAnswer with the function alone.", ""
    return turn, ""
