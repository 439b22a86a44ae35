"""Token Recycling: the candidates that the target named and did not choose, kept for the next time (arXiv:2408.08696).

Owns the paper's table, by the last token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.generation import Outcome
from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.tables.lookup import Lookup, Tail
from opt_tree.models.chain_lm import AnyLM
from opt_tree.sampling import Temperature
from opt_tree.target import Output
from opt_tree.tree import fetch, on_host

RANK_RATES = (0.33, 0.08, 0.05, 0.03, 0.03, 0.02, 0.01, 0.01)
"""How often the target's 1st, 2nd, ... candidate after a token is right the next time: the demo target's, measured."""
_PRIOR = 200
"""How many observations `RANK_RATES` are worth beside those that a table makes itself."""


class TokenRecycling(Lookup):
    """The published matrix: a table of the target's `k` best tokens after each token, the newest row of each.

    It is filled from every row that the target scores, rejected ones and the prompt's included (the published code
    leaves the prompt out). The paper drafts a fixed tree of 80 nodes on it; `presets.token_recycling` does.

    Any other policy may draft on it, too. The table knows ranks only, hence a probability is a rank's rate, the same
    after every token: OPT-Tree on it is the best static tree of its size. The rates begin as `rates` and are counted
    on: along every accepted path the table is asked which of its ranks was right, as one that has learnt more is more
    often. Neither the rates nor OPT-Tree above them are the paper's.

    What was learnt stays from prompt to prompt until `clear`, unless `keep=False`.
    """

    reads_logits = True

    def __init__(self, vocab: int, rates: Sequence[float] = RANK_RATES, keep: bool = True) -> None:
        super().__init__(1)
        if not rates or min(rates) < 0 or sum(rates) > 1:
            raise ValueError(f"the rates of the ranks are 0 or more each and at most 1 together, got {tuple(rates)}")
        self.vocab, self.keep, self.learns = vocab, keep, keep
        self._rates = np.array(rates, dtype=np.float64)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._coming: Callable[[], list[np.ndarray]] | None = None
        """The candidates of the tree that was scored last, on their way to the host."""
        # One row more than tokens: index -1, which stands for a token outside of the table.
        self.table = np.full((self.vocab + 1, len(self._rates)), -1, dtype=np.int32)
        self._right, self._asked = _PRIOR * self._rates, _PRIOR
        self._now = self.rates.tolist()

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        """Learn from what is new; what the turns before have taught stays, also where `keep` is off."""
        super().begin(prompt, kept, prefill, sampling)
        if not self.keep and not kept:
            self.clear()
        self._coming = None  # of a step that failed behind its scoring
        if prefill is not None:
            self._learn(np.array(prompt[kept:-1]), prefill.logits)

    def scored(self, output: Output) -> None:
        self._coming = self._named(output.logits)

    def accept(self, outcome: Outcome) -> None:
        self._count(outcome.tree.tokens[outcome.path], outcome.tokens)
        self._learn(outcome.tree.tokens, outcome.logits)

    def _count(self, tokens: Int[np.ndarray, " path"], followers: Sequence[int]) -> None:
        """Note which rank of each token's row, as it was, named what followed."""
        rows = self.table[tokens]
        self._asked += int((rows[:, 0] >= 0).sum())
        self._right += (rows == np.array(followers)[:, None]).sum(0)
        self._now = self.rates.tolist()

    def _learn(self, tokens: Int[np.ndarray, " rows"], logits: Float[Tensor, "rows vocab"]) -> None:
        coming, self._coming = self._coming or self._named(logits), None
        (best,) = coming()
        self.table[tokens, : best.shape[1]] = best  # of a token's rows the last one stays

    def _named(self, logits: Float[Tensor, "rows vocab"]) -> Callable[[], list[np.ndarray]]:
        return _fetch_later(logits.topk(min(len(self._rates), logits.shape[1])).indices)

    def law(self, tail: Tail) -> dict[int, float]:
        pairs = zip(self.table[tail[-1]].tolist(), self._now, strict=True)
        return {token: rate for token, rate in pairs if token >= 0}

    @property
    def rates(self) -> Float[np.ndarray, " ranks"]:
        """How often each rank is right, as far as is known by now."""
        return self._right / self._asked

    def describe(self) -> str:
        return "Token Recycling"

    @property
    def settings(self) -> dict[str, Any]:
        return {"rates": self._rates.tolist(), "keep": self.keep}


@register("recycling", about="Token Recycling's matrix: the target's candidates after each token", paper="2408.08696")
def _load(path: str, target: AnyLM, options: DrafterOptions) -> TokenRecycling:
    return TokenRecycling(target.vocab)


def _fetch_later(*tensors: Tensor) -> Callable[[], list[np.ndarray]]:
    """Begin to copy tensors of one device to the host; what is returned has them, and waits if they are not there.

    A read in between has waited for them: what a device is asked for it does in order.
    """
    if on_host(tensors[0]):
        return lambda: fetch(*tensors)
    copies, there = [tensor.to("cpu", non_blocking=True) for tensor in tensors], torch.Event(tensors[0].device)
    there.record()

    def arrived() -> list[np.ndarray]:
        there.synchronize()
        return [copy.numpy() for copy in copies]

    return arrived
