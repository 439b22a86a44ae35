"""What a drafter answers: which tokens may follow these nodes, and how likely. Owns normalisation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.tree import on_host


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Normalised log-probabilities of the next token, a row a node; valid until the drafter is asked again."""

    values: Float[Tensor, "nodes columns"]
    """-inf: impossible. A row of -inf says that nothing is known there: the node has no children."""
    tokens: Int[Tensor, " columns"] | Int[Tensor, "nodes columns"] | None = None
    """The target's tokens of the columns; None: a column for each token of the vocabulary. One list for all nodes, in
    rising order and on the host, is a draft vocabulary: whole distributions. A list for each node names a few of its
    tokens: what their mass is below 1 belongs to tokens that are not named."""
    whole: "Callable[[], LogProbs] | None" = None
    """Where a few tokens of each node are named that a model picked: the distributions that they were picked from."""

    @classmethod
    def of(
        cls, scores: Float[Tensor, "nodes columns"], tokens: Int[Tensor, " columns"] | None = None, scale: float = 1.0
    ) -> Self:
        """Normalise scores times `scale`, in float32 or wider. Logits are scores, and so are log-probabilities."""
        if scale != 1:
            # A widened copy is ours to overwrite; scores that are wide enough are not.
            scores = scores * scale if scores.dtype.itemsize >= 4 else scores.float().mul_(scale)
        return cls(log_probs_of(scores), tokens)

    @property
    def unpicked(self) -> "LogProbs":
        """The same before a model picked a few tokens of each node, for whoever changes the mass of others, too."""
        return self if self.whole is None else self.whole()

    def over_vocabulary(self) -> Float[Tensor, "nodes vocab"]:
        """Return a column for each token, as far as the last one that is named: what children can be drawn from.

        Raises TypeError where only a few tokens are named.
        """
        whole = self.unpicked
        values, tokens = whole.values, whole.tokens
        if tokens is None:
            return values
        if tokens.ndim == 2:
            raise TypeError("children are drawn from a whole distribution; this drafter names a few tokens only")
        wide = values.new_full((len(values), int(tokens[-1]) + 1), -torch.inf)
        return wide.index_copy_(1, tokens.to(wide.device), values)


def log_probs_of(scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return the log-probabilities that scores stand for, in float32 or wider.

    A row of -inf says that nothing is known there, and stays as it is.
    """
    log_probs = scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return nothing_known(scores, log_probs, -torch.inf)


def nothing_known(scores: Tensor, normalised: Tensor, value: float) -> Tensor:
    """Put a value in rows whose scores are -inf throughout. Other NaNs are a fault of whoever scored: they stay."""
    # Normalising such a row divides nothing by nothing. One column tells whether there is one: its NaN is everywhere.
    if on_host(scores) and not normalised[..., 0].isnan().any():
        return normalised
    return normalised.masked_fill(scores.isneginf().all(-1, keepdim=True), value)
