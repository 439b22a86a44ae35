"""What training commands are told on their command lines: how long, how fast, how large, and which folder of corpora.

Owns the defaults and the words of these options. Imports no torch: --help and a mistyped flag wait for nothing.
"""

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

VARIABLE = "OPT_TREE_CORPUS"
OWN = "own"
"""The name under which a mixture counts a model's own outputs."""
LAYOUTS = ("published", "speculators")
"""Of an EAGLE-3 head's folder."""


def read_pairs(text: str, between: str, first: Callable[[str], A], second: Callable[[str], B]) -> list[tuple[A, B]]:
    """Read `a:b,c:d` where `between` is a colon; ValueError for anything else."""
    try:
        return [(first(one), second(other)) for one, other in (part.split(between) for part in text.split(","))]
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of pairs, such as 1{between}2,3{between}4") from error


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and in which portions a model is trained; `batch` and `micro_batch` count tokens.

    `rows` lists share:row length, in order: short rows are cheap on a CPU, long ones teach the late positions.
    """

    tokens: int = 0  # 0: the whole stream
    batch: int = 8192
    micro_batch: int = 2048  # of one forward pass of one process
    block: int = 2048
    rows: str = "0.62:256,0.34:512,0.04:2048"
    lr: float = 4e-3
    warmup: int = 100
    save_steps: int = 250  # between checkpoints, each with what is held out judged
    eval_blocks: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.row_lengths  # refused before anything is read

    @property
    def row_lengths(self) -> list[tuple[float, int]]:
        """Return `rows` as (share, length) pairs."""
        return read_pairs(self.rows, ":", float, int)


@dataclass(frozen=True)
class Pace(ABC):
    """How long and how fast a head is trained from hidden states; a subclass says how deep."""

    minutes: float = 45.0  # of the whole run, resumed parts included
    lr: float = 5e-3  # highest learning rate; it falls linearly to nothing
    tokens: int = 3072  # of a batch, padding included
    decay: float = 0.8  # weight of each pass relative to the one before
    average: float = 0.0  # decay a step of a running mean of the weights, which is what is kept; 0: the last ones
    save_minutes: float = 4.0  # between checkpoints
    seed: int = 0

    @abstractmethod
    def passes(self, progress: float) -> int:
        """Return the number of passes, or of layers of a draft, at a share of the run."""


@dataclass(frozen=True)
class Judging(Pace):
    """The same of a head that the target's own law judges: over which tokens, and how much its best one counts."""

    hard: float = 0.0  # share that the target's best token alone gets of what is wanted
    frequent: int = 0  # most frequent tokens over which each step is judged; 0: the whole draft vocabulary
    drawn: int = 0  # others, drawn anew for each step

    def check(self, vocab: int) -> None:
        """Raise ValueError for shares that are none, and for more tokens than a vocabulary of this size has."""
        if self.hard > 1 or self.average >= 1:
            raise ValueError(f"--hard goes up to 1, --average stays below it, got {self.hard} and {self.average}")
        if (self.drawn and not self.frequent) or self.frequent + self.drawn > vocab:
            raise ValueError(f"--frequent {self.frequent} and --drawn {self.drawn} of a draft vocabulary of {vocab}")


@dataclass(frozen=True)
class Shape:
    """The architecture of a new model; heads are `head_dim` wide whatever `hidden` is."""

    layers: int = 12
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512


@dataclass(frozen=True)
class Cut:
    """Which documents are kept, and how much of each."""

    prompt: int = 160  # tokens of the prompt kept, the last ones
    answer: int = 512  # tokens of the answer kept, the first ones
    shortest: int = 16  # answers of fewer tokens are left out


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add --data, which must name a corpus folder; $OPT_TREE_CORPUS does as well."""
    parser.add_argument(
        "--data", type=_folder, default=os.environ.get(VARIABLE, ""), help=f"corpus folder (default: ${VARIABLE})"
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(
            f'name a folder of corpora, here or in ${VARIABLE}: chat_*.jsonl.xz with {{"messages": [...]}} and '
            'text_*.jsonl.xz with {"text": ...} a line; '
            "opt_tree/models/embedded/README.md says where to get those used here"
        )
    try:
        corpus_names(Path(text))
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def corpus_names(folder: Path) -> list[str]:
    """Return the corpora of a folder, sorted; raise FileNotFoundError if there is none."""
    names = sorted(path.name.removesuffix(".jsonl.xz") for path in folder.glob("*_*.jsonl.xz"))
    if not names:
        raise FileNotFoundError(f"no chat_*.jsonl.xz or text_*.jsonl.xz in {folder}")
    return names
