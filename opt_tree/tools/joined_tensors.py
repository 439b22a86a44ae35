"""Drafters around others on tensors: a table below a model (`Grafted`) or beside it (`Copying`), and `Recent`."""

from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.backends.tensor_drafter import Behind, ByLayers, TensorDrafter
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool
from opt_tree.children import LogProbs
from opt_tree.methods.drafters.combined.copying import Copying, mixed
from opt_tree.methods.drafters.combined.grafted import Grafted, Joined
from opt_tree.methods.drafters.combined.recent import Recent
from opt_tree.target import Forward
from opt_tree.tools.table_tensors import Tabled


class JoinedTensors(TensorDrafter):
    """What the model's rows are is the model's affair; both send their numbers."""

    drafter: Joined
    names_few = True

    def __init__(self, drafter: Joined, model: TensorDrafter, table: Tabled) -> None:
        super().__init__(drafter, 0)
        self.model, self.table, self.lm, self.keeps_rows = model, table, model.lm, model.keeps_rows

    @property
    def scale(self) -> float:
        return self.model.scale

    def why_not(self, context: list[int]) -> str | None:
        ended = self.drafter.drafter.room(len(context)) <= 0
        return "the table drafts alone" if ended else self.model.why_not(context)

    def catching_up(self, layers: int) -> int:
        return self.model.catching_up(layers)

    def room(self, growth: Growth, limit: int) -> int:
        return self.model.room(growth, limit)

    def widest(self, growth: Growth, layers: int) -> int:
        return self.model.widest(growth, layers)

    def lacks(self, context: list[int], most: int) -> Forward | None:
        self.drafter.lead(context)
        return self.model.lacks(context, most)

    def launched(self) -> None:
        self.model.launched()

    def sends(self, layers: int) -> int:
        return self.model.sends(layers) + self.table.sends(layers)

    def sent(self, context: list[int], layers: int, device: torch.device) -> Int[np.ndarray, " numbers"]:
        self._own = self.model.sends(layers)
        return np.concatenate([part.sent(context, layers, device) for part in (self.model, self.table)])

    def goes_on(self, length: int, layers: int, vocab: int) -> bool:
        return self.drafter.drafter.room(length) > 0 and self.table.goes_on(length, layers, vocab)

    def known(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        return self.model.known(tokens)

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        return self.model.carried(features, rows)

    def sent_after(
        self, more: Int[Tensor, " numbers"], emitted: Int[Tensor, " path"], accepted: Int[Tensor, ""]
    ) -> Int[Tensor, " numbers"]:
        parts = (self.model, more[: self._own]), (self.table, more[self._own :])
        return torch.cat([part.sent_after(sent, emitted, accepted) for part, sent in parts])

    def held(self) -> tuple[Any, ...]:
        return self.model.held() + self.table.held()

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        """Begin both; the model's answer."""
        self._said = self.table.begin(behind._replace(more=behind.more[self._own :]))
        return self.model.begin(behind._replace(more=behind.more[: self._own]))


class RecentTensors(ByLayers):
    """A draft model that is shown a part of the prompt: the rows that it lacks are of what it is shown."""

    def __init__(self, recent: Recent) -> None:
        super().__init__(recent.drafter)  # type: ignore[arg-type]
        self._recent = recent

    def lacks(self, context: list[int], most: int) -> Forward:
        return cast(Forward, self._recent.root(context))


class GraftedTensors(JoinedTensors):
    """The model at the root, the table below: one forward a draft."""

    def __init__(self, drafter: Grafted, model: TensorDrafter) -> None:
        super().__init__(drafter, model, Tabled(drafter.table))  # type: ignore[arg-type]
        self.keeps_rows = False

    def catching_up(self, layers: int) -> int:
        """Nothing below the root is the model's: it lacks a whole path and one token."""
        return max(self.model.catching_up(layers), 0 if self.lm is None else layers + 1)

    def room(self, growth: Growth, limit: int) -> int:
        return self.model.room(growth, 1)

    def widest(self, growth: Growth, layers: int) -> int:
        return max(self.model.widest(growth, layers), self.catching_up(layers))

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        self._asked = self.model
        return super().begin(behind)

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        self._asked = self.table
        return self.table.below(pool, tokens, above)

    @property
    def names(self) -> Int[Tensor, "*frontier columns"] | None:
        return self._asked.names


class CopyingTensors(JoinedTensors):
    """The model and the text at hand, mixed at every node."""

    def __init__(self, drafter: Copying, model: TensorDrafter) -> None:
        super().__init__(drafter, model, Tabled(drafter.text, whole=True))
        self.by_layers = model.by_layers

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        return self._mixed(super().begin(behind))

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        self._said = self.table.below(pool, tokens, above)
        return self._mixed(self.model.below(pool, tokens, above))

    def _mixed(self, values: Float[Tensor, "nodes columns"]) -> Float[Tensor, "nodes named"]:
        found = mixed(LogProbs(values, self.model.tokens), LogProbs(self._said, self.table.named))
        assert found.tokens is not None
        self._named = found.tokens
        return found.values

    @property
    def names(self) -> Int[Tensor, "nodes named"]:
        return self._named
