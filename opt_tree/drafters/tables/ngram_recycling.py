"""Token Recycling by n-grams: the target's candidates after the last few tokens, with its own probabilities.

Owns the table of `NGramRecycling` and how its entries become probabilities (`Calibration`).
"""

import copy
from collections.abc import Callable, Sequence
from itertools import islice
from math import exp
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.core.continuations import Tail
from opt_tree.core.probabilities import log_probs_of
from opt_tree.core.step import Outcome
from opt_tree.core.target import Output
from opt_tree.core.tree import fetch_later
from opt_tree.drafters.registry import DrafterOptions, register
from opt_tree.drafters.tables.lookup import Lookup, Tails
from opt_tree.drafters.tables.recycling import best_tokens
from opt_tree.models.chain_lm import AnyLM


class Calibration(NamedTuple):
    """P(right) of an entry: logit p = shift + slope x (the target's log-probability then) + fall x (its rank then)."""

    shift: float
    slope: float
    fall: float


CALIBRATION = (
    Calibration(-0.252, 0.536, -0.329),
    Calibration(0.035, 0.53, -0.397),
    Calibration(0.863, 0.566, -0.792),
)
"""For entries found by the last 1, 2, 3 tokens: the demo target's, fitted by maximum likelihood."""


class NGramRecycling(Lookup):
    """Token Recycling by the last one to three tokens, with the target's log-probabilities.

    Every scored row is remembered under the runs of 1, 2, 3 tokens that it ends with, as the target's `k` best tokens
    and their log-probabilities. The longest run that is known answers; a `Calibration` for its length makes
    probabilities of it, so that OPT-Tree knows a sure entry from a doubtful one.

    What was learnt stays from prompt to prompt until `clear`, unless `keep=False`. At most `capacity` runs are
    remembered; beyond that the oldest are forgotten.
    """

    logits = True

    def __init__(
        self,
        calibration: Sequence[Calibration] = CALIBRATION,
        k: int = 8,
        capacity: int = 1 << 18,
        keep: bool = True,
    ) -> None:
        super().__init__(len(calibration))
        if k < 1 or capacity < 1:
            raise ValueError(f"at least one token of at least one run must be remembered, got {k} of {capacity}")
        self.k, self.capacity, self.keep, self.learns = k, capacity, keep, keep
        self._coming: Callable[[], list[np.ndarray]] | None = None
        """The candidates of the tree that was scored last, on their way to the host."""
        self.calibration = tuple(Calibration(*map(float, row)) for row in calibration)
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "NGramRecycling":
        """One that learns on by itself. Rows are replaced and never changed, so it shares those that are known."""
        twin = copy.copy(self)
        twin._rows, twin._tails = self._rows.copy(), Tails(self.order)
        return twin

    def clear(self) -> None:
        """Forget everything."""
        # Runs of one row share it. Of plain numbers, which Python's garbage collector has nothing to do with.
        self._rows: dict[Tail, dict[int, float]] = {}
        self._tail: Tail = ()

    def reset(self, prompt: list[int], output: Output | None) -> None:
        if not self.keep:
            self.clear()
        self._tail, self._coming = (), None
        if output is not None:
            self._learn(self._advance(prompt[:-1]), output.logits)
        self._advance(prompt[-1:])

    def holds(self, prompt: list[int]) -> int:
        return len(prompt)

    def resume(self, prompt: list[int], kept: int, output: Output) -> None:
        """See `TokenRecycling.resume`."""
        self._tail = tuple(prompt[:kept][-self.order :])
        self._learn(self._advance(prompt[kept:-1]), output.logits)
        self._advance(prompt[-1:])

    def scored(self, output: Output) -> None:
        self._coming = self._named(output.logits)

    def observe(self, outcome: Outcome) -> None:
        assert outcome.logits is not None
        tails = [self._tail]
        for token, parent in zip(outcome.tree.tokens[1:].tolist(), outcome.tree.parents[1:].tolist(), strict=True):
            tails.append((*tails[parent], token)[-self.order :])
        self._learn(tails, outcome.logits)
        self._advance(outcome.tokens)

    def law(self, tail: Tail) -> dict[int, float]:
        for length in range(len(tail), 0, -1):
            if (row := self._rows.get(tail[-length:])) is not None:
                break
        else:
            return {}
        shift, slope, fall = self.calibration[length - 1]
        probs = {}
        for rank, (token, log_prob) in enumerate(row.items()):
            logit = shift + slope * log_prob + fall * rank
            probs[token] = 1 / (1 + exp(min(-logit, 700.0)))  # beyond, Python's exponential overflows
        # Calibrated one by one they may add up to more than 1, a distribution's must not.
        total = sum(probs.values())
        return probs if total <= 1 else {token: prob / total for token, prob in probs.items()}

    def describe(self) -> str:
        return f"Token Recycling by the last {self.order} tokens"

    @property
    def settings(self) -> dict[str, Any]:
        return {"calibration": [list(row) for row in self.calibration], "k": self.k, "keep": self.keep}

    def _advance(self, tokens: Sequence[int]) -> list[Tail]:
        """Append committed tokens; return the tail at each of them."""
        tails = []
        for token in tokens:
            self._tail = (*self._tail, token)[-self.order :]
            tails.append(self._tail)
        return tails

    def _learn(self, tails: list[Tail], logits: Float[Tensor, "rows vocab"]) -> None:
        coming, self._coming = self._coming or self._named(logits), None
        log_probs, tokens = coming()
        for tail, row in zip(tails, zip(tokens.tolist(), log_probs.tolist(), strict=True), strict=True):
            learnt = dict(zip(*row, strict=True))
            for start in range(len(tail)):
                self._remember(tail[start:], learnt)

    def _named(self, logits: Float[Tensor, "rows vocab"]) -> Callable[[], list[np.ndarray]]:
        return fetch_later(*best_tokens(log_probs_of(logits), self.k))

    def _remember(self, run: Tail, row: dict[int, float]) -> None:
        """Note the row of a run. One that is known keeps its age; where there is no room, the oldest ones go."""
        rows = self._rows
        if run not in rows and len(rows) >= self.capacity:
            # Several at a time: each look for the oldest one passes all those that have gone before.
            for oldest in list(islice(rows, max(self.capacity // 64, 1))):
                del rows[oldest]
        rows[run] = row


@register("ngram-recycling", about="Token Recycling by the last one to three tokens", paper="2408.08696")
def _load(path: str, target: AnyLM, options: DrafterOptions) -> NGramRecycling:
    return NGramRecycling()
