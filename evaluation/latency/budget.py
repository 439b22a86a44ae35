"""How many nodes, and which threshold, suit a machine: step time and acceptance put together.

Pure arithmetic on a latency curve and on what answer files say of acceptance; measures nothing, loads nothing.

A step with a tree of n nodes takes T(n) = d(n) t_layer + t_step(n + 1) and emits L(n) tokens. Long-run speed is a sum
of tokens over a sum of seconds, so the best budget maximises L(n) / T(n); the maximum, theta, is the price of a second
in tokens, and L(n) - theta T(n) is 0 there and negative elsewhere (Dinkelbach). A layer of t_layer seconds pays if it
brings more than theta t_layer tokens: that is the threshold on the gain of E(A).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.answers.file import Record
from evaluation.answers.steps import steps_of, total

CANDIDATES = (
    *range(3, 9),
    10,
    12,
    15,
    16,
    20,
    24,
    28,
    31,
    40,
    48,
    50,
    56,
    60,
    63,
    80,
    96,
    112,
    127,
    160,
    192,
    224,
    255,
)
"""Budgets that are tried. n + 1 rows go to the target, so that 15, 31, 63, ... just fill a bucket of a GPU."""

Curve = Callable[[float], float]
"""Seconds of a forward against the tokens in it."""


@dataclass(frozen=True)
class Acceptance:
    """What one answer file says of its trees, as means over steps (seconds where nothing else is said)."""

    nodes: float
    length: float
    """Tokens a step, accepted + 1."""
    expected: float | None
    """E(A) + 1 of the same steps."""
    layers: float
    """Draft forwards."""
    width: float
    """Tokens in a draft forward."""
    draft: float | None
    """Growing the tree; None where the file has no times. `draft_forward` is the part of it inside the drafter."""
    draft_forward: float | None
    rest: float | None
    """Everything else of a step, prefill excluded; `target_forward` is the part of it inside the target."""
    target_forward: float | None
    rate: float
    """Tokens per second without prefill where that is known."""

    @classmethod
    def of(cls, answers: Sequence[Record], name: str) -> "Acceptance":
        """Sum up an answer file. Raises ValueError where it lacks the counts or nothing was drafted."""
        taken, steps = steps_of(answers), total(answers, "decoding_steps")
        forwards, drafted, verified = (
            total(answers, key) for key in ("draft_forwards", "draft_tokens", "verified_tokens")
        )
        if taken is None or not steps or forwards is None or drafted is None or verified is None:
            raise ValueError(
                f"{name} does not count steps, draft forwards and verified tokens: nothing to choose a budget by"
            )
        if not forwards or verified <= steps:
            raise ValueError(f"{name} was answered without drafts: a budget needs answers of --method opt")
        whole = taken.whole if taken.whole.any() else np.ones_like(taken.whole)
        wall, prefill = total(answers, "wall_time"), total(answers, "prefill_time")
        draft, new = total(answers, "draft_time"), total(answers, "new_tokens")
        inside = [total(answers, key) for key in ("draft_forward_time", "target_forward_time")]
        assert wall is not None and new is not None
        decoding = wall - (prefill or 0.0)
        return cls(
            nodes=verified / steps - 1,
            length=float(taken.lengths[whole].mean()),
            expected=None if taken.expected is None else float(taken.expected[whole].mean()),
            layers=forwards / steps,
            width=drafted / forwards,
            draft=None if draft is None else draft / steps,
            draft_forward=None if inside[0] is None else inside[0] / steps,
            rest=None if draft is None else (decoding - draft) / steps,
            target_forward=None if inside[1] is None else inside[1] / steps,
            rate=new / decoding,
        )


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance at every budget, from the budgets that were tried.

    Tokens a step and draft layers are interpolated linearly in log2(n + 1) between (0 nodes: 1 token, 0 layers) and the
    measured points, and go on along the last piece behind them; the width of a layer is proportional to n.
    """

    measured: tuple[Acceptance, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", tuple(sorted(self.measured, key=lambda one: one.nodes)))

    @property
    def largest(self) -> float:
        return self.measured[-1].nodes

    def length(self, nodes: float) -> float:
        """Tokens a step."""
        return 1 + self._at(nodes, [one.length - 1 for one in self.measured])

    def layers(self, nodes: float) -> float:
        """Draft forwards a step; one at least, without which there is no tree."""
        return max(1.0, self._at(nodes, [one.layers for one in self.measured])) if nodes else 0.0

    def width(self, nodes: float) -> float:
        """Tokens in a draft forward."""
        nearest = min(self.measured, key=lambda one: abs(math.log((one.nodes + 1) / (nodes + 1))))
        return max(1.0, nearest.width * nodes / nearest.nodes)

    def calibration(self) -> float:
        """Mean A over mean E(A): how many tokens one unit of E(A) is worth. 1 where E(A) is unknown."""
        known = [one for one in self.measured if one.expected is not None and one.expected > 1]
        if not known:
            return 1.0
        return sum(one.length - 1 for one in known) / sum((one.expected or 0) - 1 for one in known)

    def _at(self, nodes: float, values: list[float]) -> float:
        points = [0.0, *(math.log2(one.nodes + 1) for one in self.measured)]
        x, values = math.log2(nodes + 1), [0.0, *values]
        if x <= points[-1]:
            return float(np.interp(x, points, values))
        slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
        return values[-1] + max(0.0, slope) * (x - points[-1])


@dataclass(frozen=True)
class Choice:
    """One budget and what it is predicted to give."""

    nodes: int
    length: float
    layers: float
    layer_seconds: float
    step_seconds: float
    extrapolated: bool

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.length / self.step_seconds

    @property
    def price(self) -> float:
        """theta t_layer: what one layer must bring, in tokens."""
        return self.rate * self.layer_seconds


@dataclass(frozen=True)
class Advice:
    """The budgets that were compared, the best one, and plain decoding beside it."""

    choices: tuple[Choice, ...]
    plain_rate: float
    calibration: float
    own: Choice
    """The prediction for the smallest budget that was tried, to be compared with what was measured."""

    @property
    def best(self) -> Choice:
        return max(self.choices, key=lambda choice: choice.rate)

    @property
    def threshold(self) -> float:
        """The best budget's price of a layer in units of E(A), which is what --threshold counts; two digits."""
        value = self.best.price / self.calibration if self.calibration > 0 else self.best.price
        return float(f"{value:.2g}")

    @property
    def flags(self) -> str:
        return f"--nodes {self.best.nodes} --threshold {self.threshold:g}"


Outside = Literal["ignored", "timed", "remainder"]
"""What a layer and a step take outside the forwards (pool, policy, judging, commit, Python): not counted (answers from
elsewhere), as the answers' own clocks say (a CPU), or what their layers and steps take beyond the measured forwards (an
accelerator, which still works when a forward's call returns)."""


def advise(curve: AcceptanceCurve, target: Curve, drafter: Curve, outside: Outside) -> Advice:
    """Predict the speed of every candidate budget, up to twice the largest that was tried; curves are bare forwards."""
    over_layer = over_step = 0.0
    timed = [one for one in curve.measured if None not in (one.draft, one.rest, one.draft_forward, one.target_forward)]
    if outside == "timed":
        layers = [((one.draft or 0) - (one.draft_forward or 0)) / one.layers for one in timed]
        steps = [(one.rest or 0) - (one.target_forward or 0) for one in timed]
    else:
        layers = [(one.draft or 0) / one.layers - drafter(one.width) for one in timed]
        steps = [(one.rest or 0) - target(one.nodes + 1) for one in timed]
    if timed and outside != "ignored":
        over_layer, over_step = max(0.0, float(np.mean(layers))), max(0.0, float(np.mean(steps)))

    def choice(nodes: float) -> Choice:
        layer = drafter(curve.width(nodes)) + over_layer
        step = curve.layers(nodes) * layer + target(nodes + 1) + over_step
        return Choice(round(nodes), curve.length(nodes), curve.layers(nodes), layer, step, nodes > curve.largest + 0.5)

    candidates = [nodes for nodes in CANDIDATES if nodes <= 2 * curve.largest] or [max(1, round(curve.largest))]
    return Advice(
        choices=tuple(choice(nodes) for nodes in candidates),
        plain_rate=1 / (target(1) + over_step),
        calibration=curve.calibration(),
        own=choice(curve.measured[0].nodes),
    )
