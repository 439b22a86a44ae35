"""What is said of a drafter: is it worth it, with which tree, and what it would take.

Owns the figures, the one sentence and the table. `opt_tree.tools.advising` finds the figures.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from opt_tree.errors import counted
from opt_tree.methods.policies.costs import Costs

HERE = "here"
AUTO = "auto"
"""Its name: a tree chosen for each step by what it costs, `opt_tree.tools.step_costs.auto(target, drafter)`."""


FAVOUR = 1.03
"""The best of many settings on the same texts looks better than it is; `auto` is one setting and follows the text."""


@dataclass(frozen=True)
class Choice:
    """A setting and how many times as fast as plain decoding it is expected to be."""

    name: str
    speed_up: float
    low: float
    high: float
    """A 95 % interval, by resampling texts."""


@dataclass(frozen=True)
class Prospect:
    """What a drafter is worth where steps cost this much."""

    costs: Costs
    """Of all sequences side by side, by the rows of one."""
    best: Choice
    """The tree of the grid that is expected to be fastest."""
    auto: Choice
    """A tree chosen for each step by its cost, which needs no setting."""
    grid: dict[str, float]
    """The speed-up of every setting."""
    step: float
    """What a step with the best tree costs, in steps of plain decoding: so many tokens a step break even."""
    emitted: float
    """Tokens a step of the best tree."""
    break_even: float | None
    """The share of drafted tokens that must be accepted for the best chain to be as fast as plain decoding; None: no
    share is enough."""


@dataclass(frozen=True)
class Advice:
    """A verdict on a drafter: `print` it; `opt_tree.tools.display.advice.draw_advice` draws it."""

    target: str
    drafter: str
    prospects: dict[str, Prospect]
    """Here, side by side, and by the given tables."""
    accepted: list[float]
    """By position: the share of steps in which the best tree's first, second, ... drafted token was accepted."""
    chain: list[float]
    """By position: how often the token of a chain is accepted where all before it were."""
    expected: list[float] = field(repr=False)
    """E(A) of every step of the best tree."""
    found: list[int] = field(repr=False)
    """A of the same steps."""
    texts: int = 0
    tokens: int = 0

    @property
    def here(self) -> Prospect:
        return self.prospects[HERE]

    @property
    def setting(self) -> Choice:
        """What is advised: `auto`, unless the best tree of the grid is expected to be faster by more than `FAVOUR`."""
        return self.here.best if self.here.best.speed_up > FAVOUR * self.here.auto.speed_up else self.here.auto

    @property
    def use(self) -> bool | None:
        """Whether the drafter pays here; None: the interval holds 1, so that more texts would have to tell."""
        if self.setting.low > 1:
            return True
        return False if self.here.best.speed_up <= 1 else None

    @property
    def verdict(self) -> str:
        """The one sentence."""
        here, chosen = self.here, self.setting
        if self.use is False:
            best = here.best
            return (
                f"Do not use this drafter here: a step with its best tree, {best.name}, costs {here.step:.2f} plain "
                f"steps and brings {here.emitted:.2f} tokens, {_speed(best)}."
            )
        said = "Use it" if self.use else "It makes no clear difference"
        fixed = f"; of fixed trees, {here.best.name} ({here.best.speed_up:.2f})" if chosen is here.auto else ""
        return f"{said}: with {chosen.name} it is expected to be {_speed(chosen)}{fixed}."

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        said = {name: value for name, value in asdict(self).items() if name not in ("expected", "found")}
        means = {"expected": float(np.mean(self.expected)), "found": float(np.mean(self.found))}
        return {**said, **means, "use": self.use, "setting": asdict(self.setting), "verdict": self.verdict}

    def __str__(self) -> str:
        texts = f"{counted(self.texts, 'text')} of {counted(self.tokens, 'token')}"
        lines = [f"{self.target}; drafter {self.drafter}; {texts}, greedy", ""]
        curve = self.here.costs
        sizes = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33)
        lines += ["what a step costs here (rows: ms of scoring, judging and committing; then of drafting)"]
        lines += ["  " + "  ".join(f"{rows}: {1e3 * curve.score(rows):.2f}" for rows in sizes)]
        layer = 1e3 * curve.draft(2, 5) - 1e3 * curve.first
        lines += [f"  the first layer {1e3 * curve.first:.2f}, each further one of 5 rows {layer:.2f}", ""]
        lines += ["accepted by position (share of steps), the best tree here: " + _shares(self.accepted)]
        lines += ["a chain's tokens, where all before were accepted:          " + _shares(self.chain)]
        mean, said = float(np.mean(self.found or [0])), float(np.mean(self.expected or [0]))
        lines += [f"accepted a step: {mean:.2f}; the drafter's probabilities promise {said:.2f}", ""]
        lines += [_row("", "best tree", "x plain", "95 % interval", "auto", "must bring", "brings", "break-even share")]
        for name, one in self.prospects.items():
            even = "never" if one.break_even is None else f"{one.break_even:.2f}"
            interval = f"{one.best.low:.2f} to {one.best.high:.2f}"
            figures = (f"{x:.2f}" for x in (one.auto.speed_up, one.step, one.emitted))
            lines.append(_row(name, one.best.name, f"{one.best.speed_up:.2f}", interval, *figures, even))
        return "\n".join([*(line.rstrip() for line in lines), "", self.verdict])


def _speed(choice: Choice) -> str:
    interval = f"95 % interval {choice.low:.2f} to {choice.high:.2f}"
    return f"{choice.speed_up:.2f} times as fast as plain decoding ({interval})"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "none"


def _row(*cells: str) -> str:
    widths = (18, 32, 8, 14, 6, 11, 7, 16)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
