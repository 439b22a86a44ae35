"""What it is to pick siblings: from a layer that the drafter answered to the children that join the pool.

Owns the words of that answer (`Few`, `Layer`, `Picked`). Knows nothing of policies and of verification.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.core.random import Among, Random
from opt_tree.core.tree import fetch, on_host, send


class Few(NamedTuple):
    """A drafter's answer that names few tokens a node instead of scoring the whole vocabulary.

    These are log-probabilities, not scores: their mass may be below 1, what is missing belongs to tokens that are not
    named, and nobody renormalises it. Only deterministic children (`TopK`) can be picked from it.
    """

    log_probs: Float[Tensor, "frontier columns"]
    """-inf: no token in this place."""
    tokens: Int[Tensor, "frontier columns"] | Int[Tensor, " columns"]
    """Different ones in each row, as far as they are possible; one row of them where they are the same everywhere."""


class Reduced(NamedTuple):
    """Scores over a part of the vocabulary; a token outside of it has probability 0 for this drafter.

    A whole law, unlike `Few`: it is normalised, and children can be drawn from it.
    """

    scores: Float[Tensor, "frontier columns"]
    tokens: Int[Tensor, " columns"]
    """The target's ids of the columns, in rising order; beside the scores."""
    vocab: int
    """Tokens of the target."""

    def whole(self) -> Float[Tensor, "frontier vocab"]:
        """Return the same scores with a column a token of the vocabulary."""
        wide = self.scores.new_full((len(self.scores), self.vocab), -torch.inf)
        return wide.index_copy_(1, self.tokens, self.scores)


class Best(NamedTuple):
    """The children of a layer, found where it was computed and not read yet: see `TopK.best`."""

    found: Int[Tensor, "parts ..."]
    first: int = 0
    """The row, of those that were computed, with which the layer begins."""


class Layer(NamedTuple):
    """What the drafter said of a frontier, and what a child of it must be to matter."""

    log_probs: Float[Tensor, "frontier columns"]
    """Of the next token. A row of -inf: nothing is known there, and nothing is picked."""
    above: Float[np.ndarray, " frontier"]
    """Path log-probabilities of the frontier."""
    depth: int
    """Of the frontier; 0 is the root."""
    floor: float
    """Children whose reach is at or below it need not be returned."""
    tokens: Int[Tensor, "frontier columns"] | Int[Tensor, " columns"] | None = None
    """The tokens of the columns, by row or of all rows; None: a column a token of the vocabulary."""
    peaks: Float[Tensor, "frontier groups"] | None = None
    """The greatest of each group of columns; see `Laws`."""
    best: Best | None = None
    """Its children, where whoever computed it has found them."""


class Picked(NamedTuple):
    """The children of one layer; where they are sampled, grouped by frontier row and, below one, as they were drawn."""

    path_log_probs: Float[np.ndarray, " children"]
    """Log-probabilities of the paths from the root."""
    tokens: Int[np.ndarray, " children"]
    rows: Int[np.ndarray, " children"]
    """Rows of the frontier that they are children of."""
    reach: Float[np.ndarray, " children"] | None = None
    """Log of the estimated probability that verification gets to a child, *as known before its token was drawn*.

    Nodes may be ranked by this and kept or dropped accordingly; dropping them by their own probability would be a
    hidden rejection. None for deterministic children, where it is `path_log_probs`.
    """


@runtime_checkable
class Children(Protocol):
    """How siblings are picked from what the drafter says. A type, because a verifier is valid for some kinds only."""

    def pick(self, layer: Layer, random: "Random") -> Picked:
        """Return the children of a layer; tokens of log-probability -inf are never among them."""
        ...

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; verifiers are then shown the distributions they were drawn from."""
        ...

    @property
    def budget(self) -> int | None:
        """How many candidates of the whole pool can matter; None: all of them."""
        ...


class Picking(NamedTuple):
    """How the children of a layer will be picked, for a drafter whose model answers with them; see `Laws.best`."""

    scale: float = 1.0
    """The drafter's scores are taken times this."""
    children: Children | None = None
    """None: whoever asks picks them."""
    above: Float[np.ndarray, " frontier"] | None = None
    """Path log-probabilities of the frontier, where the children are named."""


class Known(NamedTuple):
    """What is known of a layer: whatever is drawn is drawn from these rows and columns."""

    log_probs: Float[Tensor, "known columns"]
    above: Float[Tensor, "known 1"]
    rows: Int[Tensor, "known 1"]
    """Their places in the frontier."""
    among: Among | None
    """The tokens of the columns; None: all of the vocabulary."""

    def tokens(self, columns: Int[Tensor, "known drawn"]) -> Int[Tensor, "known drawn"]:
        """The tokens of columns."""
        return columns if self.among is None else self.among.tokens[columns]


def known(layer: Layer) -> Known:
    """Leave out the rows of -inf; and the tokens that are -inf everywhere, where few are not (behind a top-p cut).

    On a device all stays, since the host would wait for what is left: `read` drops the children of such rows.
    """
    log_probs, among = layer.log_probs, few_possible(layer.log_probs)
    above = send(layer.above, log_probs.device, log_probs.dtype)
    if not on_host(log_probs):
        return Known(log_probs, above[:, None], torch.arange(len(log_probs), device=above.device)[:, None], None)
    if among is not None:
        log_probs = log_probs.index_select(1, among.tokens)
    rows = log_probs.isneginf().all(1).logical_not_().nonzero().squeeze(1)
    if len(rows) < len(log_probs):
        log_probs, above = log_probs[rows], above[rows]
    return Known(log_probs, above[:, None], rows[:, None], among)


def read(
    values: Float[Tensor, "known children"],
    tokens: Int[Tensor, "known children"],
    rows: Int[Tensor, "known children"],
    reach: Float[Tensor, "known children"],
    real: Bool[Tensor, "known children"],
) -> Picked:
    """Return the possible ones among the `real` children, row after row. The host waits once."""
    *found, kept = fetch(values, tokens, rows, reach, real)
    kept &= found[0] > -np.inf
    return Picked(*(column[kept] for column in found))


def few_possible(log_probs: Float[Tensor, "rows vocab"]) -> Among | None:
    """The tokens that are not -inf in every row, on the host; None where they are many, as the first row tells."""
    vocab = log_probs.shape[1]
    if not on_host(log_probs) or (log_probs[:1] != -torch.inf).sum() > vocab // 8:
        return None
    tokens = (log_probs.numpy() != -np.inf).any(0).nonzero()[0]
    return Among(torch.from_numpy(tokens), vocab) if 0 < len(tokens) <= vocab // 2 else None


def siblings_at(per_node: int | tuple[int, ...] | None, depth: int) -> int:
    """How many children a node of that depth has."""
    assert per_node is not None
    return per_node[depth] if isinstance(per_node, tuple) else per_node


def check_siblings(per_node: int | tuple[int, ...] | None) -> None:
    """Raise ValueError unless every node has a child."""
    counts = per_node if isinstance(per_node, tuple) else (per_node,)
    if not counts or min(count or 0 for count in counts) < 1:
        raise ValueError(f"a sampled node has at least one child, got {per_node}")
