"""Token Recycling by n-grams: the target's candidates after the last few tokens, with its own probabilities.

Owns the table of `NGramRecycling` and how its entries become probabilities (`Calibration`).
"""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.drafters.lookup import Lookup, Tail
from opt_tree.drafters.recycling import best_tokens
from opt_tree.drafters.tables import Table, load_table, save_table
from opt_tree.step import Outcome
from opt_tree.target import Output
from opt_tree.tree import fetch


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

_KIND = "n-gram recycling table"


class NGramRecycling(Lookup):
    """Token Recycling by the last one to three tokens, with the target's log-probabilities.

    Every scored row is remembered under the runs of 1, 2, 3 tokens that it ends with, as the target's `k` best tokens
    and their log-probabilities. The longest run that is known answers; a `Calibration` for its length makes
    probabilities of it, so that OPT-Tree knows a sure entry from a doubtful one.

    What was learnt stays from prompt to prompt until `clear`, unless `keep=False`. At most `capacity` runs are
    remembered; beyond that the oldest are overwritten.
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
        self.calibration = tuple(Calibration(*map(float, row)) for row in calibration)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._slots: dict[Tail, int] = {}
        self._runs: list[Tail] = []  # by slot
        self._oldest = 0
        self._tokens = np.full((1024, self.k), -1, dtype=np.int64)
        self._log_probs = np.zeros((1024, self.k))
        self._tail: Tail = ()

    def reset(self, prompt: list[int], output: Output | None) -> None:
        if not self.keep:
            self.clear()
        self._tail = ()
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

    def observe(self, outcome: Outcome) -> None:
        assert outcome.logits is not None
        tails = [self._tail]
        for token, parent in zip(outcome.tree.tokens[1:].tolist(), outcome.tree.parents[1:].tolist(), strict=True):
            tails.append((*tails[parent], token)[-self.order :])
        self._learn(tails, outcome.logits)
        self._advance(outcome.tokens)

    def law(self, tail: Tail) -> dict[int, float]:
        for length in range(len(tail), 0, -1):
            slot = self._slots.get(tail[-length:])
            if slot is not None:
                break
        else:
            return {}
        shift, slope, fall = self.calibration[length - 1]
        probs, log_probs = {}, self._log_probs[slot].tolist()
        for rank, token in enumerate(self._tokens[slot].tolist()):
            if token >= 0:
                logit = shift + slope * log_probs[rank] + fall * rank
                probs[token] = 1 / (1 + exp(-logit))
        # Calibrated one by one they may add up to more than 1, a distribution's must not.
        total = sum(probs.values())
        return probs if total <= 1 else {token: prob / total for token, prob in probs.items()}

    def describe(self) -> str:
        return f"Token Recycling by the last {self.order} tokens"

    @property
    def settings(self) -> dict[str, Any]:
        return {"calibration": [list(row) for row in self.calibration], "k": self.k, "keep": self.keep}

    def save(self, path: str | Path, vocab: int, tokenizer: str | None = None) -> None:
        """Write what was learnt; `tokenizer` is its fingerprint (`tables.fingerprint`), `vocab` the target's."""
        runs = np.full((len(self._runs), self.order), -1, dtype=np.int32)
        for slot, run in enumerate(self._runs):
            runs[slot, : len(run)] = run
        arrays = {
            "runs": runs,
            "tokens": self._tokens[: len(runs)].astype(np.int32),
            "log_probs": self._log_probs[: len(runs)].astype(np.float32),
        }
        save_table(Path(path), _KIND, Table({"vocab": vocab, "tokenizer": tokenizer}, arrays))

    def load(self, path: str | Path, vocab: int, tokenizer: str | None = None) -> None:
        """Take over what was saved; CheckpointError for a file of another kind, target or tokenizer."""
        arrays = load_table(Path(path), _KIND, vocab, tokenizer).arrays
        runs, columns = arrays["runs"], min(self.k, arrays["tokens"].shape[1])
        self.clear()
        kept = [tuple(token for token in run if token >= 0) for run in runs.tolist()]
        slots = [self._slot(run) for run in kept if len(run) <= self.order]
        known = [row for row, run in enumerate(kept) if len(run) <= self.order]
        self._tokens[slots, :columns] = arrays["tokens"][known, :columns]
        self._log_probs[slots, :columns] = arrays["log_probs"][known, :columns]

    def _advance(self, tokens: Sequence[int]) -> list[Tail]:
        """Append committed tokens; return the tail at each of them."""
        tails = []
        for token in tokens:
            self._tail = (*self._tail, token)[-self.order :]
            tails.append(self._tail)
        return tails

    def _learn(self, tails: list[Tail], logits: Float[Tensor, "rows vocab"]) -> None:
        values, best = best_tokens(logits, self.k)
        wide = torch.promote_types(logits.dtype, torch.float32)
        values = values.to(wide) - logits.to(wide).logsumexp(-1, keepdim=True)
        log_probs, tokens = fetch(values, best)
        runs = [(row, tail[-n:]) for row, tail in enumerate(tails) for n in range(1, len(tail) + 1)]
        slots = [self._slot(run) for _, run in runs]
        rows = [row for row, _ in runs]
        self._tokens[slots, : tokens.shape[1]] = tokens[rows]
        self._log_probs[slots, : tokens.shape[1]] = log_probs[rows]

    def _slot(self, run: Tail) -> int:
        """The slot of a run: its own, a new one, or that of the oldest run."""
        if (slot := self._slots.get(run)) is not None:
            return slot
        if len(self._runs) < self.capacity:
            slot = len(self._runs)
            self._runs.append(run)
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, -1)])
                self._log_probs = np.concatenate([self._log_probs, np.zeros_like(self._log_probs)])
        else:
            slot, self._oldest = self._oldest, (self._oldest + 1) % self.capacity
            del self._slots[self._runs[slot]]
            self._runs[slot] = run
        self._slots[run] = slot
        return slot
