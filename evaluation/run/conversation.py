"""One question answered by one method: its turns in order, and what an answer file's line says of each.

Owns the fields of a choice. Knows no files and no loop: a method is a function from a prompt to new tokens.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question
from evaluation.run.baselines import Timed
from opt_tree import Generation

Answer = Callable[[list[int], int, int], Generation | Timed]
"""From a prompt, a limit of new tokens and a seed to new tokens and what they cost."""

History = Mapping[int | str, Sequence[Sequence[str]]]
"""Turns of another answer file, by question and choice."""


@dataclass(frozen=True)
class Conversation:
    """How questions are put: the same for every method."""

    prompter: Prompter
    max_new_tokens: int
    choices: int = 1
    seed: int = 0
    history: History | None = None
    """Whose answers stand between the turns; None: the method's own."""

    def answer(self, question: Question, method: Answer) -> list[dict[str, Any]]:
        """Return every choice of one question. Whatever goes wrong in one turn goes wrong for the question."""
        choices = []
        for index in range(self.choices):
            choice: dict[str, Any] = {"index": index, "turns": []}
            fixed = None if self.history is None or len(question.turns) == 1 else self.history[question.id][index]
            for turn in range(len(question.turns)):
                past = choice["turns"] if fixed is None else fixed[:turn]
                prompt = self.prompter.encode(question.turns[: turn + 1], past)
                result = method(prompt, self.max_new_tokens, seed_of(self.seed, question.id, index, turn))
                self._record(choice, prompt, result)
            choices.append(choice)
        return choices

    def _record(self, choice: dict[str, Any], prompt: list[int], result: Generation | Timed) -> None:
        """Add one turn: a number to each list that is one number a turn, the steps to those that are flat."""
        tokens = len(result.tokens)
        if isinstance(result, Generation):
            per_turn, per_step = _totals(result), _steps(result)
            reason = result.finish_reason
        else:
            # transformers decodes token by token; what happens inside is not timed.
            stopped = self.prompter.stop(result.tokens)
            reason = stopped or ("length" if tokens == self.max_new_tokens else "context")
            counts: dict[str, Any] = {"draft_forwards": 0, "draft_tokens": 0, "verified_tokens": tokens}
            per_turn = {"decoding_steps": tokens, **counts, **dict.fromkeys(TIMES)}
            nothing = [0] * tokens
            per_step = {
                "accept_lengths": [1] * tokens,
                "expected_lengths": [1.0] * tokens,
                "tree_nodes": nothing,
                "tree_depths": nothing,
            }
        per_turn = {
            "idxs": per_turn["decoding_steps"] - 1,
            "new_tokens": tokens,
            "wall_time": round(result.seconds, 6),
            **per_turn,
            "finish_reason": reason,
            "prompt_ids": prompt,
            "token_ids": result.tokens,
        }
        choice["turns"].append(self.prompter.text(result.tokens))
        for key, value in per_turn.items():
            choice.setdefault(key, []).append(value)
        for key, values in per_step.items():
            choice.setdefault(key, []).extend(values)


TIMES = ("draft_time", "verify_time", "commit_time", "draft_forward_time", "target_forward_time", "prefill_time")
"""Seconds. The forwards' times are parts of `draft_time` and `verify_time`; `prefill_time` is beside them all."""


def _totals(generation: Generation) -> dict[str, Any]:
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


def _steps(generation: Generation) -> dict[str, list[Any]]:
    """One entry a step: emitted tokens (accepted + 1, the last trimmed), E(A) + 1, and the tree's nodes and depth."""
    return {
        "accept_lengths": generation.accept_lengths,
        "expected_lengths": [round(expected, 4) for expected in generation.expected_lengths],
        "tree_nodes": [step.tree.nodes for step in generation.steps],
        "tree_depths": [int(step.tree.depths.max()) for step in generation.steps],
    }


def seed_of(seed: int, question: int | str, choice: int, turn: int) -> int:
    """The seed of one turn: the same whatever was answered before it, in which order and by how many processes."""
    digest = hashlib.sha256(f"{seed}/{question}/{choice}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
