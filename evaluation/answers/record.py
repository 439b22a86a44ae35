"""What an answer file's line says of one turn: its fields, and how they follow from what decoded it.

One number a turn in each list, but for those that are flat over all steps of a choice.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

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
    seconds = {
        "draft_time": sum(step.times.draft for step in steps),
        "verify_time": sum(step.times.verify for step in steps),
        "commit_time": sum(step.times.commit for step in steps),
        "draft_forward_time": sum(step.times.draft_forward for step in steps),
        "target_forward_time": sum(step.times.target_forward for step in steps),
        "prefill_time": generation.prefill_seconds,
    }
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
                    where = {"question_id": ours["question_id"], "choice": one.get("index", 0), "turn": turn}
                    divergences.append({**where, "position": position, "unit": unit})
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
    return None if ours == theirs else shared(ours, theirs)
