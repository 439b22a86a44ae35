"""A drafter as functions of tensors: what it says of the root, and then of each frontier. Nothing of it is read.

Owns the contract (`TensorDrafter`) and drafters that run a model once a layer (`ByLayers`). Knows nothing of policies
and of who computes a forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool
from opt_tree.draft_model import OfModel
from opt_tree.drafter import Drafter
from opt_tree.model import Model
from opt_tree.target import Forward, Output


class TensorRows(NamedTuple):
    """The rows of one forward, on the device."""

    tokens: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    slots: Int[Tensor, " rows"]
    mask: Bool[Tensor, "rows keys"]
    key_positions: Int[Tensor, " keys"]
    """At which position the token in each slot stands."""
    features: Float[Tensor, "rows hidden"] | None = None


class Behind(NamedTuple):
    """The context that a step drafts behind."""

    forward: Callable[..., Output]
    """`TensorStep.forward`."""
    keys: int
    """Of the forwards of the drafter's model; at least as many as the context has tokens."""
    missing: Int[Tensor, "3 rows"]
    """Tokens, positions and slots of the rows that the drafter's model lacks, behind padding; the last is the root."""
    features: Float[Tensor, "rows hidden"] | None
    length: Int[Tensor, ""]
    """Rows of the drafter's model, the missing ones among them; where it has none, the target's."""
    root: Int[Tensor, ""]
    more: Int[Tensor, " numbers"]
    """What the drafter itself sent (`TensorDrafter.sent`)."""
    nodes: int
    """Of a tree at most."""


class TensorDrafter(ABC):
    """How one drafter answers on tensors. Begun anew for each step (`begin`)."""

    lm: Model | None = None
    """The model whose forwards the step computes; None: it has none, or runs it itself."""
    names_few = False
    """Whether it names a few tokens of each node, in the host's order."""
    keeps_rows = False
    """Whether rows of accepted nodes stay in the model's cache."""
    by_layers = False
    """Whether each layer is a forward of `lm`."""

    def __init__(self, drafter: Drafter, columns: int, tokens: Int[Tensor, " columns"] | None = None) -> None:
        """`columns`: of its answers. `tokens`: their names, on the device; None: the vocabulary's first ones."""
        self.drafter, self.columns = drafter, columns
        self.tokens = tokens

    @property
    def scale(self) -> float:
        """What its scores are multiplied by."""
        return self.drafter.scale

    def why_not(self, context: list[int]) -> str | None:
        """Why the step behind this context is the host's; None: it is not."""
        return None

    def catching_up(self, layers: int) -> int:
        """How many rows it can lack behind a step of so many layers."""
        return 0

    def room(self, growth: Growth, limit: int) -> int:
        """How many rows behind the context it writes in a step of so many layers."""
        return 0

    def widest(self, growth: Growth, layers: int) -> int:
        """How many rows its widest forward has."""
        return 0

    def lacks(self, context: list[int], most: int) -> Forward | None:
        """Return the rows that it lacks of the context, on the host: a model's, which may be more than `most`, or the
        features that came for what has no `lm`.
        """
        return None

    def launched(self) -> None:  # noqa: B027 - most have nothing to note
        """Note that a step is on its way, with the rows that were lacking."""

    def sends(self, layers: int) -> int:
        """How many numbers of its own it sends before a step."""
        return 0

    def sent(self, context: list[int], layers: int, device: torch.device) -> Int[np.ndarray, " numbers"]:
        """Return these numbers."""
        return np.zeros(0, dtype=np.int64)

    def goes_on(self, length: int, layers: int, vocab: int) -> bool:
        """Whether the next step, behind so many tokens at most, can begin with what this one leaves on the device."""
        return True

    def known(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Return emitted tokens as its model reads them."""
        return tokens

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        """Return what rows that it lacks carry of the target's features; None: they are tokens alone."""
        return None

    def sent_after(
        self, more: Int[Tensor, " numbers"], emitted: Int[Tensor, " path"], accepted: Int[Tensor, ""]
    ) -> Int[Tensor, " numbers"]:
        """Return what it sends before the next step, from what it sent before this one."""
        return more

    def held(self) -> tuple[Any, ...]:
        """What of its own a capture rests on, compared by ==: a graph is stale once the answer is another one."""
        return ()

    @abstractmethod
    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        """Return the log-probabilities of the tokens behind the root."""

    @abstractmethod
    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        """Return those behind the nodes of a frontier. `above`: their parents' rows in the frontier before."""

    @property
    def names(self) -> Int[Tensor, "*frontier columns"] | None:
        """The tokens of the columns of what was said last, of all rows or of each; None: their numbers."""
        return self.tokens


class ByLayers(TensorDrafter):
    """A drafter whose model runs once a layer: a draft model, or an EAGLE head.

    Rows of accepted nodes are kept where its forwards read tokens alone. A head's, which were computed from features
    that it estimated, are dropped, as on the host.
    """

    lm: Model
    drafter: OfModel
    by_layers = True

    def __init__(self, drafter: OfModel) -> None:
        self.lm, self.keeps_rows = drafter.lm, not drafter.features
        super().__init__(drafter, drafter.drafted.columns, drafter.drafted.tokens)

    def catching_up(self, layers: int) -> int:
        """A head lacks a whole path and one token; a model the last node, if it was not drafted below, and one."""
        return 2 if self.keeps_rows else layers + 1

    def room(self, growth: Growth, limit: int) -> int:
        return growth.room(limit)

    def widest(self, growth: Growth, layers: int) -> int:
        return max(growth.widest, self.catching_up(layers))

    def lacks(self, context: list[int], most: int) -> Forward:
        return cast(Forward, self.drafter.root(context))

    def known(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        return torch.where(tokens < self.drafter.vocab, tokens, 0)

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        return None if self.keeps_rows else self.drafter.inputs(features)[rows]  # type: ignore[attr-defined]

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        self._behind, device = behind, behind.root.device
        self._key_positions = self._columns = torch.arange(behind.keys, device=device)
        self._seen = torch.zeros(1, 0, dtype=torch.bool, device=device)
        tokens, positions, slots = behind.missing
        mask = self._columns <= slots[:, None]
        rows = TensorRows(tokens, positions, slots, mask, self._columns, behind.features)
        output = behind.forward(self.lm, rows, last_only=True)
        self._last = {layer: states[-1:] for layer, states in output.features.items()}
        return self.drafter.answer(output).unpicked.values

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        length, width, first = self._behind.length, len(tokens), pool.slots - len(tokens)
        own = torch.eye(width, dtype=torch.bool, device=pool.device)
        self._seen = torch.cat([self._seen[above], own], 1)
        at = length + torch.arange(pool.slots, device=pool.device)
        # Depth 1 follows the root, which is the last row of the context here.
        positions = (length + (pool.depth - 1)).expand(width)
        self._key_positions = self._key_positions.index_copy(0, at[first:], positions)
        mask = (self._columns < length).repeat(width, 1).index_copy(1, at, self._seen)
        features = next((states[above] for states in self._last.values()), None)
        rows = TensorRows(tokens, positions, at[first:], mask, self._key_positions, features)
        output = self._behind.forward(self.lm, rows)
        self._last = dict(output.features)
        return self.drafter.answer(output).unpicked.values
