"""What shapes the target's distribution beyond its temperature: top-k, top-p and logits processors.

Applied alike to every node of a tree and to plain decoding. Knows nothing of models, caches and policies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from opt_tree.errors import require
from opt_tree.methods.processors import History, by_row, check_stateless, history_of, is_foreign, named, row_by_row
from opt_tree.sampling import LazyLogits, Logits, Temperature
from opt_tree.tree import Tree, on_host


@dataclass(frozen=True)
class Sampling(Temperature):
    """How the target's logits become its distribution: temperature 0 means argmax, above 0 a draw.

    The warpers are transformers' own, in its order (temperature, top-k, top-p), after `processors`, which may be any
    transformers `LogitsProcessor`s; those that need history see the context followed by the node's own path.

    A processor must be a function of the ids and the scores: a tree asks it about many rows, in no order of their own,
    about some of them twice. One that keeps state from call to call is refused, here where it is known, else when it
    answers the same question in two ways.
    """

    top_p: float = 1.0
    top_k: int = 0
    processors: tuple[Callable, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(Real, top_p=self.top_p, top_k=self.top_k)
        require(Sequence, processors=self.processors)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < inf or self.top_k != int(self.top_k):
            raise ValueError(f"top_k must be 0 (off) or more, and whole, got {self.top_k}")
        for processor in self.processors:
            check_stateless(processor)

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

    def warp(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """See `Temperature.warp`; top-k and top-p cut here as well, and processors are not asked."""
        warpers = self.warpers()
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=bool(warpers))
        for process in warpers:
            scores = by_row(process, scores)
        return scores

    def history(self, context: list[int]) -> History:
        """A history of the text is made a tensor once, not in every step."""
        return History(context)

    def process(
        self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History
    ) -> Float[Tensor, "rows vocab"]:
        """See `Temperature.process`. Half precision is widened to float32 for processors, too, also at temperature 0.

        So it is in `transformers.generate`.
        """
        if self.greedy and not self.processors:
            return logits
        return self.process_rows(logits, tree, history_of(context), range(len(tree)))

    def processed(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History) -> Logits:
        """See `Temperature.processed`.

        All rows are processed in one go for a processor that nothing is known of, too: one that keeps state shows it
        over several rows.
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

    def why_none(self, logits: Float[Tensor, "rows vocab"], tree: Tree, context: list[int] | History, row: int) -> str:
        """See `Temperature.why_none`. Names the first processor behind which there is nothing to draw from.

        `transformers.generate` raises likewise above temperature 0, without the name.
        """
        here, history = logits[row : row + 1], history_of(context)
        scores = here.to(torch.promote_types(here.dtype, torch.float32), copy=True)
        steps: list[Callable] = [*self.processors, *self.warpers()]
        if bool((scores < inf).all()):
            for process in steps:
                scores = row_by_row(process, scores, tree, history, [row])
                if bool((scores < inf).all()) and bool((scores > -inf).any()):
                    continue
                found = "NaN" if bool(scores.isnan().any()) else "infinity"
                return f"{named(process)} {'allows no token' if bool((scores == -inf).all()) else f'answers {found}'}"
        return super().why_none(logits, tree, history.tokens, row)
