"""Whether two answer files say the same, and where they part. Arithmetic over their lines."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def paired(answers: Sequence[Record], baseline: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The answers to the questions that both answered, in the order of the first."""
    there = {answer["question_id"]: answer for answer in baseline}
    common = [answer for answer in answers if answer["question_id"] in there]
    return common, [there[answer["question_id"]] for answer in common]


def exact_match(answers: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Any]:
    """How many turns say the same, token for token (in files without token ids, as text), and where the others part.

    Turns whose prompts differ, because an earlier answer of their conversation did, are not compared but counted.
    """
    compared = other_prompt = 0
    divergences: list[dict[str, Any]] = []
    for ours, theirs in zip(*paired(answers, baseline), strict=True):
        for one, other in zip(ours["choices"], theirs["choices"], strict=False):
            tokens = "token_ids" in one and "token_ids" in other
            key, unit = ("token_ids", "token") if tokens else ("turns", "character")
            parted = False
            for turn, (mine, its) in enumerate(zip(one[key], other[key], strict=False)):
                if _other_prompt(one, other, turn, parted):
                    other_prompt += 1
                    continue
                compared += 1
                if (position := first_difference(mine, its)) is not None:
                    parted = True
                    where = {"question_id": ours["question_id"], "choice": one["index"], "turn": turn}
                    texts = _around(one["turns"][turn], other["turns"][turn])
                    divergences.append({**where, "position": position, "unit": unit, "texts": texts})
    equal = compared - len(divergences)
    rate = equal / compared if compared else None
    counts = {"compared": compared, "equal": equal, "rate": rate, "other_prompt": other_prompt}
    return {**counts, "divergences": divergences}


def _other_prompt(one: Record, other: Record, turn: int, parted: bool) -> bool:
    """Whether two turns answer different prompts; where prompts are unknown, whether an earlier turn `parted`."""
    if "prompt_ids" in one and "prompt_ids" in other:
        return one["prompt_ids"][turn] != other["prompt_ids"][turn]
    return parted


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """Return the first index at which two lists or texts differ, None for equal ones; a missing item differs, too."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _around(ours: str, theirs: str, width: int = 24) -> list[str]:
    """The two texts around their first difference."""
    at = first_difference(ours, theirs) or 0
    return [text[max(0, at - width) : at + width] for text in (ours, theirs)]
