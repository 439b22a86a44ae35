"""Fit the constants of `interpolate`: E(A) is to come out as A on answers that are not in the store.

They should be to prompts that are unlike the store's, whole corpora left out of it: on prompts of the same kind a store
is right more often than it can be elsewhere. The proportions of the constants stay; one factor is found for all. (The
likeliest constants are another thing: they answer for tokens that no tree holds, and leave E(A) a third too low.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from opt_tree.core.step import Outcome
from opt_tree.decoding.draft import draft
from opt_tree.drafters.tables.file_format import Table
from opt_tree.drafters.tables.store import Store, StoreDrafter
from opt_tree.policies import OptTree
from opt_tree.training.answers import Cut, Example, read_examples


@dataclass(frozen=True)
class Replayed:
    """What trees promised and gave along some answers."""

    sums: Float[np.ndarray, "answers 3"]
    """E(A), A and the number of steps, each summed over the steps of one answer."""

    @property
    def expected(self) -> float:
        """E(A), mean of all steps."""
        return float(self.sums[:, 0].sum() / self.steps)

    @property
    def accepted(self) -> float:
        """A, mean of all steps."""
        return float(self.sums[:, 1].sum() / self.steps)

    @property
    def steps(self) -> int:
        return int(self.sums[:, 2].sum())

    def interval(self, draws: int = 2000) -> tuple[float, float]:
        """Where E(A) / A lies with 95 %, had other prompts been drawn: a bootstrap over answers, seed fixed.

        Steps of one answer are alike, and E(A) and A of one step go together, so neither is drawn by itself.
        """
        rows = np.random.default_rng(0).integers(0, len(self.sums), (draws, len(self.sums)))
        expected, accepted, _ = np.moveaxis(self.sums[rows].sum(1), -1, 0)
        low, high = np.quantile(expected / np.maximum(accepted, 1e-9), (0.025, 0.975))
        return float(low), float(high)


def replay(drafter: StoreDrafter, policy: OptTree, examples: Sequence[Example]) -> Replayed:
    """Draft along known greedy answers: what the target would choose is what they hold, so it need not run.

    As in the loop, no tree is deeper than the tokens that are left but one, so that all it could be judged by is known.
    """
    sums = np.zeros((len(examples), 3))
    for example, own in zip(examples, sums, strict=True):
        context, known = list(example.tokens[: example.answer]), list(example.tokens[example.answer :])
        drafter.reset(context, None)
        while len(known) > 1:
            tree = draft(drafter, policy, context, min(policy.max_depth, len(known) - 1))
            child = {
                (p, t): row for row, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
            }
            path = [0]
            while (row := child.get((path[-1], known[len(path) - 1]))) is not None:
                path.append(row)
            tokens, known = known[: len(path)], known[len(path) :]
            drafter.observe(Outcome(tree, path, tokens, {}, torch.zeros(0, 0)))
            context += tokens
            own += tree.expected_accepted, len(path) - 1, 1
    if not sums[:, 2].any():
        raise ValueError(f"{len(examples)} answers are too short to draft along: two tokens at least")
    return Replayed(sums)


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
    low, high = found.interval()
    print(
        f"beta {before} -> {list(beta)}, fitted on {len(examples)} answers, {found.steps} steps: "
        f"E(A) {found.expected:.3f}, A {found.accepted:.3f}, E(A) / A in [{low:.3f}, {high:.3f}] (95 %, over answers)"
    )
    return table._replace(header=table.header | {"beta": list(beta)})
