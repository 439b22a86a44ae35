"""What drafters of one model have in common: its vocabulary beside the target's, and how its forward is an answer.

Knows nothing of what the model reads.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.core.answers import LogProbs
from opt_tree.core.sampling import Sampling
from opt_tree.core.target import Drafted, Output
from opt_tree.core.tree import send
from opt_tree.drafters.base import Asked, Drafter
from opt_tree.models.causal_lm import CausalLM


class OfModel(Drafter):
    """A drafter that answers by one forward of a `CausalLM`. A subclass says which model (`take_model`)."""

    lm: CausalLM
    vocab: int
    """The target's first tokens, as many as the model knows."""
    drafted: Drafted
    tokens: Int[Tensor, " columns"] | None = None
    """The draft vocabulary: those of them that it drafts; None: all."""

    def take_model(self, lm: CausalLM, vocab: int, whole: int, tokens: Int[Tensor, " columns"] | None = None) -> None:
        """Draft with this model for a target of `whole` tokens."""
        self.lm, self.models, self.vocab, self._whole = lm, (lm,), vocab, whole
        self.tokens = None if tokens is None else tokens.cpu()  # children are named where they are read
        self.drafted = lm.drafted = drafted_by(lm, vocab, self.tokens)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self.drafted.scale.fill_(self.scale)

    def known(self, tokens: list[int]) -> list[int]:
        """Return tokens for the model to read: 0 for those that only the target knows (a padded vocabulary)."""
        return [token if token < self.vocab else 0 for token in tokens]

    def read(self, output: Output) -> Asked:
        return self.answer(output)

    def answer(self, output: Output) -> LogProbs:
        """Return what a forward says of the tokens that are drafted.

        Tokens that only the target knows are never proposed, nor columns that the target has not.
        """
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


def drafted_by(lm: CausalLM, vocab: int, tokens: Int[Tensor, " columns"] | None) -> Drafted:
    """What a drafter reads of this model's logits that drafts these tokens, or the first `vocab` of the target's."""
    scale = torch.ones(1, dtype=torch.promote_types(lm.dtype, torch.float32), device=lm.device)
    if tokens is None:
        return Drafted(vocab, None, scale)
    return Drafted(len(tokens), send(tokens, lm.device), scale)
