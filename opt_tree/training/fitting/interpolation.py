"""Fit the constants of `interpolate`: E(A) is to come out as A on answers that are not in the store.

They should be to prompts that are unlike the store's, whole corpora left out of it: on prompts of the same kind a store
is right more often than it can be elsewhere. The proportions of the constants stay; one factor is found for all. (The
likeliest constants are another thing: they answer for tokens that no tree holds, and leave E(A) a third too low.)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from opt_tree.core.step import Step
from opt_tree.core.words import counted
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.recording import Rerun
from opt_tree.drafters.tables.file_format import Table
from opt_tree.drafters.tables.store import Store, StoreDrafter
from opt_tree.policies import OptTree
from opt_tree.training.answers import Example, read_examples
from opt_tree.training.plans import Cut


class Replayed(NamedTuple):
    """What trees promised and gave along some answers: means of all steps."""

    expected: float
    """E(A)."""
    accepted: float
    """A."""
    steps: int


def replay(drafter: StoreDrafter, policy: OptTree, examples: Sequence[Example]) -> Replayed:
    """Draft along known greedy answers: what the target would choose is what they hold, so it need not run."""
    steps: list[Step] = []
    for tokens, answer in examples:
        decoder = Decoder(Rerun(tokens, drafter.store.vocab), drafter, policy)
        steps += decoder.steps(tokens[:answer], len(tokens) - answer)
    if not any(step.tree.nodes for step in steps):
        raise ValueError(f"nothing to draft along: {counted(len(examples), 'answer')}, and none of two tokens or more")
    expected, accepted = (np.mean([getattr(step, of) for step in steps]) for of in ("expected_accepted", "accepted"))
    return Replayed(float(expected), float(accepted), len(steps))


def fit_beta(store: Store, beta: Sequence[float], examples: Sequence[Example], nodes: int = 8) -> tuple[float, ...]:
    """Return `beta` times the factor under which E(A) of OPT-Tree is A; ValueError if none from 1/16 to 16 does it."""
    policy, low, high = OptTree(nodes, 0.0), -4.0, 4.0
    for _ in tqdm(range(9), desc="fit beta", unit="run"):
        middle = (low + high) / 2
        found = replay(StoreDrafter(store, [2**middle * each for each in beta]), policy, examples)
        # The greater the constants, the less is promised.
        low, high = (middle, high) if found.expected > found.accepted else (low, middle)
    if low == -4.0 or high == 4.0:
        raise ValueError(f"no beta fits: E(A) is {found.expected:.2f} where A is {found.accepted:.2f}")
    return tuple(round(2 ** ((low + high) / 2) * each, 3) for each in beta)


def fitted(table: Table, answers: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> Table:
    """Return the same store with the beta under which E(A) is A on the greedy answers of files, all of them."""
    examples = list(read_examples(answers, tokenizer, Cut(answer=128, shortest=2)))
    if not examples:
        raise ValueError(f"no answers to fit beta on in {', '.join(map(str, answers))}")
    before, store = table.header["beta"], Store(table)
    beta = fit_beta(store, before, examples)
    found = replay(StoreDrafter(store, beta), OptTree(8, 0.0), examples)
    print(
        f"beta {before} -> {list(beta)}, fitted on {counted(len(examples), 'answer')}, {counted(found.steps, 'step')}: "
        f"E(A) {found.expected:.3f}, A {found.accepted:.3f}"
    )
    return table._replace(header=table.header | {"beta": list(beta)})
