"""What comes out of a generation: what a step left and cost, and the finished answer. Records, which run no model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Generation:
    """A finished generation: the new tokens, why it ended, and every step of it."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    """"length" (max_new_tokens), "context" (the model's context is full), or what the stop rule said."""
    steps: list[Step] = field(repr=False)
    accept_lengths: list[int]
    """Tokens emitted by each step, accepted + 1, the last step trimmed where the generation stopped."""
    seconds: float
    """Wall time of everything, prefill included."""
    lanes: int = 1
    """How many sequences were decoded side by side. Above 1 all times are of the batch: others' work is in them."""
    reused: int = 0
    """Tokens of the prompt that the target did not take in, as its cache held them already (`reuse=True`)."""
    log_probs: list[float] | None = field(default=None, repr=False)
    """Of each token, its log-probability in the target's processed distribution (`recorder=`)."""
    top_log_probs: list[dict[int, float]] | None = field(default=None, repr=False)
    """Of each place, the likeliest tokens with their log-probabilities, the likeliest first."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step (the literature's MAL or tau): mean of accepted + 1; 1.0 for plain decoding."""
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1)

    @property
    def expected_lengths(self) -> list[float]:
        """E(A) + 1 of each step: what the drafter led to expect of `accept_lengths`."""
        return [step.expected_accepted + 1 for step in self.steps]

    @property
    def prefill_seconds(self) -> float:
        return self.steps[0].times.prefill if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return len(self.tokens) / self.seconds
