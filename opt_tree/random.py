"""The one source of randomness.

Owns every random number of a generation. Knows nothing of trees: it draws from the distributions that it is given.
"""

from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.arguments import require


class Among(NamedTuple):
    """Which columns of a vocabulary a matrix holds, where it leaves out those that are impossible."""

    tokens: Int[Tensor, " columns"]
    vocab: int


class Random:
    """Every random number of a generation, from one seed.

    The uniform behind the t-th emitted token is fixed by (seed, t) alone: all nodes of one depth share it, and those
    drawn for positions that were not reached are kept for the next step. Only one node of a depth is ever on the
    accepted path, so its draw is an independent draw from the target's distribution there; and the text of a seed is
    the same whatever the tree, the drafter or the budget, plain decoding included.

    Sampled drafts and the decisions of verifiers other than `match` take fresh numbers from streams of their own, used
    once: the text then depends on the tree as well, its distribution does not.
    """

    def __init__(self, seed: int = 0) -> None:
        require(Integral, seed=seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._ahead: list[float] = []
        self._fresh = np.random.default_rng((seed % 2**64, 1))
        self._races: dict[torch.device, torch.Generator] = {}
        self._noise = torch.empty(0, dtype=torch.float64)

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        """Draw one token a row by inverting its cumulative sum. `depths`: how many tokens ahead a row's draw is."""
        self._look_ahead(int(depths.max()) + 1)
        uniforms = torch.tensor(self._ahead, dtype=torch.float64)[torch.from_numpy(depths)].to(probs.device)
        return _invert(probs, uniforms[:, None]).squeeze(-1)

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens are committed: their uniforms are spent, looked at or not."""
        self._look_ahead(tokens)
        del self._ahead[:tokens]

    def _look_ahead(self, tokens: int) -> None:
        while len(self._ahead) < tokens:
            self._ahead += torch.rand(32, generator=self._generator, dtype=torch.float64).tolist()

    def choose(self, probs: Float[np.ndarray, " vocab"]) -> int:
        """Draw one token on the host, with fresh randomness. `probs` need not be normalised."""
        return int(_invert(torch.from_numpy(probs)[None], torch.tensor([[self._fresh.random()]])))

    def accept(self, probability: float) -> bool:
        """Toss a coin of the given probability, with fresh randomness."""
        return bool(self._fresh.random() < probability)

    def iid(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        """Draw `k` tokens a row, independently."""
        return _invert(probs, torch.from_numpy(self._fresh.random((len(probs), k))).to(probs.device))

    def distinct(
        self, probs: Float[Tensor, "rows columns"], k: int, among: Among | None = None
    ) -> Int[Tensor, "rows k"]:
        """Draw `k` different columns a row, each without those before it; impossible ones come last.

        An exponential race: of independent arrival times with the tokens' probabilities as rates the first is a draw
        from the distribution, the second one from what is left, and so on. The noise is drawn where `probs` lie, for
        the whole vocabulary, so that what is drawn does not depend on which impossible tokens were left out.
        """
        if probs.device not in self._races:
            seed = int(self._fresh.integers(2**63))
            self._races[probs.device] = torch.Generator(probs.device).manual_seed(seed)
        noise = self._room(len(probs), probs.shape[1] if among is None else among.vocab, probs.device)
        noise.exponential_(generator=self._races[probs.device])
        if among is not None:
            noise = noise.index_select(1, among.tokens)
        return torch.where(probs > 0, noise / probs, torch.inf).topk(k, largest=False).indices

    def _room(self, rows: int, columns: int, device: torch.device) -> Float[Tensor, "rows columns"]:
        """A buffer, kept: the C library gives and takes back blocks above 32 MB anew, page by page."""
        if self._noise.device != device or self._noise.numel() < rows * columns:
            self._noise = torch.empty(rows * columns, dtype=torch.float64, device=device)
        return self._noise[: rows * columns].view(rows, columns)


def _invert(probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, "rows draws"]) -> Int[Tensor, "rows draws"]:
    """The tokens at which the rows' cumulative distributions exceed the uniforms' share of the whole."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the point, so a token of probability 0 never wins; the
    # product may round up to the whole, which no token exceeds.
    points = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True)
