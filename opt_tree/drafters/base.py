"""What a drafter answers: which tokens may follow these nodes, and how likely?

It answers in *scores*: log-probabilities up to a constant a row, of any float dtype, valid until the drafter runs
again. Logits are scores. Whatever wraps them on the way, they are normalised in one place, once
(`opt_tree.core.probabilities.log_probs_of`). -inf is never proposed, and a row of -inf says that nothing is known: the
node has no children. A drafter that knows a few tokens of each node only says just these (`Few`).
"""

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Few, Picking, Reduced
from opt_tree.core.pool import Frontier
from opt_tree.core.probabilities import log_probs_of
from opt_tree.core.step import Outcome
from opt_tree.core.target import Laws, Output, Work
from opt_tree.models.chain_lm import AnyLM


class Drafter(ABC):
    """Proposes continuations. Knows nothing of budgets or of verification.

    Per prompt: `reset`, then per step `root`, any number of `expand`, `scored` and `observe`. A step without drafting
    calls neither `root` nor `expand`, but the others still.
    """

    features: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads (see `Target.watch`)."""
    logits: bool = False
    """Whether it reads the target's logits of every row. The prefill then has those of all prompt tokens."""
    sparse: bool = False
    """Whether it answers in `Few`. Deterministic children only: what is drawn needs the whole distribution."""
    learns: bool = False
    """Whether it keeps what a prompt has taught it for the next one, until `clear`."""
    any_order: bool = False
    """Whether `expand` may go back: to nodes above the layer that it was asked for last, in the same step."""
    max_context: int = 1 << 30
    """Tokens of context it can draft for; beyond, decoding goes on without a draft."""
    models: tuple[AnyLM, ...] = ()
    """The models it runs, for the loop to count what a step cost."""
    alone: str | None = None
    """Why it drafts for one sequence at a time only, where it does."""
    name: str = ""
    """What it was loaded from, where it was."""
    generation: int = 0
    """How many prompts it has begun. The loop counts: a second generation with the same drafter ends the first."""

    ended: bool = False
    """Whether a warning has said that the context is behind `max_context`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.name and ' ' + self.name}>"

    def room(self, length: int) -> int:
        """How many layers it can draft behind so many tokens of context; 0 or less: none."""
        return self.max_context - length

    @abstractmethod
    def reset(self, prompt: list[int], output: Output | None) -> None:
        """Begin a new prompt. `output` is the target's prefill of `prompt[:-1]`, None for a prompt of one token."""

    def holds(self, prompt: list[int]) -> int:
        """How many of the first tokens of `prompt` the target need not run for it: of these it knows all it reads.

        0, the default: it begins every prompt anew, and so does the target. As many as there are: it reads nothing.
        """
        return 0

    def resume(self, prompt: list[int], kept: int, output: Output) -> None:
        """Begin a prompt of whose first tokens the target kept `kept`, above 0 and at most what `holds` said.

        `output` is the target's prefill of `prompt[kept:-1]`, of one token at least. As it stands, a `reset`.
        """
        self.reset(prompt, output)

    def clear(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what other prompts have taught. As it stands, nothing is learnt beyond a prompt."""

    @abstractmethod
    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Few | Reduced:
        """Return the scores of the token after the whole context."""

    @abstractmethod
    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Few | Reduced:
        """Return the scores of the token after each node of the frontier."""

    def root_laws(self, context: list[int], picking: Picking = Picking()) -> Laws:
        """Return `root`'s scores times `picking.scale`, normalised: what deterministic children are picked from.

        A drafter whose model does that where it computes (see `CausalLM.extend`) answers by it, and with the children
        where its model picks them, too.
        """
        return normalised(self.root(context), picking.scale)

    def expand_laws(self, frontier: Frontier, picking: Picking = Picking()) -> Laws:
        """The same of `expand`."""
        return normalised(self.expand(frontier), picking.scale)

    def scored(self, output: Output) -> None:  # noqa: B027 - most read it in `observe`
        """Meet what the target says of the tree, before the verdict is read: copies that `observe` needs begin here."""

    @abstractmethod
    def observe(self, outcome: Outcome) -> None:
        """Learn what survived: keep the cache rows that stay valid, drop the others."""

    def at_temperature(self, temperature: float) -> "Drafter":
        """Return the drafter to use for a target decoded at `temperature`."""
        return self

    @property
    def work(self) -> Work:
        """What its models have done so far."""
        if len(self.models) == 1:
            return self.models[0].work
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


def normalised(answer: Float[Tensor, "rows vocab"] | Few | Reduced, scale: float = 1.0) -> Laws:
    """Return the distributions that an answer means, its scores times `scale`. `Few` is normalised already."""
    if isinstance(answer, Few):
        if scale != 1:
            raise TypeError("a drafter that names a few tokens only cannot be sharpened")
        return Laws(*answer)
    if isinstance(answer, Reduced):
        return Laws(log_probs_of(scaled(answer.scores, scale)), answer.tokens)
    return Laws(log_probs_of(scaled(answer, scale)))


def scaled(scores: Float[Tensor, "rows columns"], scale: float) -> Float[Tensor, "rows columns"]:
    """Return scores times a number, in float32 or wider."""
    if scale == 1:
        return scores
    # A widened copy is ours to overwrite; scores that are wide enough are not.
    return scores * scale if scores.dtype.itemsize >= 4 else scores.float().mul_(scale)


class DrafterAround(Drafter):
    """A drafter that asks another one, `drafter`, and changes what goes in or comes out; as it stands, nothing.

    One that is made of several names them in `parts`: each begins every prompt. A subclass with a `reset` of its own
    begins anew unless it has a `resume` as well.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.features, self.logits, self.sparse = drafter.features, drafter.logits, drafter.sparse
        self.max_context, self.models, self.name = drafter.max_context, drafter.models, drafter.name
        self.alone, self.learns = drafter.alone, drafter.learns
        self.parts: tuple[Drafter, ...] = (drafter,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {' and '.join(map(repr, self.parts))}>"

    def reset(self, prompt: list[int], output: Output | None) -> None:
        for part in self.parts:
            part.reset(prompt, output)

    def room(self, length: int) -> int:
        return self.drafter.room(length)

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def holds(self, prompt: list[int]) -> int:
        own = type(self)
        if own.reset is not DrafterAround.reset and own.resume is DrafterAround.resume:
            return 0
        return min(part.holds(prompt) for part in self.parts)

    def resume(self, prompt: list[int], kept: int, output: Output) -> None:
        for part in self.parts:
            part.resume(prompt, kept, output)

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Few | Reduced:
        return self.drafter.root(context)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Few | Reduced:
        return self.drafter.expand(frontier)

    def scored(self, output: Output) -> None:
        for part in self.parts:
            part.scored(output)

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)

    @property
    def work(self) -> Work:
        return self.drafter.work

    @property
    def bare(self) -> Drafter:
        return self.drafter.bare

    def describe(self) -> str:
        return self.drafter.describe()

    @property
    def settings(self) -> dict[str, Any]:
        return self.drafter.settings
