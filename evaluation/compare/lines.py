"""What a line of a comparison holds: the combination, its figures, what its drafter weighs, and the answers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.comparison import Efficiency, figures
from evaluation.answers.file import Record
from evaluation.compare.combinations import Combination
from opt_tree import Step
from opt_tree.methods.drafters.registry import folders_of
from opt_tree.models.checkpoints import read_minutes

WEIGHTS = (".safetensors", ".bin", ".pt")


def line_of(
    one: Combination, answers: Sequence[Record], plain: Sequence[Record], first: Step, efficiency: Efficiency
) -> Record:
    """The line of a combination, of its answers and plain decoding's; `first`: the first step of the first answer."""
    tree = first.tree
    return {
        "question_id": one.key,
        "code": one.code,
        "cell": dataclasses.asdict(one),
        "figures": figures(answers, plain, efficiency) | footprint(one.drafter),
        "first_tree": {
            "parents": tree.parents.tolist(),
            "log_probs": tree.path_log_probs.round(4).tolist(),
            "path": first.path,
        },
        "answers": [slim(answer) for answer in answers],
        "plain": [slim(answer) for answer in plain],
    }


def slim(answer: Record) -> Record:
    """Without what no figure needs."""
    dropped = ("prompt_ids", "token_ids", "idxs")
    choices = [{key: value for key, value in choice.items() if key not in dropped} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def footprint(spec: str) -> dict[str, Any]:
    """Bytes on disk and minutes of training, over all parts; None where a part that has weights does not say.

    A table that learns as it goes weighs nothing and was trained for no time.
    """
    folders = [Path(folder) for folder in folders_of(spec)]
    minutes = [read_minutes(str(folder)) for folder in folders]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.suffix in WEIGHTS]
    known = all(folder.is_dir() for folder in folders)
    return {
        "weights_bytes": sum(file.stat().st_size for file in files) if known else None,
        "training_minutes": None if None in minutes else sum(minute or 0.0 for minute in minutes),
    }
