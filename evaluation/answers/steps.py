"""The steps of some answers: how long they were, what was expected of them, where their time went.

A *step* is one target forward over a tree; it emits `accepted + 1` tokens. The last step of a turn that ended at a stop
token is trimmed there; it counts in the mean length (as in Spec-Bench), but in nothing that compares a tree with what
was accepted. Arithmetic over an answer file's lines; no models, files, pictures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

Record = Mapping[str, Any]

TIMES = ("draft_time", "verify_time", "commit_time", "draft_forward_time", "target_forward_time", "prefill_time")
"""Seconds. The forwards' times are parts of `draft_time` and `verify_time`; `prefill_time` is beside them all."""
TOLERANCE = 0.2
"""How far from 1 the slope of accepted on expected lengths, or the ratio of mean A to mean E(A), may be before the
drafter counts as miscalibrated, unless two standard errors reach further."""


@dataclass(frozen=True)
class Steps:
    """Every step of some answers, in order; `whole` is False for a step that a stop may have trimmed."""

    lengths: Int[np.ndarray, " steps"]
    expected: Float[np.ndarray, " steps"] | None
    depths: Int[np.ndarray, " steps"] | None
    whole: Bool[np.ndarray, " steps"]


def choices(answers: Iterable[Record]) -> Iterable[Record]:
    """Every choice of every answer."""
    return (choice for answer in answers for choice in answer["choices"])


def total(answers: Iterable[Record], key: str) -> float | None:
    """Sum of a list that has one number a turn; None where a choice lacks it or does not know it."""
    values = [value for choice in choices(answers) for value in choice.get(key, [None])]
    return None if any(value is None for value in values) else sum(values)


def alone(answers: Iterable[Record]) -> bool:
    """Whether every turn was decoded by itself: the times of a batch tell of no turn's speed."""
    return all(lanes == 1 for choice in choices(answers) for lanes in choice.get("lanes", []))


def steps_of(answers: Sequence[Record]) -> Steps | None:
    """Collect the steps; None where a choice does not list them (FastChat's and EAGLE's own files do not)."""
    found = list(choices(answers))
    if not all("accept_lengths" in choice for choice in found):
        return None
    whole: list[bool] = []
    for choice in found:
        ends = np.cumsum(choice["decoding_steps"]) - 1
        reasons = choice.get("finish_reason", ["stop"] * len(ends))
        stopped = {end for end, reason in zip(ends, reasons, strict=True) if reason.startswith("stop")}
        whole.extend(step not in stopped for step in range(len(choice["accept_lengths"])))

    def flat(key: str, kind: type) -> np.ndarray | None:
        if not all(key in choice for choice in found):
            return None
        return np.array([value for choice in found for value in choice[key]], dtype=kind)

    lengths = flat("accept_lengths", int)
    assert lengths is not None
    expected, depths = flat("expected_lengths", float), flat("tree_depths", int)
    return Steps(lengths, expected, depths, np.array(whole, dtype=bool))


def ceiling(answers: Sequence[Record]) -> float | None:
    """What a verifier that is exact given the trees emits on them at most: tokens a step, where it was written down."""
    values = [value for choice in choices(answers) for value in choice.get("ceilings", [None])]
    return float(np.mean(values)) if values and None not in values else None


def left_at_last_layer(answers: Sequence[Record]) -> float | None:
    """The share of untrimmed steps whose accepted path ends on the last layer of their tree.

    With `greedy` and `match` the target leaves the tree there: more layers would help, in the others other nodes.
    """
    taken = steps_of(answers)
    if taken is None or taken.depths is None or not (drafted := taken.whole & (taken.depths > 0)).any():
        return None
    return float((taken.lengths[drafted] - 1 == taken.depths[drafted]).mean())


def acceptance_by_depth(taken: Steps) -> list[dict[str, float | int | None]]:
    """For each depth, how many steps drafted it and how many accepted a path that reaches it.

    `rate` is accepted over drafted, `reach` accepted over all steps. Trimmed steps are left out.
    """
    accepted = taken.lengths[taken.whole] - 1
    depths = None if taken.depths is None else taken.depths[taken.whole]
    deepest = int(max(accepted.max(initial=0), 0 if depths is None else depths.max(initial=0)))
    table: list[dict[str, float | int | None]] = []
    for depth in range(1, deepest + 1):
        reached, drafted = int((accepted >= depth).sum()), None if depths is None else int((depths >= depth).sum())
        shares = {"rate": reached / drafted if drafted else None, "reach": reached / len(accepted)}
        table.append({"depth": depth, "drafted": drafted, "accepted": reached, **shares})
    return table


def by_position(answers: Sequence[Record]) -> list[dict[str, float | int | None]]:
    """Tokens a step and tokens a second by the context that a step began with, in blocks that double: to 256, 512, ...

    The prompt counts as context; prefill is in no step. Empty where the lines do not hold the prompts. The speed is
    None where they do not time each step, and for a batch.
    """
    found = list(choices(answers))
    if not all({"prompt_ids", "accept_lengths"} <= choice.keys() for choice in found):
        return []
    contexts: list[int] = []
    spent: list[float | None] = []
    for choice in found:
        turns = np.split(np.array(choice["accept_lengths"], dtype=int), np.cumsum(choice["decoding_steps"])[:-1])
        for prompt, emitted in zip(choice["prompt_ids"], turns, strict=True):
            contexts += (len(prompt) + np.cumsum(emitted) - emitted).tolist()
        spent += choice.get("step_times", [None] * len(choice["accept_lengths"]))
    ends = np.array([max(256, 1 << (context - 1).bit_length()) for context in contexts])
    lengths = np.array([length for choice in found for length in choice["accept_lengths"]])
    times, timed = np.array(spent, dtype=float), alone(answers)  # None is NaN, and so is a sum with it
    table: list[dict[str, float | int | None]] = []
    for end in np.unique(ends).tolist():
        own, seconds = lengths[ends == end], times[ends == end].sum()
        speed = float(own.sum() / seconds) if timed and seconds > 0 else None
        about = {"context_up_to": end, "steps": len(own), "tokens_per_step": float(own.mean())}
        table.append(about | {"tokens_per_second": speed})
    return table


def calibration(taken: Steps) -> dict[str, Any] | None:
    """How A follows E(A): least-squares slope of accepted on expected lengths, its standard error, correlations, means.

    `miscalibrated` lists what is wrong, "slope" and "mean". None where the steps say nothing of it: no expectation
    recorded, fewer than three steps, or the same expectation in all of them.
    """
    if taken.expected is None:
        return None
    expected, accepted = taken.expected[taken.whole], taken.lengths[taken.whole].astype(float)
    count = len(expected)
    if count < 3 or expected.std() < 1e-9:
        return None
    fit = stats.linregress(expected, accepted)
    slope, error, constant = float(fit.slope), float(fit.stderr), accepted.std() == 0
    ratio = (accepted.mean() - 1) / (expected.mean() - 1)
    # Few steps may by chance all accept nothing: no less is allowed for than what a right drafter's A would scatter.
    scatter = max(accepted.std(), np.sqrt(expected.mean() - 1))
    ratio_error = scatter / np.sqrt(count) / (expected.mean() - 1)
    wrong = [
        name
        for name, value, noise in (("slope", slope, error), ("mean", ratio, ratio_error))
        if abs(value - 1) > max(TOLERANCE, 2 * noise) and not (constant and name == "slope")
    ]
    return {
        "steps": count,
        "slope": slope,
        "slope_error": 0.0 if constant else error,
        "intercept": float(fit.intercept),
        "pearson": None if constant else float(fit.rvalue),
        "spearman": None if constant else float(stats.spearmanr(expected, accepted).statistic),
        "expected_length": float(expected.mean()),
        "accepted_length": float(accepted.mean()),
        "miscalibrated": wrong,
    }


def step_time(answers: Sequence[Record]) -> dict[str, float] | None:
    """What a step's milliseconds are spent on; None where the times are unknown.

    Stop rules and bookkeeping are outside the steps.
    """
    rounds, times = total(answers, "decoding_steps"), [total(answers, key) for key in ("wall_time", *TIMES)]
    known = [1000 * seconds for seconds in times if seconds is not None]
    if not rounds or not alone(answers) or len(known) < len(times):
        return None
    wall, draft, verify, commit, draft_forward, target_forward, prefill = known
    parts = {
        "draft forwards": draft_forward,
        "tree building": draft - draft_forward,
        "target forward": target_forward,
        "judging": verify - target_forward,
        "cache commit": commit,
        "outside the steps": wall - prefill - draft - verify - commit,
    }
    return {name: spent / rounds for name, spent in parts.items()}
