"""From logits to the target's distribution, by temperature.

Applied alike to every node of a tree and to plain decoding. Knows nothing of models, caches and policies. A subclass
may shape the distribution further.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.errors import require
from opt_tree.tree import Tree, on_host


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
        if bool(logits[row].isnan().any()):
            return "the model's logits are not numbers (NaN), so some of its weights or inputs are not"
        return "its probability is 0"
