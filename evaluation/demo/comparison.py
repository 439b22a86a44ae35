"""What came out where several ways to decode took turns on the same prompts: as a table, in words, and for machines."""

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evaluation.answers.record import first_difference
from evaluation.command_line import table as lay_out
from evaluation.command_line import two_digits
from evaluation.divergence import Divergence, Explainer
from evaluation.run.models import made_of
from evaluation.timing import Timings, contested, step_figures
from opt_tree import Generation, Pair, Sampling
from opt_tree.errors import counted

PLAIN, GREEDY, ASSISTED, OURS = "plain", "transformers", "transformers, assisted", "opt_tree"
LABELS = {
    PLAIN: "plain decoding, same loop",
    GREEDY: "transformers",
    ASSISTED: "transformers, assisted",
    OURS: "OPT-Tree",
}


@dataclass(frozen=True)
class DifferentText:
    """A text that is not plain decoding's, and why; None where the target is too large for the exact recomputation."""

    method: str
    prompt: int
    position: int
    why: Divergence | None


def different_texts(
    timings: Timings, pair: Pair, prompts: Sequence[list[int]], sampling: Sampling, seed: int = 0
) -> list[DifferentText]:
    """Compare every method's texts with plain decoding's; transformers' only where it does not draw."""
    reference, explainer, found = timings.texts(PLAIN), None, []
    for method in timings.runs if sampling.greedy else [OURS]:
        for index, (text, expected) in enumerate(zip(timings.texts(method), reference, strict=True)):
            if (position := first_difference(text, expected)) is None:
                continue
            why = None
            with contextlib.suppress(torch.OutOfMemoryError):
                explainer = explainer or Explainer(pair.target)  # copies the target, so only where it is needed
                why = explainer.explain(prompts[index], text, expected, sampling, seed)
            found.append(DifferentText(method, index, position, why))
    return found


def table(timings: Timings, differences: Sequence[DifferentText], sampling: Sampling) -> str:
    """Lay out the comparison, a line a method, OPT-Tree last."""
    return lay_out([_row(method, timings, differences, sampling.greedy) for method in LABELS])


def _row(method: str, timings: Timings, differences: Sequence[DifferentText], greedy: bool) -> dict[str, str]:
    if method not in timings.runs:
        return {"": LABELS[method], "tokens/s": "not available"}
    rate, count = timings.rate(method), len(timings.runs[method])
    row = {"": LABELS[method], "tokens/s": two_digits(rate)}
    row["OPT-Tree is"] = f"{two_digits(timings.rate(OURS) / rate)} x" if method != OURS else ""
    if generations := timings.generations(method):
        figures = step_figures(generations)
        row["tokens/step"] = f"{figures['tokens/step']:.2f}"
        row["E(A)+1"] = f"{expected_per_step(generations):.2f}"
        row["draft ms"] = "" if method == PLAIN else f"{figures['draft forwards ms']:.2f}"
        row["verify ms"] = f"{figures['target forward ms']:.2f}"
        row["other ms"] = f"{figures['outside the forwards ms']:.2f}"
    same = f"{count - sum(different.method == method for different in differences)}/{count}"
    return row | {"same text": same if method in (PLAIN, OURS) or greedy else "sampled"}


def expected_per_step(generations: Sequence[Generation]) -> float:
    """Mean of E(A) + 1 over all steps."""
    return statistics.fmean(length for g in generations for length in g.expected_lengths)


def notes(timings: Timings, pair: Pair, differences: Sequence[DifferentText], sampling: Sampling) -> list[str]:
    """Say how the table was measured and whether the texts agree."""
    counts = [len(repeated) for repeated in timings.runs[OURS]]
    repeated = str(max(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
    outside = step_figures(timings.generations(OURS))["outside %"]
    lines = [
        f"{counted(len(counts), 'prompt')} x {repeated}, the methods in turn; tokens/s from each prompt's median time, "
        "prefill included; milliseconds: medians over the steps.",
        "tokens/step: mean of accepted + 1; E(A)+1: what the drafter expected of it; "
        f"{outside:.0f} % of an OPT-Tree step is outside the two models' forwards.",
    ]
    if busy := contested():
        lines.insert(0, busy)
    if made := made_of(pair):
        lines.append(f"{made[0].upper()}{made[1:]}.")
    if ASSISTED not in timings.runs:
        lines.append("transformers' assisted generation needs a causal LM to draft: name one with --assistant.")
    if not sampling.greedy:
        lines.append("transformers draws with random numbers of its own: its texts are other samples.")
    if not differences:
        lines.append("All texts that can be compared agree token for token.")
    return lines + [_line(different, pair) for different in differences]


def _line(different: DifferentText, pair: Pair) -> str:
    where = f"new token {different.position + 1} of prompt {different.prompt + 1}"
    line = f"{LABELS[different.method]} leaves plain decoding at {where}"
    if (why := different.why) is None:
        return line
    ours, theirs = ("the end" if token is None else repr(pair.tokenizer.decode([token])) for token in why.tokens)
    return f"{line}, {ours} for {theirs}: {why.verdict} ({why.reason})"


def report(timings: Timings, differences: Sequence[DifferentText]) -> dict[str, Any]:
    """Return the figures of the table for machines."""
    ours = timings.generations(OURS)
    return {
        "prompts": len(timings.runs[OURS]),
        "tokens": {method: sum(map(len, timings.texts(method))) for method in timings.runs},
        "tokens_per_second": {method: timings.rate(method) for method in timings.runs},
        "E(A)+1": expected_per_step(ours),
        **step_figures(ours),
        "divergences": [dataclasses.asdict(different) for different in differences],
    }
