"""Children that are drawn from the drafter's distribution: their pool, and what kinds of draws have in common.

Owns what follows from a draw: a pool remembers what its children were drawn from, ranks them by what was known before
the draw, and hands equal siblings to the drafter once.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.children import LogProbs, log_probs_of
from opt_tree.methods.children.draws import Among, over_vocabulary
from opt_tree.pool import CandidatePool, Frontier, Picked
from opt_tree.sampling import Random, Temperature
from opt_tree.tree import Tree, fetch, on_host, send


class DrawnLayer(NamedTuple):
    """What children of a frontier are drawn from, and what a child must be to matter."""

    log_probs: Float[Tensor, "frontier vocab"]
    """Of the next token. A row of -inf: nothing is known there, and nothing is drawn."""
    above: Float[np.ndarray, " frontier"]
    """Path log-probabilities of the frontier."""
    depth: int
    """Of the frontier; 0 is the root."""
    floor: float
    """Children whose reach is at or below it need not be returned."""


def proposal(scores: Float[Tensor, "rows vocab"], sampling: Temperature) -> Float[Tensor, "rows vocab"]:
    """Return the log-probabilities that children are drawn from: the drafter's at the target's temperature and cuts.

    Any distribution would be exact, as long as the verifier is shown the one that was sampled from; this one is near
    the target's. Processors that need history are the target's alone. At temperature 0 it is left as it is: a point
    mass would draw the same child over and over.
    """
    return log_probs_of(sampling.warp(scores))


class DrawnChildren(NamedTuple):
    """The children of one layer (see `Picked`), grouped by frontier row and, below one, as they were drawn."""

    path_log_probs: Float[np.ndarray, " children"]
    tokens: Int[np.ndarray, " children"]
    rows: Int[np.ndarray, " children"]
    reach: Float[np.ndarray, " children"]
    """Log of the estimated probability that verification gets to a child, *as known before its token was drawn*.

    Nodes may be ranked by this and kept or dropped accordingly; dropping them by their own probability would be a
    hidden rejection.
    """


class Drawn(ABC):
    """A kind of children that are drawn."""

    @abstractmethod
    def pick(self, layer: DrawnLayer, random: Random) -> DrawnChildren:
        """Draw the children of a layer; tokens of log-probability -inf are never among them."""

    def pool(self, root: int, sampling: Temperature, random: Random) -> "DrawnPool":
        """See `Children.pool`."""
        return DrawnPool(root, self, sampling, random)


class DrawnPool(CandidatePool):
    """The candidates of a step whose children are drawn, from the drafter's distribution as `sampling` warps it.

    They are ranked by their reach: what was known before the token was drawn. Otherwise its own probability would
    decide whether it is kept (see `DrawnChildren.reach`). Independent draws repeat each other. Candidates of one text
    are one node to the drafter: their children are drawn from one and the same distribution, which stands here once.
    """

    def __init__(self, root: int, children: Any, sampling: Temperature, random: Random) -> None:
        super().__init__(root, children)
        self._sampling, self._random = sampling, random
        self._reach: Float[np.ndarray, " pool"] = np.zeros(1)
        self._first = np.array([0])
        """Of each candidate, the first one of the same text."""
        self._asked = np.array([0])
        """Of each row of the frontier, the row of the drafter's answer that is meant for it."""
        self._answers: list[Tensor] = []

    @property
    def reach(self) -> Float[np.ndarray, " pool"]:
        return self._reach

    def add(self, answer: LogProbs) -> None:
        log_probs = proposal(over_vocabulary(answer), self._sampling)
        self._answers.append(log_probs)
        log_probs = log_probs[send(self._asked, log_probs.device)]
        picked = self.children.pick(DrawnLayer(log_probs, self._above, self.depth, self.floor), self._random)
        self._store(Picked(*picked[:3]))
        parents, tokens = self.parents[self.layer :], self.tokens[self.layer :]
        texts = np.stack([self._first[parents], tokens])
        _, first, text = np.unique(texts, axis=1, return_index=True, return_inverse=True)
        self._first = np.concatenate([self._first, self.layer + first[text]])
        self._reach = np.concatenate([self._reach, np.minimum(picked.reach, self._reach[parents])])

    def frontier(self, rows: Int[np.ndarray, " frontier"]) -> Frontier:
        """See `CandidatePool.frontier`. Candidates of the same text are one row there."""
        once, self._asked = np.unique(self._first[rows], return_inverse=True)
        found = self._expand(once)
        self._frontier, self._above = rows, self.path_log_probs.take(rows)
        self.draft_rows[rows] = self.draft_rows[self._first[rows]]
        return found

    def tree(self, rows: Int[np.ndarray, " rows"]) -> Tree:
        """See `CandidatePool.tree`. Siblings are kept up to some one of them, in the order they were drawn.

        Whether there is another one may depend on those before it; a gap would mean that the token itself decided,
        which no verifier corrects for.
        """
        tree = super().tree(rows)
        rows = np.sort(rows)
        if (skipped := _ranks(self.parents)[rows] != _ranks(tree.parents)).any():
            raise ValueError(f"sampled candidate {rows[skipped][0]} was selected without a sibling drawn before it")
        return replace(tree, draft_log_probs=torch.cat(self._answers))


def _ranks(parents: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The place of each row among the rows of the same parent, in the order in which they stand."""
    order = np.argsort(parents, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - np.searchsorted(parents[order], parents[order])
    return ranks


class KnownLayer(NamedTuple):
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


def known(layer: DrawnLayer) -> KnownLayer:
    """Leave out the rows of -inf; and the tokens that are -inf everywhere, where few are not (behind a top-p cut).

    On a device all stays, since the host would wait for what is left: `read` drops the children of such rows.
    """
    log_probs, among = layer.log_probs, few_possible(layer.log_probs)
    above = send(layer.above, log_probs.device, log_probs.dtype)
    if not on_host(log_probs):
        return KnownLayer(log_probs, above[:, None], torch.arange(len(log_probs), device=above.device)[:, None], None)
    if among is not None:
        log_probs = log_probs.index_select(1, among.tokens)
    rows = log_probs.isneginf().all(1).logical_not_().nonzero().squeeze(1)
    if len(rows) < len(log_probs):
        log_probs, above = log_probs[rows], above[rows]
    return KnownLayer(log_probs, above[:, None], rows[:, None], among)


def read(
    values: Float[Tensor, "known children"],
    tokens: Int[Tensor, "known children"],
    rows: Int[Tensor, "known children"],
    reach: Float[Tensor, "known children"],
    real: Bool[Tensor, "known children"],
) -> DrawnChildren:
    """Return the possible ones among the `real` children, row after row. The host waits once."""
    *found, kept = fetch(values, tokens, rows, reach, real)
    kept &= found[0] > -np.inf
    return DrawnChildren(*(column[kept] for column in found))


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
