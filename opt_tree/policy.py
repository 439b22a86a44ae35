"""What a tree policy answers: which candidates to draft below next, and which go to the target; OPT-Tree's answer."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from opt_tree.children import Children, LogProbs, TopK
from opt_tree.errors import require
from opt_tree.generation import Outcome, Step
from opt_tree.pool import CandidatePool
from opt_tree.target import Output

MOST_NODES = 4096
"""Drafted nodes of a tree at most. Attention takes a number for each pair of rows: 64 MiB a head at this size."""


def check_sizes(least: int = 1, /, **sizes: float) -> None:
    """Raise TypeError or ValueError unless all are whole, from `least` to `MOST_NODES`: nodes, layers, children."""
    require(Real, **sizes)
    for name, size in sizes.items():
        if not size >= least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if size > MOST_NODES:
            raise ValueError(f"{name} must be at most {MOST_NODES}, got {size}")
        if size != int(size):
            raise ValueError(f"{name} must be a whole number, got {size}")


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
        """Return the rows of the newest layer whose children, the next layer, are drafted; None, or no row, to stop."""
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


@dataclass(frozen=True)
class OptTree(TreePolicy):
    """Maximise E(A) under a node budget; draft another layer while it pays (arXiv:2406.17276, Alg. 1).

    The path probability of a node never exceeds its parent's, so the n best candidates are a tree (Thm 3.1) and their
    sum is E(A). With `threshold=0` drafting ends by itself when no unexpanded candidate is among the n best: no
    descendant can enter any more, and the tree is optimal over all trees of n nodes and `max_depth` layers.
    Example, n = 3, root distribution (.6, .3, .1), below the first child (.45, .4, .15):

          root            layer 1: .6 .3 .1    E = 1.0
         /    \\           layer 2: .27 .24     the best three are now .6 .3 .27: gain .17, the .1 is out
       .6      .3
       |
      .27                 E(A) = 1.17
    """

    nodes: int = 60
    """The paper's n: drafted nodes sent to the target, root excluded."""
    threshold: float = 0.5
    """The paper's delta: drafting stops when the newest layer raised E(A) by no more than this. 0.5 is the value of the
    published commands. Of a calibrated drafter 0.2 loses nothing and 0.5 a few per cent; a small bare one wants 0 to
    0.05, and loses 17 to 28 % of its tokens at 0.5 (results/thresholds.md). The paper takes a value between the time of
    a draft step, in decoding steps, and 1 (section 4.4)."""
    max_depth: int = 10
    """Layers drafted at most, the published commands' number (the paper's is n). All of them can be in the tree."""

    def __post_init__(self) -> None:
        require(Real, threshold=self.threshold)
        if self.nodes == 0:
            raise ValueError("nodes must be at least 1, got 0 (for plain decoding use Static.empty())")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")
        check_sizes(nodes=self.nodes, max_depth=self.max_depth)

    @cached_property
    def children(self) -> TopK:
        # A candidate outside the pool's n best can never come back, nor can anything below it.
        return TopK(total=self.nodes)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Expand the newest nodes above the n-th best candidate (only their descendants can be among the n best)."""
        # E_sub(T, n) with the newest layer minus E_sub without it.
        if pool.gain(self.nodes) <= self.threshold:
            return None
        # Whoever only equals the n-th best cannot have a child above it, and ties go to the older node.
        return pool.newest[pool.path_log_probs[pool.layer :] > pool.floor]

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return pool.best(self.nodes)
