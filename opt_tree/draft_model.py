"""Drafters of one model: its vocabulary beside the target's, how its forward is an answer, and a plain draft model."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.children import LogProbs
from opt_tree.drafter import Asked, Drafter
from opt_tree.errors import require
from opt_tree.generation import Outcome
from opt_tree.model import Model
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Drafted, Forward, Output
from opt_tree.tree import send


class OfModel(Drafter):
    """A drafter that answers by one forward of a `Model`. A subclass says which model (`take_model`)."""

    lm: Model
    vocab: int
    """The target's first tokens, as many as the model knows."""
    drafted: Drafted
    tokens: Int[Tensor, " columns"] | None = None
    """The draft vocabulary: those of them that it drafts; None: all."""

    def take_model(self, lm: Model, vocab: int, whole: int, tokens: Int[Tensor, " columns"] | None = None) -> None:
        """Draft with this model for a target of `whole` tokens."""
        self.lm, self.models, self.vocab, self._whole = lm, (lm,), vocab, whole
        self.tokens = None if tokens is None else tokens.cpu()  # children are named where they are read
        scale = torch.ones(1, dtype=torch.promote_types(lm.dtype, torch.float32), device=lm.device)
        there = None if self.tokens is None else send(self.tokens, lm.device)
        self.drafted = lm.drafted = Drafted(vocab if there is None else len(there), there, scale)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self.drafted.scale.fill_(self.scale)

    def known(self, tokens: list[int]) -> list[int]:
        """Return tokens for the model to read: 0 for those that only the target knows (a padded vocabulary)."""
        return [token if token < self.vocab else 0 for token in tokens]

    def read(self, output: Output) -> Asked:
        return self.answer(output)

    def answer(self, output: Output) -> LogProbs:
        """Return what a forward says of the tokens that are drafted."""
        if output.best is None or self.lm.drafted is not self.drafted:  # the model is another drafter's by now
            return self._whole_of(output.logits)
        bits, tokens = output.best
        values = bits.view(self.drafted.scale.dtype)
        return LogProbs(values, tokens, lambda: self._whole_of(output.logits))

    def _whole_of(self, logits: Float[Tensor, "rows vocab"]) -> LogProbs:
        if self.tokens is None and logits.shape[1] > self.vocab:
            logits = logits[:, : self.vocab]
        return LogProbs.of(logits, self.tokens, self.scale)

    @property
    def settings(self) -> dict[str, Any]:
        return {"draft_dtype": str(self.lm.dtype).removeprefix("torch.")}

    def _size(self) -> str:
        """The model's size and, where there is one, its draft vocabulary's, for a reader."""
        return self.lm.size if self.tokens is None else f"{self.lm.size}, {len(self.tokens)} tokens of {self._whole}"


class CausalLMDrafter(OfModel):
    """Drafts with a small causal LM. Accepted rows of its cache are kept: same tokens, positions and ancestors.

    `vocab`: the target's number of logits. Tokens that the model lacks are never proposed, and read as token 0; those
    that the target lacks are cut before the softmax. Whoever loads the pair checks that the tokenizers agree.
    """

    def __init__(self, lm: Model, vocab: int | None = None) -> None:
        require(Model, lm=lm)
        whole = vocab or lm.vocab
        self.take_model(lm, min(whole, lm.vocab), whole)
        self.max_context = lm.max_context

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        if kept:  # the text goes on; the cache here may have less of it, and `root` catches up
            self.lm.keep(self.known(prompt), len(prompt) - 1)  # one token at least is left for `root` to run
        else:
            self.lm.reset()

    def root(self, context: list[int]) -> Forward:
        """Catch up with the context; between steps that is the target's own token and at most one accepted one."""
        return self.lm.text(self.known(context[self.lm.length :]))

    def expand(self, frontier: Frontier) -> Forward:
        # Depth 1 follows the root, which is the last committed row here.
        return Forward(self.lm, frontier.tokens, frontier.depths + (self.lm.length - 1), frontier.visible)

    def accept(self, outcome: Outcome) -> None:
        numbers = outcome.tree.draft_rows.tolist()
        self.lm.commit([numbers[row] - 1 for row in outcome.path[1:] if numbers[row] > 0])

    def describe(self) -> str:
        return f"draft model {self.name or self.lm.name}: {self._size()}"
