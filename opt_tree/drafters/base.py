"""What a drafter answers: which tokens may follow these nodes, and how likely?

It answers in *scores*: log-probabilities up to a constant a row, of any float dtype, valid until the drafter runs
again. Logits are scores; -inf is never proposed. Whatever wraps them on the way, they are normalised in one place, once
(`opt_tree.probabilities.log_probs_of`).
"""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from opt_tree.lm import Output
from opt_tree.pool import Frontier
from opt_tree.step import Step


class Drafter(ABC):
    """Proposes continuations. Knows nothing of budgets or of verification.

    Per prompt: `reset`, then per step `root`, any number of `expand`, and `observe`. A step without drafting calls
    neither `root` nor `expand`, but `observe` still.
    """

    features: bool = False
    """Whether it reads the target's final hidden states."""
    max_context: int = 1 << 30
    """Tokens of context it can draft for; beyond, decoding goes on without a draft."""
    forwards: int = 0
    """Forwards so far, and the tokens in them; only their differences are read."""
    tokens: int = 0
    forward_seconds: float = 0.0
    """Time spent inside bare models so far."""

    @abstractmethod
    def reset(self, prompt: list[int], output: Output | None) -> None:
        """Begin a new prompt. `output` is the target's prefill of `prompt[:-1]`, None for a prompt of one token."""

    @abstractmethod
    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"]:
        """Return the scores of the token after the whole context."""

    @abstractmethod
    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"]:
        """Return the scores of the token after each node of the frontier."""

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Learn what survived: keep the cache rows that stay valid, drop the others."""

    def at_temperature(self, temperature: float) -> "Drafter":
        """Return the drafter to use for a target decoded at `temperature`."""
        return self


class DrafterAround(Drafter):
    """A drafter that asks another one, `drafter`, and changes what goes in or comes out; as it stands, nothing."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.features, self.max_context = drafter.features, drafter.max_context

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return self.drafter.forwards

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return self.drafter.tokens

    @property
    def forward_seconds(self) -> float:  # type: ignore[override]
        return self.drafter.forward_seconds

    def reset(self, prompt: list[int], output: Output | None) -> None:
        self.drafter.reset(prompt, output)

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"]:
        return self.drafter.root(context)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"]:
        return self.drafter.expand(frontier)

    def observe(self, step: Step) -> None:
        self.drafter.observe(step)
