"""E(A) against A: how a drafter's trees kept what they promised, and the temperature under which they do.

Owns greedy decoding for that comparison; `calibrate` is the command.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from opt_tree.core.step import Step
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.pair import Pair
from opt_tree.drafters import Sharpened
from opt_tree.policies import OptTree


@dataclass(frozen=True)
class Reliability:
    """E(A) against A over the steps of some generations."""

    expected: float
    accepted: float
    forwards: float
    """Draft forwards a step."""
    slope: float
    """Least squares of A on E(A): 1 where the distribution means what it says."""


def reliability(decoder: Decoder, pair: Pair, prompts: list[list[int]], max_new_tokens: int, title: str) -> Reliability:
    """Decode the prompts greedily and compare what the tree promised with what it gave."""
    steps: list[Step] = []
    for prompt in tqdm(prompts, desc=title, unit="prompt"):
        steps += decoder.generate(prompt, max_new_tokens, stop=pair.stop).steps
    expected = np.array([step.expected_accepted for step in steps])
    accepted = np.array([step.accepted for step in steps], dtype=float)
    slope = float(np.polyfit(expected, accepted, 1)[0]) if np.ptp(expected) > 0 else float("nan")
    return Reliability(expected.mean(), accepted.mean(), float(np.mean([s.draft_forwards for s in steps])), slope)


def balance(ratio: Callable[[float], float], most: int = 7, within: float = 0.005) -> float:
    """Return the temperature at which E(A) / A, `ratio` of a temperature, is 1; ValueError where there is none.

    By secants in the logarithms of both: the higher the one, the lower the other. Of few steps the ratio jumps; then
    it is the best of `most` trials.
    """
    tried = {x: math.log(ratio(math.exp(x))) for x in (math.log(0.8), math.log(0.6))}
    while True:
        (before, value), (x, y) = list(tried.items())[-2:]
        best = min(tried, key=lambda x: abs(tried[x]))
        if abs(tried[best]) < within:
            return math.exp(best)
        slope = min((y - value) / (x - before), -0.2)
        x = min(max(x - y / slope, x - 0.7, math.log(0.05)), x + 0.7, math.log(5))
        if len(tried) == most or x in tried:
            break
        tried[x] = math.log(ratio(math.exp(x)))
    if abs(tried[best]) > 0.05:
        raise ValueError(
            f"no temperature makes E(A) A: at {math.exp(best):.2f} it is {math.exp(tried[best]):.2f} of it"
        )
    return math.exp(best)


def fit_balance(pair: Pair, prompts: list[list[int]], policy: OptTree, max_new_tokens: int) -> float:
    """Return the temperature under which E(A) is A, within half a percent, along the target's answers."""

    def ratio(temperature: float) -> float:
        decoder = Decoder(pair.target, Sharpened(pair.drafter, temperature), policy)
        found = reliability(decoder, pair, prompts, max_new_tokens, f"{temperature:.3f}")
        return max(found.expected, 1e-9) / max(found.accepted, 1e-9)

    return balance(ratio)
