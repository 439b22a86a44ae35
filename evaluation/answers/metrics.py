"""What an answer file says about speed and acceptance. Arithmetic over its lines; no models, files, pictures.

A *step* is one target forward over a tree; it emits `accepted + 1` tokens. The mean of that over all steps is what the
literature calls mean acceptance length, here tokens a step. The last step of a turn that ended at a stop token is
trimmed there; it counts in that mean (as in Spec-Bench) but in nothing that compares a tree with what was accepted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

Record = Mapping[str, Any]

RESAMPLES = 2000
TOLERANCE = 0.2
"""How far from 1 the slope of accepted on expected lengths, or the ratio of mean A to mean E(A), may be before the
draft law counts as miscalibrated, unless two standard errors reach further."""


@dataclass(frozen=True)
class Steps:
    """Every step of some answers, in order; `whole` is False for a step that a stop may have trimmed."""

    lengths: Int[np.ndarray, " steps"]
    expected: Float[np.ndarray, " steps"] | None
    nodes: Int[np.ndarray, " steps"] | None
    depths: Int[np.ndarray, " steps"] | None
    whole: Bool[np.ndarray, " steps"]


def choices(answers: Iterable[Record]) -> Iterable[Record]:
    """Every choice of every answer."""
    return (choice for answer in answers for choice in answer["choices"])


def total(answers: Iterable[Record], key: str) -> float | None:
    """Sum of a list that has one number a turn; None where a choice lacks it or does not know it."""
    values = [value for choice in choices(answers) for value in choice.get(key, [None])]
    return None if any(value is None for value in values) else sum(values)


def steps(answers: Sequence[Record]) -> Steps | None:
    """Collect the steps; None where a choice does not list them (FastChat's and EAGLE's own files do not)."""
    found = list(choices(answers))
    if not all("accept_lengths" in choice for choice in found):
        return None
    whole: list[bool] = []
    for choice in found:
        ends = np.cumsum(choice["decoding_steps"]) - 1
        reasons = choice.get("finish_reason", ["stop"] * len(ends))
        flags = np.ones(len(choice["accept_lengths"]), dtype=bool)
        flags[[end for end, reason in zip(ends, reasons, strict=True) if reason.startswith("stop") and end >= 0]] = (
            False
        )
        whole.extend(flags)

    def flat(key: str, kind: type) -> np.ndarray | None:
        if not all(key in choice for choice in found):
            return None
        return np.array([value for choice in found for value in choice[key]], dtype=kind)

    lengths = flat("accept_lengths", int)
    assert lengths is not None
    expected, nodes, depths = flat("expected_lengths", float), flat("tree_nodes", int), flat("tree_depths", int)
    return Steps(lengths, expected, nodes, depths, np.array(whole, dtype=bool))


def rates(answers: Sequence[Record]) -> Float[np.ndarray, "answers 2"]:
    """New tokens and wall seconds of each answer, over its choices and turns."""
    return np.array([[total([answer], "new_tokens"), total([answer], "wall_time")] for answer in answers], dtype=float)


def summary(answers: Sequence[Record]) -> dict[str, Any]:
    """Figures of one method on some questions. Unknown ones are None."""
    per_answer = rates(answers)
    tokens, seconds = per_answer.sum(0)
    prefill, rounds = total(answers, "prefill_time"), total(answers, "decoding_steps")
    taken = steps(answers)
    figures: dict[str, Any] = {
        "questions": len(answers),
        "turns": sum(len(choice["turns"]) for choice in choices(answers)),
        "new_tokens": int(tokens),
        "steps": rounds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_macro": float((per_answer[:, 0] / per_answer[:, 1]).mean()),
        "decode_tokens_per_second": None if prefill is None else tokens / (seconds - prefill),
        "tokens_per_step": None if taken is None else float(taken.lengths.mean()),
        "tokens_per_step_untrimmed": None
        if taken is None or not taken.whole.any()
        else float(taken.lengths[taken.whole].mean()),
    }
    for key, name in (("draft_forwards", "draft_forwards_per_step"), ("verified_tokens", "verified_tokens_per_step")):
        count = total(answers, key)
        figures[name] = count / rounds if count is not None and rounds else None
    figures["nodes_accepted"] = None
    if taken is not None and taken.nodes is not None and taken.nodes[taken.whole].any():
        figures["nodes_accepted"] = float((taken.lengths[taken.whole] - 1).sum() / taken.nodes[taken.whole].sum())
    return figures


def by_category(answers: Sequence[Record]) -> dict[str, list[Record]]:
    """Answers of each category, in order of first appearance; one category is no division."""
    groups: dict[str, list[Record]] = {}
    for answer in answers:
        groups.setdefault(str(answer.get("category", "all")), []).append(answer)
    return groups


def speed_up(answers: Sequence[Record], baseline: Sequence[Record], seed: int = 0) -> dict[str, Any] | None:
    """Speed over a baseline on the questions both answered; None if there are none.

    `micro`: ratio of total tokens over total seconds, with a 95 % interval by resampling questions, both files alike.
    `macro`: ratio of the mean over questions of each question's rate, as Spec-Bench's tools define it. `decode`: micro
    without prefill.
    """
    ours, theirs = paired(answers, baseline)
    if not ours:
        return None
    a, b = rates(ours), rates(theirs)

    def micro(rows: Int[np.ndarray, "... rows"]) -> Float[np.ndarray, "..."]:
        one, other = a[rows].sum(-2), b[rows].sum(-2)
        return one[..., 0] / one[..., 1] * other[..., 1] / other[..., 0]

    draws = None
    if len(a) > 1:
        draws = micro(np.random.default_rng(seed).integers(len(a), size=(RESAMPLES, len(a))))
    prefill, base_prefill = total(ours, "prefill_time"), total(theirs, "prefill_time")
    decode = None
    if prefill is not None and base_prefill is not None:
        (tokens, seconds), (base_tokens, base_seconds) = a.sum(0), b.sum(0)
        decode = float(tokens / (seconds - prefill) * (base_seconds - base_prefill) / base_tokens)
    return {
        "questions": len(a),
        "micro": float(micro(np.arange(len(a)))),
        "interval": None if draws is None else [float(edge) for edge in np.percentile(draws, (2.5, 97.5))],
        "macro": float((a[:, 0] / a[:, 1]).mean() / (b[:, 0] / b[:, 1]).mean()),
        "decode": decode,
    }


def paired(answers: Sequence[Record], baseline: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The answers to the questions that both answered, in the order of the first."""
    there = {answer["question_id"]: answer for answer in baseline}
    common = [answer for answer in answers if answer["question_id"] in there]
    return common, [there[answer["question_id"]] for answer in common]


def exact_match(answers: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Any]:
    """How many turns say the same, token for token (in files without token ids, as text), and where the others part.

    Turns whose prompts differ, because an earlier answer of their conversation did, are not compared but counted.
    """
    compared = equal = other_prompt = 0
    divergences = []
    for ours, theirs in zip(*paired(answers, baseline), strict=True):
        for one, other in zip(ours["choices"], theirs["choices"], strict=False):
            prompts = [_turns(choice, "prompt_ids") for choice in (one, other)]
            key = "token_ids" if "token_ids" in one and "token_ids" in other else "turns"
            parted = False
            for turn, (mine, its) in enumerate(zip(one[key], other[key], strict=False)):
                known = prompts[0] is not None and prompts[1] is not None
                if (prompts[0][turn] != prompts[1][turn]) if known else parted:  # type: ignore[index]
                    other_prompt += 1
                    continue
                compared += 1
                if mine == its:
                    equal += 1
                    continue
                parted = True
                divergences.append(
                    {
                        "question_id": ours["question_id"],
                        "choice": one["index"],
                        "turn": turn,
                        "position": _first_difference(mine, its),
                        "unit": "token" if key == "token_ids" else "character",
                        "texts": _around(one["turns"][turn], other["turns"][turn]),
                    }
                )
    return {
        "compared": compared,
        "equal": equal,
        "rate": equal / compared if compared else None,
        "other_prompt": other_prompt,
        "divergences": divergences,
    }


def _turns(choice: Record, key: str) -> Sequence[Any] | None:
    return choice.get(key)


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _around(ours: str, theirs: str, width: int = 24) -> list[str]:
    """The two texts around their first difference."""
    at = _first_difference(ours, theirs)
    return [text[max(0, at - width) : at + width] for text in (ours, theirs)]


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
        table.append(
            {
                "depth": depth,
                "drafted": drafted,
                "accepted": reached,
                "rate": reached / drafted if drafted else None,
                "reach": reached / len(accepted),
            }
        )
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
    spread = ((expected - expected.mean()) ** 2).sum()
    slope = float(((expected - expected.mean()) * accepted).sum() / spread)
    intercept = float(accepted.mean() - slope * expected.mean())
    residuals = accepted - intercept - slope * expected
    error = float(np.sqrt((residuals**2).sum() / (count - 2) / spread))
    ratio = (accepted.mean() - 1) / (expected.mean() - 1)
    ratio_error = accepted.std() / np.sqrt(count) / (expected.mean() - 1)
    wrong = [
        name
        for name, value, noise in (("slope", slope, error), ("mean", ratio, ratio_error))
        if abs(value - 1) > max(TOLERANCE, 2 * noise)
    ]
    return {
        "steps": count,
        "slope": slope,
        "slope_error": error,
        "intercept": intercept,
        "pearson": _correlation(expected, accepted),
        "spearman": _correlation(_ranks(expected), _ranks(accepted)),
        "expected_length": float(expected.mean()),
        "accepted_length": float(accepted.mean()),
        "miscalibrated": wrong,
    }


def _correlation(a: Float[np.ndarray, " steps"], b: Float[np.ndarray, " steps"]) -> float | None:
    return None if a.std() == 0 or b.std() == 0 else float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    """Ranks, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


PARTS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "draft forwards": lambda t: t["draft_forward_time"],
    "tree building": lambda t: t["draft_time"] - t["draft_forward_time"],
    "target forward": lambda t: t["target_forward_time"],
    "judging": lambda t: t["verify_time"] - t["target_forward_time"],
    "cache commit": lambda t: t["commit_time"],
    "outside the steps": lambda t: (
        t["wall_time"] - t["prefill_time"] - t["draft_time"] - t["verify_time"] - t["commit_time"]
    ),
}
"""What a step's time is spent on, from the sums of an answer file; stop rules and bookkeeping are outside the steps."""


def step_time(answers: Sequence[Record]) -> dict[str, float] | None:
    """Milliseconds a step for each of `PARTS`; None where the times are unknown."""
    keys = (
        "wall_time",
        "prefill_time",
        "draft_time",
        "verify_time",
        "commit_time",
        "draft_forward_time",
        "target_forward_time",
    )
    times = {key: total(answers, key) for key in keys}
    rounds = total(answers, "decoding_steps")
    if not rounds or any(value is None for value in times.values()):
        return None
    known = {key: value for key, value in times.items() if value is not None}
    return {name: 1000 * part(known) / rounds for name, part in PARTS.items()}
