"""Fit the constants of `interpolate`: E(A) is to come out as A on answers that are not in the store.

They should be to prompts that are unlike the store's, whole corpora left out of it: on prompts of the same kind a store
is right more often than it can be elsewhere. The proportions of the constants stay; one factor is found for all. (The
likeliest constants are another thing: they answer for tokens that no tree holds, and leave E(A) a third too low.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from opt_tree.decode import draft
from opt_tree.drafters.store import Store, StoreDrafter
from opt_tree.policies import OptTree
from opt_tree.step import Outcome
from opt_tree.training.answers import Example


class Replayed(NamedTuple):
    """What trees promised and gave, on the mean of all steps."""

    expected: float
    accepted: float
    steps: int


def replay(drafter: StoreDrafter, policy: OptTree, examples: Sequence[Example]) -> Replayed:
    """Draft along known greedy answers: what the target would choose is what they hold, so it need not run."""
    expected, accepted = [], []
    for example in examples:
        context, known = list(example.tokens[: example.answer]), list(example.tokens[example.answer :])
        drafter.reset(context, None)
        while len(known) > policy.max_depth:
            tree = draft(drafter, policy, context, policy.max_depth)
            child = {
                (p, t): row for row, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
            }
            path = [0]
            while (row := child.get((path[-1], known[len(path) - 1]))) is not None:
                path.append(row)
            tokens, known = known[: len(path)], known[len(path) :]
            drafter.observe(Outcome(tree, path, tokens, {}, torch.zeros(0, 0)))
            context += tokens
            expected.append(tree.expected_accepted)
            accepted.append(len(path) - 1)
    if not accepted:
        raise ValueError(f"{len(examples)} answers are too short to draft along, {policy.max_depth} tokens at a time")
    return Replayed(float(np.mean(expected)), float(np.mean(accepted)), len(accepted))


def fit_beta(store: Store, beta: Sequence[float], examples: Sequence[Example], nodes: int = 8) -> tuple[float, ...]:
    """Return `beta` times the factor under which E(A) of OPT-Tree is A; ValueError if none from 1/16 to 16 does it."""
    policy, low, high = OptTree(nodes, 0.0, 8), -4.0, 4.0
    for _ in tqdm(range(7), desc="fit beta", unit="run"):
        middle = (low + high) / 2
        found = replay(StoreDrafter(store, [2**middle * each for each in beta]), policy, examples)
        # The greater the constants, the less is promised.
        low, high = (middle, high) if found.expected > found.accepted else (low, middle)
    if low == -4.0 or high == 4.0:
        raise ValueError(f"no beta fits: E(A) is {found.expected:.2f} where A is {found.accepted:.2f}")
    return tuple(round(2 ** ((low + high) / 2) * each, 3) for each in beta)
