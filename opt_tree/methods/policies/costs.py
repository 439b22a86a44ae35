"""What a step costs on one machine: seconds by the rows of its forwards, growing with the context.

Owns the arithmetic only. `opt_tree.tools.step_costs` measures the numbers; policies and controllers spend them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from opt_tree.generation import Generation, Step

Curve = tuple[tuple[int, float], ...]
"""Seconds by rows: points (rows, seconds), rows rising. Linear between, and behind the last as on average over the last
half of the points."""
LARGEST = 256
"""Rows that a curve is asked for at most; what has more costs as much."""
CATCHING_UP = 2
"""Rows of a step's first draft forward, about: what came of the last step and was not drafted there."""
AHEAD = 24
"""Further rows that are looked at."""
DECAY = 0.99
"""Where tokens a second are learned, a step counts so much of the next one."""


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a step take, everything around the forwards included.

    A tree of R rows (its nodes and the root) that was drafted in L layers, behind c tokens, with r rows in all draft
    forwards behind the first:

        (1 + growth c) T(R) + (1 + draft_growth c) (first + (L - 1) D(r / (L - 1)))

    T is `scoring`, T(1) a step without a tree, and D is `drafting`. Straight lines are curves, too:

        Costs.straight(plain=5e-3, step=5.2e-3, row=1e-4, layer=9e-4, draft_row=2e-5).score(13)  # 6.5e-3
    """

    scoring: Curve
    """Scoring, judging and committing a tree of so many rows, the root included; of one row: a step without a tree."""
    first: float
    """The root's forward and first layer, and selecting the tree: what every tree costs that is drafted."""
    drafting: Curve
    """Each further layer by the rows of its forward: the forward, what it says, picking children."""
    growth: float = 0.0
    """By which part of itself the target's part grows with each token of context."""
    draft_growth: float = 0.0
    """The same of the drafter's part."""
    context: int = 0
    """Tokens before the tree."""

    def __post_init__(self) -> None:
        for name in ("scoring", "drafting"):
            _check(name, getattr(self, name))
        for name in ("first", "growth", "draft_growth", "context"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, and finite, got {value}")
        if self.scoring[0][0] != 1 or not self.scoring[0][1] > 0:
            raise ValueError(f"scoring must begin with 1 row, a step without a tree, above 0 seconds: {self.scoring}")

    @classmethod
    def straight(
        cls,
        plain: float,
        step: float,
        row: float,
        layer: float,
        draft_row: float,
        growth: float = 0.0,
        draft_growth: float = 0.0,
    ) -> Self:
        """Costs linear in rows: a step without a tree, any tree and each of its rows, a layer and each of its rows."""
        scoring = ((1, plain), (2, max(plain, step + 2 * row)), (LARGEST, max(plain, step + LARGEST * row)))
        drafting = ((1, layer + draft_row), (LARGEST, layer + LARGEST * draft_row))
        return cls(scoring, layer + draft_row, drafting, growth, draft_growth)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Costs from what JSON makes of `dataclasses.asdict(costs)`. TypeError or ValueError for anything else."""
        curves = {
            name: tuple((int(rows), float(seconds)) for rows, seconds in fields[name])
            for name in ("scoring", "drafting")
            if name in fields
        }
        return cls(**{**fields, **curves})

    def at(self, context: int) -> Self:
        """The same behind `context` tokens."""
        return replace(self, context=context)

    @property
    def plain(self) -> float:
        """A step without a tree: one token."""
        return self.score(1)

    @property
    def row(self) -> float:
        """What each further row of a small tree costs on average: the curve's chord from 2 to 17 rows.

        A step of the curve belongs to the number of rows, and not to the node that happens to be the first behind it.
        """
        table = _table(self.scoring)
        return float(table[17] - table[2]) / 15 * (1 + self.growth * self.context)

    def score(self, rows: int) -> float:
        """Seconds of everything behind the draft, of a tree of `rows` rows, the root included."""
        return float(_table(self.scoring)[min(rows, LARGEST)]) * (1 + self.growth * self.context)

    def scores(self, most: int) -> Float[np.ndarray, " sizes"]:
        """The same of trees of 1 to `most` rows."""
        return _table(self.scoring)[1 : most + 1] * (1 + self.growth * self.context)

    def further(self, most: int) -> Float[np.ndarray, " sizes"]:
        """Seconds of each row that is added to trees of 1 to `most` rows, where they add what costs least a row."""
        return _further(self.scoring)[1 : most + 1] * (1 + self.growth * self.context)

    def layers(self, most: int) -> Float[np.ndarray, " sizes"]:
        """Seconds of one more layer with 1 to `most` rows in its forward."""
        return _table(self.drafting)[1 : most + 1] * (1 + self.draft_growth * self.context)

    def draft(self, layers: int, rows: int) -> float:
        """Seconds of drafting so many layers, with `rows` in all forwards behind the first, as many in each."""
        if layers == 0:
            return 0.0
        each = rows / max(layers - 1, 1)
        below, table = min(int(each), LARGEST - 1), _table(self.drafting)
        further = (layers - 1) * float(table[below] + (each - below) * (table[below + 1] - table[below]))
        return (self.first + further) * (1 + self.draft_growth * self.context)

    def of(self, step: Step) -> float:
        """Modelled seconds of a step that is over; tables draft a layer without a forward, or are asked for nothing."""
        layers = max(step.draft_forwards, *step.tree.depths.tolist(), min(step.policy.max_depth, 1))
        return self.score(len(step.tree)) + self.draft(layers, max(step.draft_tokens - CATCHING_UP, 0))

    def of_all(self, generation: Generation) -> float:
        """Modelled seconds of all steps of a generation, each behind the text so far."""
        total, context = 0.0, len(generation.prompt)
        for step, emitted in zip(generation.steps, generation.accept_lengths, strict=True):
            total += self.at(context).of(step)
            context += emitted
        return total


def _check(name: str, curve: Curve) -> None:
    """ValueError for a curve without points, and for one whose rows do not rise."""
    rows, seconds = zip(*curve, strict=True) if curve else ((), ())
    if not curve or any(not (math.isfinite(value) and value >= 0) for value in seconds):
        raise ValueError(f"{name} must have points of 0 seconds or more, and finite, got {curve}")
    if rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
        raise ValueError(f"{name} must rise in rows, from 1 on, got {curve}")


@lru_cache(maxsize=64)
def _table(curve: Curve) -> Float[np.ndarray, " rows"]:
    """A curve's seconds by rows, from 0 (as for 1) to `LARGEST`."""
    rows, seconds = map(np.array, zip(*curve, strict=True))
    grid = np.arange(LARGEST + 1)
    table, middle = np.interp(grid, rows, seconds), len(rows) // 2
    if len(rows) > 1:
        middle = min(middle, len(rows) - 2)
        slope = max(seconds[-1] - seconds[middle], 0.0) / (rows[-1] - rows[middle])
        table += slope * np.maximum(grid - rows[-1], 0)
    table[0] = table[1]
    return table


@lru_cache(maxsize=64)
def _further(curve: Curve) -> Float[np.ndarray, " rows"]:
    """By rows: the least that further ones cost, each on average: a kernel's block of rows is paid for at once."""
    table, least = _table(curve), np.full(LARGEST + 1, np.inf)
    for more in range(1, AHEAD + 1):
        least[:-more] = np.minimum(least[:-more], (table[more:] - table[:-more]) / more)
    least[-1] = least[-2]
    return least
