"""An independent drafter that cannot hold a tree: a small hybrid or recurrent model."""

from typing import Any

import numpy as np

from opt_tree.children import LogProbs
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.models.chain_lm import AnyLM, ChainLM
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output


class ChainLMDrafter(Drafter):
    """Drafts with a small `ChainLM`, whatever tree: a layer of the tree is a batch, every node with a state of its own.

    After a step the state is that of the context again, and accepted tokens are taken in with the target's own one:
    the forwards of `CausalLMDrafter`, a few rows more. `vocab` as there.
    """

    def __init__(self, lm: ChainLM, vocab: int | None = None) -> None:
        self.lm = lm
        self.vocab = min(vocab or lm.vocab, lm.vocab)
        self.max_context, self.models = lm.max_context, (lm,)
        self._first, self._expanded = 0, 0
        """Draft rows: the first of the newest layer, and how many there are."""

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)  # its own model takes in the whole of it

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self.lm.reset()

    def root(self, context: list[int]) -> Forward:
        missing = [token if token < self.lm.vocab else 0 for token in context[self.lm.length :]]
        self._first, self._expanded = 0, 1
        return self.lm.text(missing)

    def expand(self, frontier: Frontier) -> Forward:
        rows = np.asarray(frontier.parents) - self._first
        self._first, self._expanded = self._expanded, self._expanded + len(rows)
        return self.lm.layer(rows, frontier.tokens)

    def read(self, output: Output) -> LogProbs:
        return LogProbs.of(output.logits[:, : self.vocab], scale=self.scale)

    def accept(self, outcome: Outcome) -> None:
        """Nothing: the context that `root` is asked with says what survived."""

    def describe(self) -> str:
        return f"draft model {self.name or self.lm.name}: {self.lm.size}, path by path"

    @property
    def settings(self) -> dict[str, Any]:
        return {"draft_dtype": str(self.lm.dtype).removeprefix("torch.")}


def model_drafter(lm: AnyLM, vocab: int | None = None) -> CausalLMDrafter | ChainLMDrafter:
    """Return the drafter around a wrapped model, for a target of so many logits."""
    return ChainLMDrafter(lm, vocab) if isinstance(lm, ChainLM) else CausalLMDrafter(lm, vocab)
