"""What a tree policy answers: which candidates to draft below next, and which go to the target."""

from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from opt_tree.children import Children, LogProbs
from opt_tree.errors import require
from opt_tree.generation import Outcome, Step
from opt_tree.pool import CandidatePool
from opt_tree.target import Output

MOST_NODES = 4096
"""Drafted nodes of a tree at most. Attention takes a number for each pair of rows: 64 MiB a head at this size."""


def check_sizes(least: int = 1, /, **sizes: float) -> None:
    """Raise TypeError or ValueError unless all are numbers from `least` to `MOST_NODES`: nodes, layers, children."""
    require(Real, **sizes)
    for name, size in sizes.items():
        if not size >= least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if size > MOST_NODES:
            raise ValueError(f"{name} must be at most {MOST_NODES}, got {size}")


class TreePolicy:
    """Grows a tree from what is in the pool: a frozen dataclass with `children`, `max_depth`, `expand` and `select`.

    A controller chooses another one for each step: it sets `policies`, has a `choose`, and may learn in `begin`, called
    per prompt, and in `observe`, called per step. Nothing has been drawn for the step when it chooses, so the output
    stays exact. Each text decoded beside others has a copy.
    """

    if TYPE_CHECKING:  # declared and not made: a subclass has them as fields, too, which a property here would forbid

        @property
        def children(self) -> Children:
            """How siblings are picked; a verifier is valid for some kinds only."""

        @property
        def max_depth(self) -> int:
            """Layers it drafts at most; 0 is the empty tree, that is plain decoding."""

    features: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads (see `Target.watch`)."""
    reads_root: bool = False
    """Whether `choose` is shown the drafter's scores of the next token; the drafter is then asked in every step."""

    @cached_property
    def policies(self) -> "tuple[TreePolicy, ...]":
        """All that it may choose: the `Decoder` checks each once, and refuses any other. By default itself alone."""
        return (self,)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Return the rows of the newest layer whose children, the next layer, are drafted; or None to stop."""
        raise NotImplementedError(f"{type(self).__name__} grows no tree")

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        """Return the pool rows that go to the target: the root among them, closed under parents."""
        raise NotImplementedError(f"{type(self).__name__} grows no tree")

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        """Begin a new prompt. `prefill`: the target's of `prompt[:-1]`, None where that is empty.

        Of a text that goes on from its cache (`reuse=True`): the target's of its new tokens, the last one among them.
        """

    def choose(self, context: list[int], root: LogProbs | None) -> "TreePolicy":
        """Return one of `policies` for the step that continues `context`; by default itself.

        `root`: the drafter's scores of the token after the context where `reads_root` and there is room to draft.
        """
        return self

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Learn from a step: what it cost, what survived."""


def check_grows(policy: object) -> None:
    """Raise TypeError unless it is a policy that grows trees itself; a controller leaves that to those it chooses."""
    if not isinstance(policy, TreePolicy):
        raise TypeError(f"{policy!r} is no TreePolicy, such as OptTree(nodes=16)")
    if policy not in policy.policies:
        raise TypeError(f"{type(policy).__name__} chooses among policies and grows no tree itself")
    for part in ("children", "max_depth"):
        if not hasattr(policy, part):
            raise TypeError(f"{type(policy).__name__} grows no tree: it has no {part}")
