"""The draws of children, with the fresh numbers of a generation, and the probabilities that they are made from."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.children import nothing_known
from opt_tree.sampling import Random, invert
from opt_tree.tree import send


class Among(NamedTuple):
    """Which columns of a vocabulary a matrix holds, where it leaves out those that are impossible."""

    tokens: Int[Tensor, " columns"]
    vocab: int


def probs_of(scores: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Return the probabilities that scores or log-probabilities stand for, in float64; zeros for a row of -inf.

    Children are drawn from them, and verifiers are told them: both sides have the same numbers.
    """
    return nothing_known(scores, scores.softmax(-1, dtype=torch.float64), 0.0)


class Draws:
    """Every draw of a generation's children."""

    def __init__(self, fresh: np.random.Generator) -> None:
        """`fresh`: numbers that are used once."""
        self._fresh = fresh
        self._races: dict[torch.device, torch.Generator] = {}
        self._buffer = torch.empty(0, dtype=torch.float64)

    def iid(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        """Draw `k` tokens a row, independently."""
        return invert(probs, send(self._fresh.random((len(probs), k)), probs.device))

    def distinct(
        self, probs: Float[Tensor, "rows columns"], k: int, among: Among | None = None
    ) -> Int[Tensor, "rows k"]:
        """Draw `k` different columns a row, each without those before it; impossible ones come last.

        An exponential race: of independent arrival times with the tokens' probabilities as rates the first is a draw
        from the distribution, the second one from what is left, and so on. The noise is drawn where `probs` lie, for
        the whole vocabulary, so that what is drawn does not depend on which impossible tokens were left out.
        """
        if probs.device not in self._races:
            self._races[probs.device] = torch.Generator(probs.device).manual_seed(int(self._fresh.integers(2**63)))
        noise = self._room(len(probs), probs.shape[1] if among is None else among.vocab, probs.device)
        noise.exponential_(generator=self._races[probs.device])
        if among is not None:
            noise = noise.index_select(1, among.tokens)
        return torch.where(probs > 0, noise / probs, torch.inf).topk(k, largest=False).indices

    def _room(self, rows: int, columns: int, device: torch.device) -> Float[Tensor, "rows columns"]:
        """A buffer, kept: the C library gives and takes back blocks above 32 MB anew, page by page."""
        if self._buffer.device != device or self._buffer.numel() < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=torch.float64, device=device)
        return self._buffer[: rows * columns].view(rows, columns)


def draws_of(random: Random) -> Draws:
    """Return what draws the children of a generation: the same in all its steps."""
    if Draws not in random.beside:
        random.beside[Draws] = Draws(random.fresh)
    return random.beside[Draws]
