"""What training commands are told on their command lines: how long, how fast, how deep, and judged over what.

Owns the defaults and the words of these options; a field that a subclass sets anew keeps its words. Imports no torch:
--help and a mistyped flag wait for nothing.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from opt_tree.system.command_line import option, whole_numbers
from opt_tree.training.command_line import existing

A = TypeVar("A")
B = TypeVar("B")

LAYOUTS = ("published", "speculators")
"""Of an EAGLE-3 head's folder."""
MARKOV = ("vanilla", "gated")
"""Kinds of Markov heads that know the parent alone."""


def read_pairs(text: str, between: str, first: Callable[[str], A], second: Callable[[str], B]) -> list[tuple[A, B]]:
    """Read `a:b,c:d` where `between` is a colon; ValueError for anything else."""
    try:
        return [(first(one), second(other)) for one, other in (part.split(between) for part in text.split(","))]
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of pairs, such as 1{between}2,3{between}4") from error


@dataclass(frozen=True)
class Pace(ABC):
    """How long and how fast a head is trained from hidden states; a subclass says how deep."""

    spec: ClassVar[str]
    """Kind of the drafter that it becomes."""
    judge: ClassVar[str]
    """The class of what is trained, a `Judge`: "module:class" of `opt_tree.training.heads`."""
    minutes: float = option(45.0, "of process time, of the whole run, resumed parts included")
    lr: float = option(5e-3, "highest learning rate; it falls linearly to nothing")
    tokens: int = option(3072, "of a batch, padding included")
    decay: float = option(0.8, "weight of each pass relative to the one before")
    average: float = option(0.0, "decay a step of a mean of the weights, which is what is kept; 0: the last ones")
    save_minutes: float = option(4.0, "between checkpoints")
    seed: int = option(0, "of weights, order and draws")

    @abstractmethod
    def passes(self, progress: float) -> int:
        """Return the number of passes, or of layers of a draft, at a share of the run."""

    def check(self, target: Any) -> None:
        """Raise ValueError for what cannot be trained for a target with this config."""
        if self.average >= 1:
            raise ValueError(f"--average stays below 1, got {self.average}")


@dataclass(frozen=True)
class Reduced:
    """Of a head with a draft vocabulary."""

    vocab: int = option(8192, "tokens of the draft vocabulary")


@dataclass(frozen=True)
class Judging(Pace):
    """The pace of a head that the target's own law judges: over which tokens, and how much its best one counts."""

    hard: float = option(0.0, "share that the target's best token alone gets of what is wanted")
    frequent: int = option(0, "most frequent tokens over which each step is judged; 0: all that are drafted")
    drawn: int = option(0, "others, drawn anew for each step")

    def check(self, target: Any) -> None:
        super().check(target)
        vocab = self.vocab if isinstance(self, Reduced) else target.vocab_size
        if self.hard > 1:
            raise ValueError(f"--hard goes up to 1, got {self.hard}")
        if (self.drawn and not self.frequent) or self.frequent + self.drawn > vocab:
            asked = f"--frequent {self.frequent} and --drawn {self.drawn} of a draft vocabulary of {vocab}"
            raise ValueError(f"{asked}: both 0 judge over all of it")


@dataclass(frozen=True)
class Unrolled(Reduced, Judging):
    """An EAGLE head in training: its passes over its own estimates. The defaults are EAGLE-3's, by its paper."""

    unroll: str = option("1:7", "share of the run:passes, each on the estimates of the one before")
    feature: float = option(0.0, "weight of SmoothL1 between what the output layer reads here and in the target")
    noise: float = option(0.0, "half-width of uniform noise on the features")

    def check(self, target: Any) -> None:
        self.passes(0.0)
        super().check(target)

    def passes(self, progress: float) -> int:
        stages = read_pairs(self.unroll, ":", float, int)
        ends = list(accumulate(share for share, _ in stages))
        if abs(ends[-1] - 1) > 1e-6:
            raise ValueError(f"the shares of {self.unroll!r} must sum to 1")
        return stages[min(bisect_right(ends, progress), len(stages) - 1)][1]


@dataclass(frozen=True)
class EaglePlan(Unrolled):
    """EAGLE-1 by its paper, which weighs feature and tokens by 1 and 0.1."""

    spec, judge = "eagle", "eagle:EagleLoss"
    unroll: str = "1:1"
    feature: float = 10.0
    noise: float = 0.1
    init: Path | None = option(None, "EAGLE-1 head to go on from, with an embedding of its own", type=existing)
    embedding: bool = option(False, "train the embedding too")

    def check(self, target: Any) -> None:
        super().check(target)
        if self.embedding and self.vocab < target.vocab_size:
            raise ValueError(f"--embedding goes with the whole vocabulary, --vocab {target.vocab_size}")


@dataclass(frozen=True)
class Eagle3Plan(Unrolled):
    """EAGLE-3: which layers it reads, what it begins as, how it is kept."""

    spec, judge = "eagle", "eagle3:Eagle3Loss"
    layout: str = option(LAYOUTS[0], "of the head's folder", choices=LAYOUTS)
    layers: tuple[int, ...] | None = option(
        None, "layers whose outputs it reads (default: the published ones)", type=whole_numbers
    )
    warm: bool = option(False, "begin as the target's last layer, keep its output rows")
    norm_before_residual: bool = option(False, "add to the normed feature, as in `speculators`")


@dataclass(frozen=True)
class MedusaPlan(Judging):
    """How many heads, and judged by what."""

    spec, judge = "medusa", "medusa:MedusaLoss"
    hard: float = 0.5
    frequent: int = 1024
    drawn: int = 256
    depths: int = option(5, "heads: layers of a draft")

    def passes(self, progress: float) -> int:
        return self.depths


@dataclass(frozen=True)
class ParallelPlan(Reduced, Judging):
    """How deep, and what a ParallelSpec head begins as."""

    spec, judge = "parallelspec", "parallel_spec:ParallelLoss"
    depths: int = option(5, "layers of a draft: the root's pair and the masks")
    init: Path | None = option(None, "EAGLE-1 head to begin as, but for its embedding", type=existing)

    def check(self, target: Any) -> None:
        super().check(target)
        if self.depths < 2:
            raise ValueError(f"--depths is at least 2, got {self.depths}")

    def passes(self, progress: float) -> int:
        return self.depths


@dataclass(frozen=True)
class ExitPlan(Judging):
    """Where the exit is, and judged by what."""

    spec, judge = "exit", "early_exit:ExitLoss"
    hard: float = 0.5
    depth: int = option(4, "layers of the target below the exit")

    def check(self, target: Any) -> None:
        super().check(target)
        layers = target.num_hidden_layers
        if not 0 < self.depth < layers:
            raise ValueError(f"--depth must be between 1 and {layers - 1}, the target has {layers} layers")

    def passes(self, progress: float) -> int:
        return 1


@dataclass(frozen=True)
class BlockPlan(Reduced, Pace):
    """A block drafter, and how many blocks a batch has: DFlash by its paper."""

    spec, judge = "dflash", "block:BlockLoss"
    lr: float = 3e-3
    decay: float = math.exp(-1 / 4)
    block: int = option(7, "places of a block that draft: layers of a draft")
    depth: int = option(5, "layers of the block's network")
    anchors: float = option(0.125, "blocks, as a share of the answers' tokens")
    layers: tuple[int, ...] | None = option(
        None, "layers that it reads (default: as many as it has, spread)", type=whole_numbers
    )
    mask: int | None = option(None, "token that stands for a mask (default: the target's padding)")

    def passes(self, progress: float) -> int:
        return self.block


@dataclass(frozen=True)
class JetSpecPlan(BlockPlan):
    """JetSpec by its paper: all places count alike."""

    decay: float = 1.0


@dataclass(frozen=True)
class DSparkPlan(BlockPlan):
    """DSpark: a block drafter with a Markov head."""

    spec = "dspark"
    rank: int = option(256, "of the Markov head")
    markov: str = option(MARKOV[0], "kind of the Markov head", choices=MARKOV)


KINDS: dict[str, type[Pace]] = {
    "eagle": EaglePlan,
    "eagle3": Eagle3Plan,
    "medusa": MedusaPlan,
    "parallelspec": ParallelPlan,
    "exit": ExitPlan,
    "dspark": DSparkPlan,
    "dflash": BlockPlan,
    "jetspec": JetSpecPlan,
}
"""What each kind of head is told. `spec` says by which name it drafts: `eagle3` as `eagle:`, `jetspec` as `dflash:`."""


@dataclass(frozen=True)
class Cut:
    """Which documents are kept, and how much of each."""

    prompt: int = 160  # tokens of the prompt kept, the last ones
    answer: int = 512  # tokens of the answer kept, the first ones
    shortest: int = 16  # answers of fewer tokens are left out
