"""From logits to the target's distribution: temperature, top-k, top-p and logits processors.

Applied alike to every node of a tree and to plain decoding. Knows nothing of models, caches and policies.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from opt_tree.errors import require
from opt_tree.processors import History, check_stateless, history_of, is_foreign, row_by_row
from opt_tree.tree import Tree, on_host


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become its distribution: temperature 0 means argmax, above 0 a draw.

    The warpers are transformers' own, in its order (temperature, top-k, top-p), after `processors`, which may be any
    transformers `LogitsProcessor`s; those that need history see the context followed by the node's own path.

    A processor must be a function of the ids and the scores: a tree asks it about many rows, in no order of their own,
    about some of them twice. One that keeps state from call to call is refused, here where it is known, else when it
    answers the same question in two ways.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    processors: tuple[Callable, ...] = ()

    def __post_init__(self) -> None:
        require(Real, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        require(Sequence, processors=self.processors)
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature must be 0 (greedy) or more, and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < np.inf or self.top_k != int(self.top_k):
            raise ValueError(f"top_k must be 0 (off) or more, and whole, got {self.top_k}")
        for processor in self.processors:
            check_stateless(processor)

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

    def process(
        self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History
    ) -> Float[Tensor, "rows vocab"]:
        """Return the processed logits of every row of `tree`; their softmax is the target's distribution there.

        `context` ends with the root; a `History` of it is made a tensor once, not in every step. Half-precision logits
        are widened to float32 when they are to be sampled from or processed, as in `transformers.generate`; at
        temperature 0 without processors they pass through untouched.
        """
        if self.greedy and not self.processors:
            return logits
        return self.process_rows(logits, tree, history_of(context), range(len(tree)))

    def processed(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History) -> "Logits":
        """Return the same for a verifier, which may need few of the rows: on the host each when it is asked for.

        On a device every row that is asked for would wait for it, so there all are processed in one go. So they are for
        a processor that nothing is known of: one that keeps state shows it over several rows.
        """
        needed = bool(self.processors) or not self.greedy
        if not needed or not on_host(logits) or any(map(is_foreign, self.processors)):
            return self.process(logits, tree, context)
        history = history_of(context)
        return LazyLogits(logits.shape, lambda row: self.process_rows(logits[row : row + 1], tree, history, [row])[0])

    def process_rows(
        self, logits: Float[Tensor, "rows vocab"], tree: Tree, history: History, rows: Sequence[int]
    ) -> Float[Tensor, "rows vocab"]:
        """Process the logits of these rows of the tree."""
        steps: list[Callable] = [*self.processors, *self.warpers()]
        if steps or not self.greedy:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for process in steps:
            logits = row_by_row(process, logits, tree, history, rows)
        return logits


class LazyLogits:
    """The processed logits of a tree's rows, each computed when it is first asked for.

    A top-p cut of all 61 rows of a tree over 128k tokens takes 0.7 s, and a verifier that walks down the tree looks at
    four of them.
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


def whole(logits: Logits) -> Float[Tensor, "rows vocab"]:
    """All rows, for whoever needs nearly every one."""
    return torch.stack([logits[row] for row in range(len(logits))]) if isinstance(logits, LazyLogits) else logits
