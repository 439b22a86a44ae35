"""What an answer file's line says of one turn: its fields, and how they follow from what decoded it.

One number a turn in each list, but for those that are flat over all steps of a choice.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import opt_tree
from evaluation.answers.file import Record
from evaluation.answers.steps import TIMES
from opt_tree.target import shared


class Answered(Protocol):
    """What any way to decode leaves; the library's loop leaves a `Generation`, which says more."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def seconds(self) -> float: ...


def add_turn(choice: Record, prompt: list[int], result: Answered, text: str, reason: str) -> None:
    """Add one turn to a choice: what was asked and answered, why it ended, and what it cost."""
    if isinstance(result, opt_tree.Generation):
        per_turn, per_step = _totals(result), _steps(result)
        if result.lanes > 1:
            per_turn["lanes"] = result.lanes  # without it every time below is of this turn alone
    else:
        per_turn, per_step = _untraced(len(result.tokens))
    per_turn = {
        "idxs": per_turn["decoding_steps"] - 1,
        "new_tokens": len(result.tokens),
        "wall_time": round(result.seconds, 6),
        **per_turn,
        "finish_reason": reason,
        "prompt_ids": prompt,
        "token_ids": result.tokens,
    }
    choice["turns"].append(text)
    for key, value in per_turn.items():
        choice.setdefault(key, []).append(value)
    for key, values in per_step.items():
        choice.setdefault(key, []).extend(values)


def _untraced(tokens: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """As if transformers had taken a step a token; what happens inside is not timed."""
    counts = {"draft_forwards": 0, "draft_tokens": 0, "verified_tokens": tokens}
    per_turn = {"decoding_steps": tokens, **counts, **dict.fromkeys(TIMES)}
    nothing = [0] * tokens
    ones: dict[str, list[Any]] = {"accept_lengths": [1] * tokens, "expected_lengths": [1.0] * tokens}
    return per_turn, {**ones, "tree_nodes": nothing, "tree_depths": nothing}


def _totals(generation: "opt_tree.Generation") -> dict[str, Any]:
    """Sums over a turn's steps. A verified token is a row of a tree, the root included."""
    steps = generation.steps
    kinds = ("draft", "verify", "commit", "draft_forward", "target_forward")
    seconds = {f"{kind}_time": sum(getattr(step.times, kind) for step in steps) for kind in kinds}
    seconds["prefill_time"] = generation.prefill_seconds
    return {
        "decoding_steps": len(steps),
        "draft_forwards": sum(step.draft_forwards for step in steps),
        "draft_tokens": sum(step.draft_tokens for step in steps),
        "verified_tokens": sum(len(step.tree) for step in steps),
        **{key: round(value, 6) for key, value in seconds.items()},
    }


def _steps(generation: "opt_tree.Generation") -> dict[str, list[Any]]:
    """One entry a step: emitted tokens (accepted + 1, the last trimmed), E(A) + 1, nodes, depth, seconds."""
    return {
        "accept_lengths": generation.accept_lengths,
        "expected_lengths": [round(expected, 4) for expected in generation.expected_lengths],
        "tree_nodes": [step.tree.nodes for step in generation.steps],
        "tree_depths": [int(step.tree.depths.max()) for step in generation.steps],
        "step_times": [round(step.times.total, 6) for step in generation.steps],
    }


def seed_of(seed: int, question: int | str, choice: int, turn: int) -> int:
    """The seed of one turn: the same whatever was answered before it, in which order and by how many processes."""
    digest = hashlib.sha256(f"{seed}/{question}/{choice}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def paired(answers: Sequence[Record], baseline: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The answers to the questions that both answered, in the order of the first."""
    there = {answer["question_id"]: answer for answer in baseline}
    common = [answer for answer in answers if answer["question_id"] in there]
    return common, [there[answer["question_id"]] for answer in common]


@dataclass(frozen=True)
class TurnOfBoth:
    """One turn as two files answer it, in tokens or, where a file has no ids, in text."""

    question: int | str
    choice: int
    turn: int
    prompts: tuple[list[int] | None, list[int] | None]
    """None: they are not known."""
    answers: tuple[Sequence[Any], Sequence[Any]]
    unit: Literal["token", "character"]
    follows: bool
    """Whether an earlier turn of the same conversation differs, in its prompt or its answer."""

    @property
    def other_prompt(self) -> bool:
        """Whether it was asked otherwise; where prompts are unknown, whether an earlier answer differed."""
        return self.follows if None in self.prompts else self.prompts[0] != self.prompts[1]

    @property
    def differs(self) -> bool:
        return self.other_prompt or self.answers[0] != self.answers[1]


def turns_of_both(answers: Sequence[Record], baseline: Sequence[Record]) -> Iterator[TurnOfBoth]:
    """Every turn that both answered."""
    for ours, theirs in zip(*paired(answers, baseline), strict=True):
        for pair in zip(ours["choices"], theirs["choices"], strict=False):
            key, unit = ("token_ids", "token") if all("token_ids" in one for one in pair) else ("turns", "character")
            prompts = zip(*(one.get("prompt_ids", [None] * len(one[key])) for one in pair), strict=False)
            follows = False
            for turn, (asked, said) in enumerate(
                zip(prompts, zip(*(one[key] for one in pair), strict=False), strict=False)
            ):
                found = TurnOfBoth(ours["question_id"], pair[0].get("index", 0), turn, asked, said, unit, follows)
                yield found
                follows = follows or found.differs


def exact_match(answers: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Any]:
    """How many turns say the same, token for token (in files without token ids, as text), and where the others part.

    Turns whose prompts differ, because an earlier answer of their conversation did, are not compared but counted.
    """
    every = list(turns_of_both(answers, baseline))
    compared = [turn for turn in every if not turn.other_prompt]
    divergences = [
        {"question_id": one.question, "choice": one.choice, "turn": one.turn}
        | {"position": shared(*one.answers), "unit": one.unit}
        for one in compared
        if one.differs
    ]
    equal = len(compared) - len(divergences)
    rate = equal / len(compared) if compared else None
    counts = {"compared": len(compared), "equal": equal, "rate": rate, "other_prompt": len(every) - len(compared)}
    return {**counts, "divergences": divergences}
