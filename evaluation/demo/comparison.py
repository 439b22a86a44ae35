"""Several ways to decode, on the same prompts, in turn; and what came out, as a table, in words and for machines.

Owns the measuring and its wording. What is measured: the library's loop, and the baselines.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from evaluation.exactness.command import Divergence, Referee
from evaluation.run.baselines import Timed, first_difference
from opt_tree import Decoder, Generation, Pair, Sampling
from opt_tree.inflate import describe

PLAIN, GREEDY, ASSISTED, OURS = "plain", "transformers", "transformers_assisted", "opt_tree"
LABELS = {
    PLAIN: "plain decoding, same loop",
    GREEDY: "transformers",
    ASSISTED: "transformers, assisted",
    OURS: "OPT-Tree",
}

Method = Callable[[list[int], int], Timed]
"""A way to decode: from a prompt and the number of new tokens at most."""
_WARM_UP = 16


def in_loop(decoder: Decoder, pair: Pair, sampling: Sampling = Sampling(), seed: int = 0) -> Method:
    """Return the library's loop as a method."""

    def decode(prompt: list[int], max_new_tokens: int) -> Timed:
        generation = decoder.generate(prompt, max_new_tokens, sampling, pair.stop, seed=seed)
        return Timed(generation.tokens, generation.seconds, generation)

    return decode


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over the same prompts: `runs[method][prompt]` lists the repetitions."""

    runs: dict[str, list[list[Timed]]]

    def seconds(self, method: str) -> float:
        """Wall time of all prompts, each by the median of its repetitions."""
        return sum(statistics.median(run.seconds for run in repeated) for repeated in self.runs[method])

    def rate(self, method: str) -> float:
        """Tokens per second over all prompts (sum over sum), prefill included."""
        return sum(len(repeated[0].tokens) for repeated in self.runs[method]) / self.seconds(method)

    def texts(self, method: str) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [repeated[0].tokens for repeated in self.runs[method]]

    def generations(self, method: str) -> list[Generation]:
        """All traces of a method, repetitions included; none for transformers' own decoding."""
        return [run.generation for repeated in self.runs[method] for run in repeated if run.generation]


def interleave(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    rounds: int,
    limit: float = math.inf,
) -> Comparison:
    """Run every method on every prompt, `rounds` times, after one short warm-up each.

    All methods run on a prompt one after the other, in an order that turns, so that a busy machine hurts them alike.
    After `limit` seconds no further prompt is begun; the first always is.
    """
    for method in methods.values():
        method(prompts[0], _WARM_UP)
    runs: dict[str, list[list[Timed]]] = {name: [[] for _ in prompts] for name in methods}
    places = list(itertools.product(range(rounds), range(len(prompts))))
    names, begin, longest = list(methods), time.perf_counter(), 0.0
    with tqdm(total=len(places) * len(names), desc="comparing", unit="answer", leave=False, disable=None) as bar:
        for turn, (_, index) in enumerate(places):
            started = time.perf_counter()
            if turn and started - begin + longest > limit:
                break
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                runs[name][index].append(methods[name](prompts[index], max_new_tokens))
                bar.update()
            longest = max(longest, time.perf_counter() - started)
    return Comparison({name: [repeated for repeated in by_prompt if repeated] for name, by_prompt in runs.items()})


@dataclass(frozen=True)
class Parting:
    """A text that is not plain decoding's, and why; None where the target is too large for the exact recomputation."""

    method: str
    prompt: int
    position: int
    why: Divergence | None


def list_partings(
    comparison: Comparison, pair: Pair, prompts: Sequence[list[int]], sampling: Sampling, seed: int = 0
) -> list[Parting]:
    """Compare every method's texts with plain decoding's; transformers' only where it does not draw."""
    reference, referee, found = comparison.texts(PLAIN), None, []
    for method in comparison.runs if sampling.greedy else [OURS]:
        for index, (text, expected) in enumerate(zip(comparison.texts(method), reference, strict=True)):
            if (position := first_difference(text, expected)) is None:
                continue
            why = None
            with contextlib.suppress(torch.OutOfMemoryError):
                referee = referee or Referee(pair.target)  # copies the target, so only where it is needed
                why = referee.judge(prompts[index], text, expected, sampling, seed)
            found.append(Parting(method, index, position, why))
    return found


def step_times(generations: Sequence[Generation], device: str) -> tuple[float, float, float]:
    """Median milliseconds a step: the drafter's forwards, the target's, everything else.

    An accelerator still works when a forward's call returns; there the phases count: drafting, verification, commit.
    """
    times = [step.times for generation in generations for step in generation.steps]
    parts = ("draft_forward", "target_forward", "other") if device == "cpu" else ("draft", "verify", "commit")
    draft, verify, other = (1000 * statistics.median(getattr(time, part) for time in times) for part in parts)
    return draft, verify, other


def table(comparison: Comparison, device: str, partings: Sequence[Parting], sampling: Sampling) -> str:
    """Lay out the comparison, a line a method, OPT-Tree last."""
    other = "other ms" if device == "cpu" else "commit ms"
    lines = [["", "tokens/s", "OPT-Tree is", "tokens/step", "E(A)+1", "draft ms", "verify ms", other, "same text"]]
    for method, label in LABELS.items():
        if method not in comparison.runs:
            lines.append([label, "not available", *[""] * 7])
            continue
        rate, count = comparison.rate(method), len(comparison.runs[method])
        faster = f"{comparison.rate(OURS) / rate:.2f} x" if method != OURS else ""
        steps = [""] * 5
        if generations := comparison.generations(method):
            draft, verify, rest = step_times(generations, device)
            steps = [f"{emitted_per_step(generations):.2f}", f"{expected_per_step(generations):.2f}"]
            steps += ["" if method == PLAIN else f"{draft:.2f}", f"{verify:.2f}", f"{rest:.2f}"]
        same = f"{count - sum(parting.method == method for parting in partings)}/{count}"
        comparable = method in (PLAIN, OURS) or sampling.greedy
        lines.append([label, f"{rate:.0f}", faster, *steps, same if comparable else "sampled"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )


def emitted_per_step(generations: Sequence[Generation]) -> float:
    """Mean acceptance length: tokens over steps, the target's own token included."""
    return sum(len(g.tokens) for g in generations) / sum(len(g.steps) for g in generations)


def expected_per_step(generations: Sequence[Generation]) -> float:
    """Mean of E(A) + 1 over all steps."""
    return statistics.fmean(length for g in generations for length in g.expected_lengths)


def other_share(generations: Sequence[Generation]) -> float:
    """Median share of a step that is outside the two models' forwards."""
    return statistics.median(s.times.other / s.times.total for g in generations for s in g.steps)


def notes(comparison: Comparison, pair: Pair, partings: Sequence[Parting], sampling: Sampling) -> list[str]:
    """Say how the table was measured and whether the texts agree."""
    counts = [len(repeated) for repeated in comparison.runs[OURS]]
    repeated = str(max(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
    lines = [
        f"{len(counts)} prompts x {repeated}, the methods in turn; tokens/s from each prompt's median time, prefill "
        "included; milliseconds: medians over the steps.",
        "tokens/step: mean of accepted + 1; E(A)+1: what the draft law expected of it; "
        f"{other_share(comparison.generations(OURS)):.0%} of an OPT-Tree step is outside the two models' forwards.",
    ]
    if inflated := describe(pair.target.model, pair.drafter):
        lines.append(f"{inflated[0].upper()}{inflated[1:]}.")
    if ASSISTED not in comparison.runs:
        lines.append("transformers' assisted generation needs a causal LM to draft: give one with --draft-model-path.")
    if not sampling.greedy:
        lines.append("transformers draws with random numbers of its own: its texts are other samples of the same law.")
    if not partings:
        lines.append("All texts that can be compared agree token for token.")
    return lines + [_parting_line(parting, pair) for parting in partings]


def _parting_line(parting: Parting, pair: Pair) -> str:
    where = f"new token {parting.position + 1} of prompt {parting.prompt + 1}"
    line = f"{LABELS[parting.method]} leaves plain decoding at {where}"
    if (why := parting.why) is None:
        return line
    ours, theirs = ("the end" if token is None else repr(pair.tokenizer.decode([token])) for token in why.tokens)
    return f"{line}, {ours} for {theirs}: {why.verdict} ({why.reason})"


def report(comparison: Comparison, partings: Sequence[Parting]) -> dict[str, Any]:
    """Return the figures of the table for machines."""
    ours = comparison.generations(OURS)
    times = [step.times for generation in ours for step in generation.steps]
    median = {
        f"{part}_ms": 1000 * statistics.median(getattr(time, part) for time in times)
        for part in ("draft", "verify", "commit", "draft_forward", "target_forward", "other", "total")
    }
    return {
        "prompts": len(comparison.runs[OURS]),
        "repetitions": min(map(len, comparison.runs[OURS])),
        "tokens": {method: sum(map(len, comparison.texts(method))) for method in comparison.runs},
        "tokens_per_second": {method: round(comparison.rate(method), 2) for method in comparison.runs},
        "speedup": {m: round(comparison.rate(OURS) / comparison.rate(m), 3) for m in comparison.runs if m != OURS},
        "tokens_per_step": emitted_per_step(ours),
        "expected_tokens_per_step": expected_per_step(ours),
        "step": median | {"other_share": other_share(ours)},
        "divergences": [dataclasses.asdict(parting) for parting in partings],
    }
