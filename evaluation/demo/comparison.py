"""What came out where several ways to decode took turns on the same prompts: as a table, and in words."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evaluation.command_line import table as lay_out
from evaluation.divergence import Divergence, Explainer
from evaluation.run.models import made_of
from evaluation.timing import BASELINES, Row, Timings, contested, overview, step_figures
from opt_tree import Pair, Sampling
from opt_tree.errors import counted
from opt_tree.target import shared

PLAIN, GREEDY, ASSISTED = BASELINES
OURS = "OPT-Tree"
SHOWN = (
    *("method", "tokens/s", f"x {PLAIN}", f"x {GREEDY}", "tokens/step", "step ms", "draft forwards ms"),
    *("target forward ms", "outside the forwards ms", "same text"),
)
"""The columns that people see."""


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
            if text == expected:
                continue
            why = None
            with contextlib.suppress(torch.OutOfMemoryError):
                explainer = explainer or Explainer(pair.target)  # copies the target, so only where it is needed
                why = explainer.explain(prompts[index], text, expected, sampling, seed)
            found.append(DifferentText(method, index, shared(text, expected), why))
    return found


def rows_of(timings: Timings, sampling: Sampling) -> list[Row]:
    """A line for each method, the fastest first; transformers' texts are compared only where it does not draw."""
    rows = overview(timings, intervals=False)
    return [row | ({} if sampling.greedy or row["method"] in (PLAIN, OURS) else {"same text": None}) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Lay out the comparison for people."""
    return lay_out([{head: row.get(head) for head in SHOWN} for row in rows])


def notes(timings: Timings, pair: Pair, differences: Sequence[DifferentText], sampling: Sampling) -> list[str]:
    """Say how the table was measured and whether the texts agree."""
    counts = [len(repeated) for repeated in timings.runs[OURS]]
    repeated = str(max(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
    outside = step_figures(timings.generations(OURS))["outside %"]
    lines = [
        f"{counted(len(counts), 'prompt')} x {repeated}, the methods in turn; tokens/s from each prompt's median time, "
        "prefill included; milliseconds: medians over the steps.",
        f"tokens/step: mean of accepted + 1; {outside:.0f} % of an OPT-Tree step is outside the two models' forwards.",
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
    line = f"{different.method} leaves plain decoding at {where}"
    if (why := different.why) is None:
        return line
    ours, theirs = ("the end" if token is None else repr(pair.tokenizer.decode([token])) for token in why.tokens)
    return f"{line}, {ours} for {theirs}: {why.verdict} ({why.reason})"
