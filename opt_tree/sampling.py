"""From logits to the target's law, how siblings are drawn, and the one source of randomness.

Owns `Sampling` (temperature, top-k, top-p and logits processors, applied alike to every node and to plain decoding),
the `Children` types, and `Random`. Knows nothing of models, caches and policies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import logits_process

from opt_tree.tree import Tree

# Processors whose output depends on the logits row alone; everything else is shown the row's own history.
_MEMORYLESS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
# These keep state between calls (a second model's cache, a random seed per call): one call a node would corrupt it.
_STATEFUL = tuple(
    getattr(logits_process, name)
    for name in ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
    if hasattr(logits_process, name)
)


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become its law: temperature 0 means argmax, above 0 a draw.

    The warpers are transformers' own, in its order (temperature, top-k, top-p), after `processors`, which may be any
    transformers `LogitsProcessor`s; those that need history see the context followed by the node's own path.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    processors: tuple[Callable, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be 0 (greedy) or more, and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        for processor in self.processors:
            if isinstance(processor, _STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps state between calls: it cannot judge a tree of nodes"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> list[LogitsProcessor]:
        """The transformers warpers that `temperature`, `top_k` and `top_p` stand for."""
        warpers: list[LogitsProcessor] = []
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k and not self.greedy:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1 and not self.greedy:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers

    def scores(
        self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int]
    ) -> Float[Tensor, "rows vocab"]:
        """Return the processed logits of every row of `tree`; softmax of them is the target's law there.

        `context` ends with the root. Half-precision logits are widened to float32 when they are to be sampled from
        or processed, as in `transformers.generate`; at temperature 0 without processors they pass through untouched.
        """
        steps: list[Callable] = [*self.processors, *self.warpers()]
        if steps or not self.greedy:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for process in steps:
            if isinstance(process, _MEMORYLESS):
                logits = process(None, logits)  # type: ignore[arg-type]
            else:
                logits = torch.cat(
                    [
                        process(history, logits[row : row + 1])
                        for row, history in enumerate(_histories(tree, context, logits))
                    ]
                )
        return logits


def _histories(tree: Tree, context: list[int], like: Tensor) -> list[Int[Tensor, "1 length"]]:
    """The token history of every row: the context (which ends with the root) and the path down to the row."""
    base = torch.tensor(context, device=like.device)
    return [
        torch.cat([base, torch.tensor(tree.tokens[tree.path_to(row)[1:]], device=like.device)])[None]
        for row in range(len(tree))
    ]


@runtime_checkable
class Children(Protocol):
    """How siblings are picked from a drafter's law. A type, because verifiers are valid for some laws only."""

    def pick(
        self, log_probs: Float[Tensor, "frontier vocab"], above: Float[Tensor, " frontier"], floor: float
    ) -> tuple[Float[Tensor, " children"], Int[Tensor, " children"], Int[Tensor, " children"]]:
        """Return path log-probabilities, tokens and frontier rows of the children.

        `above` are the path log-probabilities of the frontier; children at or below `floor` need not be returned.
        """
        ...

    @property
    def budget(self) -> int | None:
        """How many candidates of the whole pool can matter; None: all of them."""
        ...


@dataclass(frozen=True)
class TopK:
    """The most probable tokens: `per_node` of them under every node, or whichever are among the pool's `total` best."""

    per_node: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("TopK takes either per_node or total")

    @property
    def budget(self) -> int | None:
        return self.total

    def pick(
        self, log_probs: Float[Tensor, "frontier vocab"], above: Float[Tensor, " frontier"], floor: float
    ) -> tuple[Float[Tensor, " children"], Int[Tensor, " children"], Int[Tensor, " children"]]:
        """See `Children.pick`. Tokens of log-probability -inf are never children."""
        width, vocab = log_probs.shape
        if self.per_node is not None:
            best, tokens = log_probs.topk(min(self.per_node, vocab))
            values = best + above[:, None]
            rows = torch.arange(width, device=values.device)[:, None].expand_as(tokens)
            real = values > -torch.inf
            return values[real], tokens[real], rows[real]
        assert self.total is not None
        if floor == -np.inf:
            values = (log_probs + above[:, None]).flatten()
            values, flat = values.topk(min(self.total, len(values)))
            real = values > -torch.inf
            values, flat = values[real], flat[real]
            return values, flat % vocab, flat // vocab
        # A child at or below the floor cannot enter the total best any more. Comparing against a bound per row and
        # listing the few survivors is several times cheaper than a top-k per row.
        if log_probs.device.type == "cpu":
            values, flat = _survivors(log_probs.numpy(), above.numpy(), floor)
        else:
            flat = (log_probs > (floor - above)[:, None]).flatten().nonzero().squeeze(-1)
            values = log_probs.flatten()[flat] + above[flat // vocab]
        if len(values) > self.total:
            keep = values.topk(self.total).indices.sort().values
            values, flat = values[keep], flat[keep]
        return values, flat % vocab, flat // vocab


def _survivors(
    log_probs: Float[np.ndarray, "frontier vocab"], above: Float[np.ndarray, " frontier"], floor: float
) -> tuple[Float[Tensor, " children"], Int[Tensor, " children"]]:
    """Return the children above the floor, as path log-probabilities and flat places. In numpy: cheap steps."""
    flat = np.flatnonzero(log_probs > (floor - above)[:, None])
    values = log_probs.ravel()[flat] + above[flat // log_probs.shape[1]]
    return torch.from_numpy(values), torch.from_numpy(flat)


class Random:
    """Every random number of a generation, from one seed.

    The uniform behind the t-th emitted token is fixed by (seed, t) alone: all nodes of one depth share it, and those
    drawn for positions that were not reached are kept for the next step. Only one node of a depth is ever on the
    accepted path, so its draw is an independent draw from the target's law there; and the text of a seed is the same
    whatever the tree, the drafter or the budget, plain decoding included.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._ahead: list[float] = []

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        """Draw one token a row by inverting the cumulative law. `depths`: how many tokens ahead a row's draw is."""
        self._look_ahead(int(depths.max()) + 1)
        uniforms = torch.tensor(self._ahead, dtype=torch.float64)[torch.from_numpy(depths)].to(probs.device)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        # right=True: the first token whose cumulative mass exceeds the point, so a token of probability 0 never wins.
        picked = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
        return picked.clamp(max=probs.shape[-1] - 1)

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens are committed: their uniforms are spent, looked at or not."""
        self._look_ahead(tokens)
        del self._ahead[:tokens]

    def _look_ahead(self, tokens: int) -> None:
        while len(self._ahead) < tokens:
            self._ahead += torch.rand(32, generator=self._generator, dtype=torch.float64).tolist()
