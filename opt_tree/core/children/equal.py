"""Siblings drawn independently may be equal: which candidates of a pool are, for the drafter one node.

Owns what follows from that: one row of the drafter's answer for all of them. Knows nothing of how they are ranked.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.core.tree import send

_FIRST = np.array([0])


class EqualSiblings:
    """Which sampled candidates carry the same text, and what their children are drawn from.

    Independent draws repeat each other. Candidates of one text are one node to the drafter: their children are drawn
    from one and the same distribution, which stands here once.
    """

    def __init__(self) -> None:
        self.first = _FIRST
        """Of each candidate, the first one of the same text."""
        self._answer_row = _FIRST  # of each frontier row, the row of the drafter's answer that is meant for it
        self._answers: list[Tensor] = []

    def spread(self, log_probs: Float[Tensor, "expanded vocab"]) -> Float[Tensor, "frontier vocab"]:
        """Keep a layer's answer and return it with a row for every row of the frontier."""
        self._answers.append(log_probs)
        return log_probs[send(self._answer_row, log_probs.device)]

    def add(self, parents: Int[np.ndarray, " layer"], tokens: Int[np.ndarray, " layer"]) -> None:
        """Note a layer of new candidates."""
        texts = np.stack([self.first[parents], tokens])
        _, first, text = np.unique(texts, axis=1, return_index=True, return_inverse=True)
        self.first = np.concatenate([self.first, len(self.first) + first[text]])

    def merge(self, frontier: Int[np.ndarray, " frontier"]) -> Int[np.ndarray, " expanded"]:
        """Return the frontier with every text once; the next answer is to these rows."""
        rows, self._answer_row = np.unique(self.first[frontier], return_inverse=True)
        return rows

    def drawn_from(self) -> Float[Tensor, "expanded vocab"] | None:
        """The drafter's log-probabilities behind every node expanded so far, the root's first."""
        return torch.cat(self._answers) if self._answers else None
