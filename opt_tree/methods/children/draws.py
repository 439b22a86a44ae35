"""The draws of children, with the fresh numbers of a generation, and the probabilities that they are made from."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.children import LogProbs, nothing_known
from opt_tree.sampling import LazyLogits, Logits, Random
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


def over_vocabulary(answer: LogProbs) -> Float[Tensor, "nodes vocab"]:
    """Return a column for each token, as far as the last one that is named: what children can be drawn from.

    Raises TypeError where only a few tokens are named.
    """
    whole = answer.unpicked
    values, tokens = whole.values, whole.tokens
    if tokens is None:
        return values
    if tokens.ndim == 2:
        raise TypeError("children are drawn from a whole distribution; this drafter names a few tokens only")
    wide = values.new_full((len(values), int(tokens[-1]) + 1), -torch.inf)
    return wide.index_copy_(1, tokens.to(wide.device), values)


def whole(logits: Logits) -> Float[Tensor, "rows vocab"]:
    """All rows, for whoever needs nearly every one."""
    return torch.stack([logits[row] for row in range(len(logits))]) if isinstance(logits, LazyLogits) else logits


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


def invert(probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, "rows draws"]) -> Int[Tensor, "rows draws"]:
    """The tokens at which the rows' cumulative distributions exceed the uniforms' share of the whole."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the point, so a token of probability 0 never wins; the
    # product may round up to the whole, which no token exceeds.
    points = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True)


def draws_of(random: Random) -> Draws:
    """Return what draws the children of a generation: the same in all its steps."""
    if Draws not in random.beside:
        random.beside[Draws] = Draws(random.fresh)
    return random.beside[Draws]
