"""Who drafts: asked which tokens may follow, it answers, or asks whoever drives the loop for a forward first."""

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, Self

from opt_tree.children import LogProbs
from opt_tree.errors import require
from opt_tree.generation import Outcome
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Asking, Forward, Output, Work

Asked = Forward | LogProbs
"""What a drafter says when it is asked: an answer, or a forward that it needs first."""


class Drafter(ABC):
    """Proposes continuations. Knows nothing of budgets and of verification.

    Per text: `begin`, then per step `root`, any number of `expand`, and `accept`; a step without drafting calls
    `accept` alone. Each forward that is asked for is computed, and `read` is given what came of it.
    """

    features: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads (see `Target.watch`)."""
    reads_logits: bool = False
    """Whether it reads the target's logits of every row. The prefill then has those of all prompt tokens."""
    names_few: bool = False
    """Whether it names a few tokens of each node (see `LogProbs.tokens`): no children can be drawn from these."""
    learns: bool = False
    """Whether it keeps what a text has taught it for the next one, until `clear`."""
    max_context: int = 1 << 30
    """Tokens of context it can draft for; beyond, decoding goes on without a draft."""
    models: tuple[Any, ...] = ()
    """The models it runs, for the loop to count what a step cost."""
    alone: str | None = None
    """Why it drafts for one sequence at a time only, where it does."""
    name: str = ""
    """What it was loaded from, where it was."""
    generation: int = 0
    """How many texts it has begun. The loop counts: a second generation with the same drafter ends the first."""
    temperature: float = 1.0
    """What its scores are divided by for a greedy target; see `calibrated`."""
    scale: float = 1.0
    """What its scores are multiplied by for the text under way."""
    ended: bool = False
    """Whether a warning has said that the context is behind `max_context`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.name and ' ' + self.name}>"

    def room(self, length: int) -> int:
        """How many layers it can draft behind so many tokens of context, the root among them; 0 or less: none."""
        return self.max_context - length

    def keeps(self, prompt: list[int]) -> int:
        """How many of the first tokens of `prompt` the target need not run for it: of these it knows all it reads."""
        return 0

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        """Begin a text. A subclass extends this.

        `kept`: how many of its first tokens the target kept, at most what `keeps` said; above 0, `prefill` is there.
        `prefill`: the target's answer to `prompt[kept:-1]`; None where that is empty, for a prompt of one token.
        `sampling`: how the target is decoded; scores are calibrated for greedy targets only.
        """
        self.scale = 1 / self.temperature if sampling.greedy else 1.0

    def clear(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what other texts have taught."""

    @abstractmethod
    def root(self, context: list[int]) -> Asked:
        """Ask about the token after the whole context: one row."""

    @abstractmethod
    def expand(self, frontier: Frontier) -> Asked:
        """Ask about the token after each node of the frontier: a row for each."""

    def read(self, output: Output) -> Asked:
        """Read what came of the forward that was asked for last: the answer, or one more forward."""
        raise NotImplementedError(f"{type(self).__name__} asks for a forward and does not read it")

    def scored(self, output: Output) -> None:  # noqa: B027 - most read it in `accept`
        """Meet what the target says of the tree, before the verdict is read: copies that `accept` needs begin here."""

    @abstractmethod
    def accept(self, outcome: Outcome) -> None:
        """Learn what survived: keep the cache rows that stay valid, drop the others."""

    def calibrated(self, temperature: float) -> Self:
        """Let it say how likely a token is what a greedy target chooses; return the drafter itself.

        Its scores are divided by `temperature` where the target is greedy: there the right score of a token is the
        probability that it is the target's argmax. 1: not calibrated. Raises TypeError for a drafter that names a few
        tokens only, and ValueError for a temperature that is not positive.
        """
        require(Real, temperature=temperature)
        if not temperature > 0:
            raise ValueError(f"the temperature of a calibration must be positive, got {temperature}")
        if self.names_few and temperature != 1:
            raise TypeError(f"{type(self).__name__} names a few tokens only: they cannot be calibrated")
        self.temperature = float(temperature)
        return self

    @property
    def work(self) -> Work:
        """What its models have done so far."""
        return sum((model.work for model in self.models), Work())

    @property
    def bare(self) -> "Drafter":
        """The drafter inside, where this one wraps another; else itself."""
        return self

    def describe(self) -> str:
        """Say in a few words what drafts, for a reader of a table."""
        return type(self).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """What of it decides the answers, for the header of an answer file."""
        return {}


def answer_of(drafter: Drafter, asked: Asked) -> Asking[LogProbs]:
    """Ask for the forwards that a drafter needs before it answers."""
    while isinstance(asked, Forward):
        asked = drafter.read((yield asked))
    return asked
