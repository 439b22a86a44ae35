"""What training commands are told on their command lines: how long, how fast, how deep, and judged over what.

Owns the defaults and the words of these options. Imports no torch: --help and a mistyped flag wait for nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

LAYOUTS = ("published", "speculators")
"""Of an EAGLE-3 head's folder."""


def read_pairs(text: str, between: str, first: Callable[[str], A], second: Callable[[str], B]) -> list[tuple[A, B]]:
    """Read `a:b,c:d` where `between` is a colon; ValueError for anything else."""
    try:
        return [(first(one), second(other)) for one, other in (part.split(between) for part in text.split(","))]
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of pairs, such as 1{between}2,3{between}4") from error


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
            asked = f"--frequent {self.frequent} and --drawn {self.drawn} of a draft vocabulary of {vocab}"
            raise ValueError(f"{asked}: both 0 judge over all of it")


@dataclass(frozen=True)
class Cut:
    """Which documents are kept, and how much of each."""

    prompt: int = 160  # tokens of the prompt kept, the last ones
    answer: int = 512  # tokens of the answer kept, the first ones
    shortest: int = 16  # answers of fewer tokens are left out
