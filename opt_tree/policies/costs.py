"""What a step costs on one machine: seconds, linear in the rows of a forward and growing with the context.

Owns the arithmetic only. `opt_tree.pricing` measures the numbers; policies and controllers spend them.
"""

import dataclasses
import math
from dataclasses import dataclass

from opt_tree.step import Step


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a step take, everything around the forwards included.

    Linear in rows on purpose: the local slopes of a measured table are mostly noise, and a tree is cut at a slope.

        Costs(plain=5e-3, step=5.2e-3, row=1e-4, layer=9e-4, draft_row=2e-5).score(13)  # 6.5e-3
    """

    plain: float
    """A step without a tree: one token."""
    step: float
    """Scoring, judging and committing any tree; what its rows cost comes on top."""
    row: float
    """Each row of the tree, the root included."""
    layer: float
    """Drafting a layer: the forward, what it says, picking children."""
    draft_row: float
    """Each row of that forward."""
    growth: float = 0.0
    """By which part of itself the target's part grows with each token of context."""
    draft_growth: float = 0.0
    """The same of the drafter's part."""

    def __post_init__(self) -> None:
        for known in dataclasses.fields(self):
            value = getattr(self, known.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{known.name} must be 0 or more, and finite, got {value}")
        if not self.plain > 0 or not self.step + self.row > 0:
            raise ValueError(f"a step takes time: plain, and step or row, must be above 0, got {self}")

    def at(self, context: int) -> "Costs":
        """The same behind `context` tokens, with nothing left to grow."""
        target, draft = 1 + self.growth * context, 1 + self.draft_growth * context
        return Costs(
            self.plain * target,
            self.step * target,
            self.row * target,
            self.layer * draft,
            self.draft_row * draft,
        )

    def score(self, rows: int) -> float:
        """Seconds of everything behind the draft, of a tree of `rows` rows, the root included."""
        return self.plain if rows == 1 else self.step + self.row * rows

    def draft(self, layers: int, rows: int) -> float:
        """Seconds of drafting so many layers with so many rows in their forwards together."""
        return self.layer * layers + self.draft_row * rows

    def of(self, step: Step) -> float:
        """Modelled seconds of a step that is over; tables draft a layer without a forward."""
        layers = max(step.draft_forwards, int(step.tree.depths.max()))
        return self.score(len(step.tree)) + self.draft(layers, step.draft_tokens)
