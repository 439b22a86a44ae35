"""From the target's logits to tokens: its distribution by temperature, and the one source of randomness.

Temperature applies alike to every node of a tree and to plain decoding; a subclass may shape the distribution further.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.errors import require
from opt_tree.tree import Tree, on_host, send


class LazyLogits:
    """The processed logits of a tree's rows, each computed when it is first asked for: a walk looks at few of them.

    A top-p cut of all 61 rows of a tree over 128k tokens takes 0.7 s.
    """

    def __init__(self, shape: Sequence[int], compute: Callable[[int], Float[Tensor, " vocab"]]) -> None:
        self.shape, self._compute = shape, compute
        self._known: dict[int, Float[Tensor, " vocab"]] = {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> Float[Tensor, " vocab"]:
        if row not in self._known:
            self._known[row] = self._compute(row)
        return self._known[row]


Logits = Float[Tensor, "rows vocab"] | LazyLogits
"""What a verifier is given: processed logits, a row a tree row."""


@dataclass(frozen=True)
class Temperature:
    """How the target's logits become its distribution: temperature 0 means argmax, above 0 a draw."""

    temperature: float = 0.0

    def __post_init__(self) -> None:
        require(Real, temperature=self.temperature)
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature must be 0 (greedy) or more, and finite, got {self.temperature}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def history(self, context: list[int]) -> Any:
        """Return what the methods below are given as the context of a text, kept while the list grows."""
        return context

    def warp(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Return logits at this temperature, whatever the text; float32 at least. At 0 they are not divided."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.temperature in (0, 1) else logits / float(self.temperature)

    def process(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: Any) -> Float[Tensor, "rows vocab"]:
        """Return the processed logits of every row of `tree`; their softmax is the target's distribution there.

        `context` ends with the root. At temperature 0 logits pass through untouched, above it half precision is widened
        to float32, as in `transformers.generate`.
        """
        return logits if self.greedy else self.warp(logits)

    def processed(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: Any) -> Logits:
        """Return the same for a verifier, which may need few of the rows: on the host each when it is asked for.

        On a device every row that is asked for would wait for it, so there all are processed in one go.
        """
        if self.greedy or not on_host(logits):
            return self.process(logits, tree, context)
        return LazyLogits(logits.shape, lambda row: self.warp(logits[row : row + 1])[0])

    def why_none(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: Any, row: int) -> str:
        """Say why no token can be drawn at a row. `logits` are the model's own."""
        if not bool((logits[row] < inf).all()):
            return "the model's logits are not numbers (NaN, or infinite), so some of its weights or inputs are not"
        return "its probability is 0"


class Random:
    """Every random number of a generation, from one seed. It draws from the distributions it is given.

    A race decides the t-th emitted token: each token of the vocabulary has its own noise from Exp(1), fixed by (seed,
    t, token) alone, and the one whose noise / probability is least is drawn (`draw`). All nodes of one depth share that
    noise. Only one of them is ever on the accepted path: its draw is an independent one from the target's distribution,
    and the text of a seed is the same whatever the tree. What takes `fresh` numbers depends on the tree; its
    distribution does not.

    A race (the Gumbel-max trick, arXiv:1411.0030) hardly minds rounding, which moves all later borders of a cumulative
    distribution: where two computations' log-probabilities differ by at most d, it ends differently with probability
    2d (1 - sum of p^2) at most (to first order).
    """

    fresh: np.random.Generator
    """Numbers that are used once."""
    beside: dict[Any, Any]
    """What others keep for this generation, under keys of their own."""

    def __init__(self, seed: int = 0) -> None:
        require(Integral, seed=seed)
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, got {seed}")
        self._seed = int(seed) % 2**64
        self._position = 0
        self.fresh, self.beside = np.random.default_rng((self._seed, 1)), {}

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        """Draw one token a row by an exponential race. `depths`: how many tokens ahead a row's draw is.

        `probs`: rates of arrival, normalised or not; the first to arrive is a draw from them. One of less than
        2^-53 / (37 vocab) of the row's sum never wins, as noise lies between 2^-53 and 37.
        """
        once, which = np.unique(depths, return_inverse=True)
        noise = noise_from(send(self.starts(once), probs.device), probs.shape[1])
        arrivals = (noise if len(once) == 1 else noise[send(which, noise.device)]) / probs
        return torch.from_numpy(arrivals.numpy().argmin(-1)) if on_host(arrivals) else arrivals.argmin(-1)

    def starts(self, depths: Int[np.ndarray, " depths"]) -> Int[np.ndarray, " depths"]:
        """The state of the generator that the noise begins with, `depths` tokens ahead."""
        seeds = [np.random.SeedSequence(self._seed, spawn_key=(self._position + depth,)) for depth in depths.tolist()]
        return np.array([seed.generate_state(1, np.uint64)[0] for seed in seeds], dtype=np.uint64).view(np.int64)

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens are committed: their noise is spent, looked at or not."""
        self._position += tokens

    def choose(self, probs: Float[np.ndarray, " vocab"]) -> int:
        """Draw one token on the host, with fresh randomness. `probs` need not be normalised.

        Raises ValueError where they are NaN, or 0 throughout.
        """
        cumulative = probs.cumsum(dtype=np.float64)
        # Below the whole, to which the product may round up; "right": a token of probability 0 is never chosen.
        point = min(self.fresh.random() * cumulative[-1], np.nextafter(cumulative[-1], 0))
        token = int(cumulative.searchsorted(point, "right"))
        if token == len(probs):
            raise ValueError("no token can be drawn: the logits are not numbers (NaN, or infinite)")
        return token

    def accept(self, probability: float) -> bool:
        """Toss a coin of the given probability, with fresh randomness."""
        return bool(self.fresh.random() < probability)


# Of SplitMix64, as signed words: the step from state to state (the golden ratio's), and its output's factors.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
Words = TypeVar("Words", Tensor, np.ndarray)


def _mix(states: Words) -> Words:
    """SplitMix64's output for each state, in its place (Steele, Lea, Flood, OOPSLA 2014, fig. 16; `mix64variant13`)."""
    # Integers of 64 bits that wrap around. They have a sign here, so a shift to the right must be masked.
    states ^= (states >> 30) & (1 << 34) - 1
    states *= _FACTORS[0]
    states ^= (states >> 27) & (1 << 37) - 1
    states *= _FACTORS[1]
    states ^= (states >> 31) & (1 << 33) - 1
    return states


def noise_from(starts: Int[Tensor, " depths"], vocab: int) -> Float[Tensor, "depths vocab"]:
    """Return the noise of every token by the start of its depth (`Random.starts`): from Exp(1), on 2^52 quantiles.

    That of token k is made from the (k + 1)-th number of the SplitMix64 generator which (seed, position) starts:
    integers, alike on every device. The grid of quantiles changes the distribution by less than vocab / 2^52.
    """
    states = starts[:, None] + torch.arange(1, vocab + 1, device=starts.device) * _GAMMA
    return torch.from_numpy(_exponential(states.numpy())) if on_host(states) else _exponential(states)


def _exponential(states: Words) -> Words:
    """Noise from Exp(1) for each state, in its place. For numpy as well, which takes half of torch's time on a CPU."""
    library: Any = np if isinstance(states, np.ndarray) else torch
    words = _mix(states)
    words >>= 12  # 52 bits, the mantissa of a number in [1, 2)
    words &= (1 << 52) - 1
    words |= 1023 << 52
    quantiles = words.view(library.float64)
    quantiles -= 1 - 2**-53  # the middle of its cell: neither 0 nor 1, and exact
    return library.negative(library.log(quantiles, out=quantiles), out=quantiles)
