"""One step of decoding: what was drafted, what survived, what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from opt_tree.tree import Tree


@dataclass(frozen=True, eq=False)
class Outcome:
    """What verification left of a tree, for those who learn from it. Valid until the target runs again."""

    tree: Tree
    path: list[int]
    """Accepted rows of the tree, root first."""
    tokens: list[int]
    """The emitted tokens: the path's behind the root, then the target's own."""
    features: Mapping[int, Float[Tensor, "path hidden"]]
    """The target's hidden states of the path's rows by layer, of the layers that are watched."""
    logits: Float[Tensor, "rows vocab"]
    """The target's logits of every row of the tree, as the model gave them."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. `draft_forward` and `target_forward` are the bare models, parts of `draft` and `verify`."""

    draft: float
    """Growing the tree: the drafter's forwards, what it says of them, the pool, the policy."""
    verify: float
    """Scoring the tree and judging it: the target's forward, sampling, the verdict's read-back."""
    commit: float
    """Moving the accepted rows in both caches."""
    draft_forward: float
    target_forward: float
    prefill: float = 0.0
    """The prompt's prefill, on the first step only; not part of the step."""

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit

    @property
    def other(self) -> float:
        """Everything outside the two models' forwards."""
        return self.total - self.draft_forward - self.target_forward


@dataclass(frozen=True, eq=False)
class Step:
    """Draft, score, verify, commit: what remains of an `Outcome`, and its cost. Small enough to keep."""

    tree: Tree
    path: list[int]
    tokens: list[int]
    """See `Outcome` for both."""
    policy: Any
    """The tree policy of this step."""
    draft_forwards: int
    draft_tokens: int
    """Tokens that went through the drafter's models, catching up with the context included."""
    times: StepTimes

    @property
    def accepted(self) -> int:
        """Accepted draft tokens: the paper's A without the target's own token."""
        return len(self.path) - 1

    @property
    def expected_accepted(self) -> float:
        """E(A) of the tree that was verified; compare it with `accepted`."""
        return self.tree.expected_accepted
