"""An answer file as read: its lines, those of its parts, and what the header beside it says of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.answers.file import AnswerFile, Record


@dataclass(frozen=True)
class AnswerSet:
    """An answer file as read, with what its header says of it; no header for a file that others made."""

    path: Path
    answers: list[Record]
    failed: list[Record]
    header: Record | None

    @classmethod
    def read(cls, path: str | Path) -> "AnswerSet":
        """Read an answer file with its parts. Raises OSError without a file, ValueError without answers."""
        file = AnswerFile(path)
        if not file.path.is_file() and not file.parts():
            raise FileNotFoundError(f"no answer file {path}")
        answers = file.read()
        if file.torn:
            print(f"note: the last line of {path} is half-written and left out", file=sys.stderr)
        if not answers:
            raise ValueError(f"{path} has no answers")
        return cls(file.path, answers, file.read_failed(), file.header())

    def require(self, keys: Sequence[str], why: str) -> "AnswerSet":
        """Return this set; ValueError, with `why`, unless every choice has these fields and fits together."""
        for answer in self.answers:
            choices = answer.get("choices") or [{}]
            if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
                raise ValueError(f"{self.path}: question {answer['question_id']}: choices is no list of objects")
            for choice in choices:
                for key in keys:
                    if not choice.get(key):
                        raise ValueError(f"{self.path}: question {answer['question_id']} has no {key}: {why}")
                if misfit := _misfit(choice):
                    raise ValueError(f"{self.path}: question {answer['question_id']}: {misfit}")
        return self

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".jsonl")

    @property
    def settings(self) -> Record:
        """What the answers were made with; empty without a header."""
        return self.header["settings"] if self.header else {}

    @property
    def session(self) -> Record:
        """The newest session of the header; empty without one."""
        return self.header["sessions"][-1] if self.header and self.header["sessions"] else {}


def settings_apart(a: AnswerSet, b: AnswerSet, keys: Sequence[str]) -> list[str]:
    """Name those of `keys` that differ between two headers; nothing where a header is missing."""
    if not a.settings or not b.settings:
        return []
    return [
        f"{key} {a.settings.get(key)!r} and {b.settings.get(key)!r}"
        for key in keys
        if a.settings.get(key) != b.settings.get(key)
    ]


def read_timed(path: str | Path) -> AnswerSet:
    """Read an answer file; ValueError where a line lacks tokens and times, or its lists do not fit together."""
    return AnswerSet.read(path).require(("turns", "new_tokens", "wall_time"), "nothing to report")


ASKED = ("base_model_path", "temperature", "conv_template", "questions_sha256")
"""Settings that change what is asked, or the distribution it is answered from; the others: rounding or length."""
ROUNDING = ("target_dtype", "weights", "through", "device")
PER_TURN = {
    *("new_tokens", "wall_time", "decoding_steps", "draft_forwards", "draft_tokens", "verified_tokens", "lanes"),
    *("draft_time", "verify_time", "commit_time", "draft_forward_time", "target_forward_time", "prefill_time"),
}
PER_STEP = {"accept_lengths", "expected_lengths", "tree_nodes", "tree_depths", "step_times", "ceilings"}
LISTS = {"token_ids", "prompt_ids"}
"""A list of whole numbers for each turn."""
TEXTS = {"turns", "finish_reason"}
_LARGEST = 1e15
"""Beyond this a number counts and times nothing."""


def _misfit(choice: Record) -> str | None:
    """What is wrong with the lists of a choice, of which one has an entry a turn and another one a step."""
    kinds = ((TEXTS, _is_text, "texts"), (LISTS, _are_ids, "lists of ids"), (PER_TURN | PER_STEP, _counts, "numbers"))
    for keys, fine, what in kinds:
        for key in sorted(keys & choice.keys(), reverse=True):  # the turns before what is counted by them
            values = choice[key]
            if not isinstance(values, list) or not all(map(fine, values)):
                return f"{key} is no list of {what}"
            if key not in PER_STEP and len(values) != len(turns := choice.get("turns", values)):
                return f"{key} has {len(values)} entries for {len(turns)} turns"
    wrong = [key for key in ("accept_lengths", "tree_nodes", "tree_depths") if None in choice.get(key, ())]
    if wrong or type(choice.get("index", 0)) is not int:
        return f"{wrong[0] if wrong else 'index'} is no whole number everywhere"
    if known := sorted(PER_STEP & choice.keys()):
        if None in (counts := choice.get("decoding_steps", [None])):
            return f"has {known[0]}, but decoding_steps does not say how many are of each turn"
        for key in known:
            if len(choice[key]) != sum(counts):
                return f"{key} has {len(choice[key])} entries for {sum(counts)} steps"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _counts(value: Any) -> bool:
    """Whether a number counts or times something; None: it is not known."""
    return value is None or (type(value) in (int, float) and 0 <= value < _LARGEST)
