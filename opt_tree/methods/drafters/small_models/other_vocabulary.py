"""A draft model with another tokenizer than the target's: token-level intersection (TLI, arXiv:2502.05202), by bytes.

It drafts the tokens that both vocabularies have, with q'(x) = q(x) / sum of q over them: a distribution over tokens of
the target like any other, so that every verifier stays exact.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.draft_model import CausalLMDrafter, OfModel
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.heads.layer_probe import TEXT
from opt_tree.methods.drafters.small_models.common_tokens import CommonTokens
from opt_tree.methods.drafters.small_models.trimmed import cut_output
from opt_tree.models.causal_lm import CausalLM
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output

_MOST = 160  # tokens of the text
LEAST = 0.1
"""The least share of what a draft model says, and of a text's tokens, that must be common to both vocabularies."""


class OtherVocabulary(CausalLMDrafter):
    """Drafts the tokens that its own vocabulary and the target's both have.

    Its output layer is cut to them, so that the model is this drafter's from then on: a column for each, in the
    target's order. A node is one row of its cache, a token of the context one or several.

    `vocab` is the target's number of logits, `among` the model's own tokens that it may draft; None: all. Raises
    ValueError for an output layer that is not linear, and where too little is common (`LEAST`).
    """

    def __init__(
        self, lm: CausalLM, common: CommonTokens, vocab: int, among: Int[Tensor, " tokens"] | None = None
    ) -> None:
        super().__init__(lm, vocab)
        kept = {*range(lm.vocab)} if among is None else {*among.tolist()}
        pairs = sorted((ours, theirs) for ours, theirs in common.pairs.items() if ours < vocab and theirs in kept)
        tokens, rows = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
        self.mass = mass_of(lm, common, rows)
        """How much of what the model says of a short text goes to tokens that it can draft."""
        if min(self.mass, common.share) < LEAST:
            raise ValueError(
                f"its tokenizer is another one, and {len(tokens)} of the target's {vocab} tokens are common: "
                f"{common.share:.1%} of a short text's, {self.mass:.1%} of what it says; {LEAST:.0%} is the least"
            )
        self.take_model(lm, vocab, vocab, tokens)
        cut_output(lm, rows)
        self._common = common
        self._rows = torch.zeros(vocab, dtype=torch.long).index_copy_(0, tokens, rows).numpy()
        """The model's id of each token of the target that is drafted."""
        self._ids: list[int] = []
        """The text so far as the model reads it. The model's committed rows are its beginning."""
        self._length = 0
        """The target's tokens of it."""

    def room(self, length: int) -> int:
        return self.max_context - max(length, len(self._ids))

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        OfModel.begin(self, prompt, kept, prefill, sampling)
        self._ids, self._length = [], 0
        self._go_on(prompt)
        if kept:  # the text goes on; the cache here may have less of it, and `root` catches up
            self.lm.keep(self._ids, len(self._ids) - 1)
        else:
            self.lm.reset()

    def _go_on(self, tokens: list[int]) -> None:
        """Read what the target wrote."""
        ids, first = self._common.read(tokens), self._common.first
        if not self._length and ids[: len(first)] != first:
            ids = [*first, *ids]
        self._ids += ids
        self._length += len(tokens)

    def root(self, context: list[int]) -> Forward:
        self._go_on(context[self._length :])
        return self.lm.text(self._ids[self.lm.length :])

    def expand(self, frontier: Frontier) -> Forward:
        return super().expand(frontier._replace(tokens=self._rows[frontier.tokens]))

    def accept(self, outcome: Outcome) -> None:
        super().accept(outcome)
        self._go_on(outcome.tokens)  # now, so that `room` knows of it

    def describe(self) -> str:
        common = f"{self._common.share:.0%} of a text's tokens, {self.mass:.0%} of what it says"
        return f"{super().describe()}, of another tokenizer ({common})"

    @property
    def settings(self) -> dict[str, Any]:
        assert self.tokens is not None
        return super().settings | {"common_tokens": len(self.tokens)}


@torch.inference_mode()
def mass_of(lm: CausalLM, common: CommonTokens, rows: Int[Tensor, " rows"]) -> float:
    """Return the mean probability that a model gives to these of its tokens, behind every token of a short text."""
    if not len(rows):
        return 0.0
    lm.reset()
    text = [*common.first, *common.spelled(TEXT.encode())][:_MOST]
    output = lm.append(text[: lm.max_context], all_logits=True)
    mass: Float[Tensor, " tokens"] = output.logits.float().softmax(-1)[:, rows.to(lm.device)].sum(-1)
    lm.reset()
    return float(mass.mean())
