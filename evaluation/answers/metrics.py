"""What an answer file says about speed and acceptance: every figure by its name, and how it is shown.

The mean of `accepted + 1` over all steps is what the literature calls mean acceptance length, here tokens a step. A new
figure is a function here and its line in `METRICS`: then the report's table and its JSON have it. None: unknown.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from evaluation.answers.record import exact_match, paired
from evaluation.answers.steps import Record, alone, ceiling, choices, left_at_last_layer, steps_of, total

RESAMPLES = 2000
FEW = 10  # questions below which an interval by resampling is too narrow to be one (three have ten samples in all)
_SAID: dict[Any, Any] = {}  # by which Python warns once
Records = Sequence[Record]
Estimate = tuple[float, list[float] | None]
"""A figure and its interval."""


def questions(answers: Records) -> int:
    return len(answers)


def turns(answers: Records) -> int:
    return sum(len(choice["turns"]) for choice in choices(answers))


def new_tokens(answers: Records) -> int:
    return int(rates(answers)[:, 0].sum())


def steps(answers: Records) -> float | None:
    return total(answers, "decoding_steps")


def tokens_per_step(answers: Records) -> float | None:
    taken = steps_of(answers)  # files of others may count steps and not list them
    return _per_step(answers, "new_tokens") if taken is None else float(taken.lengths.mean())


def tokens_per_step_macro(answers: Records) -> float | None:
    """The mean of each question's, which SPEED-Bench calls acceptance length."""
    each = [tokens_per_step([answer]) for answer in answers]
    known = [length for length in each if length is not None]
    return sum(known) / len(known) if each and len(known) == len(each) else None


def tokens_per_step_untrimmed(answers: Records) -> float | None:
    taken = steps_of(answers)
    return None if taken is None or not taken.whole.any() else float(taken.lengths[taken.whole].mean())


def draft_forwards_per_step(answers: Records) -> float | None:
    return _per_step(answers, "draft_forwards")


def verified_tokens_per_step(answers: Records) -> float | None:
    """Rows that went to the target, the root included."""
    return _per_step(answers, "verified_tokens")


def tokens_per_second(answers: Records) -> float | None:
    """Sum over sum, prefill included. This and all that follows is unknown for a batch, whose times are shared."""
    if not alone(answers):
        return None
    tokens, seconds = rates(answers).sum(0)
    return tokens / seconds


def tokens_per_second_macro(answers: Records) -> float | None:
    """The mean of each question's rate."""
    if not alone(answers):
        return None
    each = rates(answers)
    return float((each[:, 0] / each[:, 1]).mean())


def decode_tokens_per_second(answers: Records) -> float | None:
    """Without prefill."""
    tokens, seconds = rates(answers).sum(0)
    prefill = total(answers, "prefill_time")
    return None if prefill is None or not alone(answers) else tokens / (seconds - prefill)


def speed_up(answers: Records, baseline: Records) -> dict[str, Any] | None:
    """Speed over a baseline on the questions both answered; None if there are none, and for a batch.

    `micro`: ratio of total tokens over total seconds, with a 95 % interval by resampling questions, both files alike.
    `macro`: ratio of the mean over questions of each question's rate, as Spec-Bench's tools define it. `decode`: micro
    without prefill.
    """
    ours, theirs = paired(answers, baseline)
    if not ours or not alone(ours) or not alone(theirs):
        return None
    micro, interval = times_as_fast(rates(ours), rates(theirs))
    decode, base_decode = decode_tokens_per_second(ours), decode_tokens_per_second(theirs)
    known = {"questions": len(ours), "micro": micro, "interval": interval, "macro": speed_up_macro(ours, theirs)}
    return known | {"decode": None if decode is None or base_decode is None else float(decode / base_decode)}


def times_as_fast(ours: Any, theirs: Any) -> Estimate:
    """The ratio of two rates, from rows of tokens and seconds; questions of both drawn alike."""
    return estimate(np.hstack([ours, theirs]), lambda sums: sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2])


def speed_up_macro(answers: Records, baseline: Records) -> float | None:
    ours, theirs = (tokens_per_second_macro(of) if of else None for of in paired(answers, baseline))
    return None if ours is None or theirs is None else ours / theirs


def estimate(questions: Any, statistic: Callable[[Any], Any]) -> Estimate:
    """A statistic of sums over questions, a row each, and its 95 % interval by resampling them."""
    rows = np.asarray(questions, dtype=float)
    return float(statistic(rows.sum(0))), bootstrap(lambda drawn: statistic(rows[drawn].sum(-2)), len(rows))


def bootstrap(statistic: Callable[[Any], Any], count: int) -> list[float] | None:
    """A 95 % interval by resampling `count` questions (percentiles); None for a single one."""
    if count < 2:
        return None
    if count < FEW:
        message = f"95 % intervals over {count} questions are too narrow: take {FEW} or more"
        warnings.warn_explicit(message, UserWarning, "evaluation", 0, registry=_SAID)  # of no line, so none is shown
    found = stats.bootstrap(
        (np.arange(count),), lambda rows, axis: statistic(rows), n_resamples=RESAMPLES, method="percentile", rng=0
    )
    return list(map(float, found.confidence_interval))


def totals(answers: Records, *keys: str) -> Float[np.ndarray, "answers keys"]:
    """Sums of each answer, over its choices and turns."""
    return np.array([[total([answer], key) for key in keys] for answer in answers], dtype=float)


def rates(answers: Records) -> Float[np.ndarray, "answers 2"]:
    """New tokens and wall seconds of each answer."""
    return totals(answers, "new_tokens", "wall_time")


def _per_step(answers: Records, key: str) -> float | None:
    count, taken = total(answers, key), total(answers, "decoding_steps")
    return count / taken if count is not None and taken else None


# How a figure is shown; an empty text for an unknown one.
def number(digits: int) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def with_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    """A figure and its interval, to two digits."""
    edges = "" if interval is None else f" [{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]"
    return f"{value:{sign}.2f}{edges}"


def between(interval: Sequence[float] | None, digits: int = 2) -> str:
    """An interval in a cell of its own; an empty text for none."""
    return " to ".join(f"{edge:.{digits}f}" for edge in interval or ())


def ratio(speed: dict[str, Any] | None) -> str:
    return "" if not speed else with_interval(speed["micro"], speed["interval"])


@dataclass(frozen=True)
class Metric:
    """One figure of some answers; its name for machines is its function's."""

    measure: Callable[..., Any]
    head: str = ""
    """Of its column in the report's table; without one it is for machines only."""
    show: Callable[[Any], str] = str
    paired: bool = False
    """Whether it takes a baseline's answers, too."""

    @property
    def name(self) -> str:
        return self.measure.__name__


METRICS = (
    Metric(questions, "questions"),
    Metric(turns),
    Metric(new_tokens, "tokens"),
    Metric(steps),
    Metric(tokens_per_step, "tokens/step", number(2)),
    Metric(tokens_per_step_macro),
    Metric(tokens_per_step_untrimmed),
    Metric(ceiling, "ceiling", number(2)),
    Metric(left_at_last_layer, "left at last layer", percent),
    Metric(draft_forwards_per_step),
    Metric(verified_tokens_per_step, "nodes/step", lambda value: "" if value is None else f"{value - 1:.1f}"),
    Metric(tokens_per_second, "tokens/s", number(1)),
    Metric(tokens_per_second_macro),
    Metric(decode_tokens_per_second, "decode only", number(1)),
    Metric(speed_up, "speed-up [95 %]", ratio, paired=True),
    Metric(speed_up_macro, "macro", number(2), paired=True),
    Metric(exact_match, "same text", lambda match: percent(match["rate"]), paired=True),
)


def summary(answers: Records, baseline: Records | None = None) -> dict[str, Any]:
    """Every figure by its name; those that need a baseline where there is one."""
    return {
        metric.name: metric.measure(answers, baseline) if metric.paired else metric.measure(answers)
        for metric in METRICS
        if baseline is not None or not metric.paired
    }


def row(name: str, figures: dict[str, Any], head: str = "") -> dict[str, str]:
    """The line of a table that says these figures, its first column under `head`."""
    return {head: name} | {
        metric.head: metric.show(figures[metric.name]) for metric in METRICS if metric.head and metric.name in figures
    }
