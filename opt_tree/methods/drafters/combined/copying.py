"""A model that also copies: the n-grams of the text at hand, and the model for what they leave open.

Owns the mixture. Interpolating a model with counts of the recent text is a *cache language model* (Kuhn and De Mori,
1990). A one-layer head attends to the text and still copies badly; counts do it at no forward.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opt_tree.children import LogProbs
from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.around import described, settings_of
from opt_tree.methods.drafters.combined.grafted import Joined, numbered
from opt_tree.methods.drafters.registry import DrafterOptions, load_drafter, register
from opt_tree.methods.drafters.tables.ngram import BETA, NGramDrafter
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import refused
from opt_tree.pool import Frontier
from opt_tree.tree import send

COPY_BETA = tuple(4 * beta for beta in BETA)
"""Four times what n-grams alone take: a model is a better guess than nothing. Chosen with the head of smollm2, on
Vicuna's questions, passages to summarise and questions about passages."""
_WIDTH = 32
"""The model's best tokens that are named beside those of the text."""


class Copying(Joined):
    """p(w) = text(w) + (1 - sum of text) x model(w), where `text` are the n-grams of the text at hand (`interpolate`).

    The more often and the longer a run of tokens was seen, the less is left to the model; where nothing was, it answers
    alone. Named are the model's best tokens and those of the text. Example: the text says "b" with .6 and nothing else,
    the model "a" .5, "b" .3:

        a  .4 x .5 = .20        b  .6 + .4 x .3 = .72
    """

    def __init__(self, drafter: Drafter, beta: Sequence[float] = COPY_BETA) -> None:
        if drafter.names_few:
            raise TypeError(f"{drafter.describe()} names a few tokens only: copying takes a whole law beside the text")
        self.text = NGramDrafter(beta)
        super().__init__(drafter, self.text)

    def root(self, context: list[int]) -> Asked:
        self.lead(context)
        known = self.text.root(context)
        return self.after(self.drafter.root(context), lambda answer: mixed(answer, known)) if self.led else known

    def expand(self, frontier: Frontier) -> Asked:
        known = self.text.expand(frontier)
        return self.after(self.drafter.expand(frontier), lambda answer: mixed(answer, known)) if self.led else known

    def accept(self, outcome: Outcome) -> None:
        rows = outcome.tree.draft_rows
        self.drafter.accept(outcome if self.led else numbered(outcome, np.full_like(rows, -1)))
        self.text.accept(outcome)

    def describe(self) -> str:
        return f"{described(self.drafter)}, copying from the text at hand"

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.drafter) | {"copies": self.text.settings}


def mixed(answer: LogProbs, known: LogProbs) -> LogProbs:
    """Return what the text says and, of the mass that it leaves, what the model does; see `Copying`."""
    best, places = answer.values.topk(min(_WIDTH, answer.values.shape[1]))
    if answer.tokens is None:
        model = places
    else:
        names = send(answer.tokens, places.device)
        model = names.gather(1, places) if names.ndim == 2 else names[places]
    assert known.tokens is not None, "a text names a few tokens"
    copied, tokens = send(known.values, best.device).exp(), send(known.tokens, best.device)
    probs = best.double().exp() * (1 - copied.sum(1, keepdim=True)).clamp_min(0)
    same = model[:, :, None] == tokens[:, None, :]
    probs = probs + (same * copied[:, None, :]).sum(2)
    copied = copied.masked_fill(same.any(1), 0.0)
    return LogProbs(torch.cat([probs, copied], 1).log(), torch.cat([model, tokens], 1))


@register("copy", about="a model that also copies from the text at hand: copy:eagle:demo", others=lambda path: [path])
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    with refused(f"copy:{path}"):
        return Copying(load_drafter(path, target, options))
