"""What a controller answers: which tree policy for the next step?

It sees the past only: steps that are over, and, where it says so, what the drafter says of the next token. Nothing has
been drawn for the step when it chooses, so that whatever it does the output stays exact.
"""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Few
from opt_tree.core.step import Outcome, Step
from opt_tree.core.target import Output
from opt_tree.policies import TreePolicy
from opt_tree.verifiers import Verifier

DECAY = 0.99
"""Where tokens a second are learned, a step counts so much of the next one."""


class Controller(ABC):
    """Chooses a policy before each step and learns from the step.

    Per prompt: `reset`, then per step `choose` and `observe`.
    """

    policies: tuple[TreePolicy, ...]
    """All that it may choose: the `Decoder` checks each against its verifier once, and refuses any other."""
    features: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads (see `Target.watch`)."""
    reads_root: bool = False
    """Whether `choose` is shown the drafter's scores of the next token; the drafter is then asked in every step."""

    verifiers: tuple[Verifier, ...] = ()
    """Those that it may have a step judged by above temperature 0, in place of the decoder's: each is checked with each
    of the policies."""
    verifier: Verifier | None = None
    """The one for the step that it chose for last; None: the decoder's."""

    def reset(self, prompt: list[int], output: Output | None) -> None:
        """Begin a new prompt. `output` is the target's prefill of `prompt[:-1]`, None for a prompt of one token.

        Of a text that goes on from its cache (`reuse=True`) it has the tokens that are new, the last one among them.

        What was learned may stay; by default nothing happens.
        """
        return None

    @abstractmethod
    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        """Return one of `policies` for the step that continues `context`.

        `root`: the drafter's scores of the token after the context where `reads_root`, else None. None also where there
        is no room to draft.
        """

    def in_lanes(self, lanes: int) -> "Controller | None":
        """One that several sequences side by side share, to decide together (`opt_tree.core.meeting`).

        None, which is the default: each has a copy of this one.
        """
        return None

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Learn from a step: what it cost, what survived. By default nothing happens."""
        return None
