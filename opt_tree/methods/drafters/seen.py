"""A drafter around another one that notes what its model says of the root: what a selector of trees reads.

Owns the noting only; `opt_tree.methods.controllers.selected` says what is done with it.
"""

from dataclasses import replace
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output

LAST = -1
"""The model's final hidden state."""


class Noted(NamedTuple):
    """What a drafter's model left of one token."""

    state: Float[Tensor, "1 hidden"]
    logits: Float[Tensor, "1 columns"]


class Seen(DrafterAround):
    """The same drafter; what its model says of the root and of the token before it is noted.

    Raises CheckpointError for a drafter that runs no model, or several, or names a few tokens only.
    """

    def __init__(self, drafter: Drafter) -> None:
        if len(drafter.models) != 1 or drafter.names_few:
            raise CheckpointError(
                f"{drafter.describe()} runs {len(drafter.models)} models, and a selector of drawn trees reads the "
                "hidden states and the whole distribution of one"
            )
        super().__init__(drafter)
        drafter.models[0].watch((LAST,))
        self._forget()

    def _forget(self) -> None:
        self.before: Noted | None = None
        """Of the token before the root; None: not known, at a text's first step."""
        self.rows: list[Noted] = []
        """By draft row: the root, then the nodes that were expanded."""

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self._forget()

    def root(self, context: list[int]) -> Asked:
        self.rows = []
        asked = super().root(context)
        return replace(asked, last_only=False) if isinstance(asked, Forward) else asked

    def read(self, output: Output) -> Asked:
        both = (output.features[LAST], output.logits)
        new = [Noted(*(part[row : row + 1].float().clone() for part in both)) for row in range(len(output.logits))]
        if self.rows:
            self.rows += new
        else:  # what was caught up with
            self.before, self.rows = new[-2] if len(new) > 1 else self.before, new[-1:]
            best = None if output.best is None else output.best[:, -1:]
            output = output._replace(logits=output.logits[-1:], best=best)
        return super().read(output)

    def accept(self, outcome: Outcome) -> None:
        row = outcome.tree.draft_rows[outcome.path[-1]]
        # An accepted leaf was not run: it is caught up with, and noted then.
        self.before = self.rows[row] if 0 <= row < len(self.rows) else None
        super().accept(outcome)
