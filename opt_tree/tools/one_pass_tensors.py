"""Heads of one pass on tensors: one forward at the root, whose laws are looked up below it.

Owns what the forward reads there: nothing beside what the drafter keeps (`OfDepths`), a block and the parents
(`OfBlock`), masks behind the missing rows of an EAGLE head (`Masked`).
"""

import time
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.backends.tensor_drafter import Behind, TensorDrafter, TensorRows
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool
from opt_tree.children import LogProbs
from opt_tree.methods.drafters.heads.blocks import BlockDrafter
from opt_tree.methods.drafters.heads.eagle import LAST, warn_beyond
from opt_tree.methods.drafters.heads.one_pass import OnePass
from opt_tree.methods.drafters.heads.parallel_spec import ParallelSpecDrafter
from opt_tree.target import Forward
from opt_tree.tree import send


class OfDepths(TensorDrafter):
    """A drafter whose laws depend on the depth alone: Medusa's heads, a DFlash block."""

    drafter: OnePass

    def __init__(self, drafter: OnePass) -> None:
        target, tokens = drafter.target, drafter.tokens
        columns = target.vocab if tokens is None else len(tokens)
        super().__init__(drafter, columns, None if tokens is None else send(tokens, target.device))
        self._weights: tuple[int, tuple[int, ...]] = -1, ()
        self._seconds = 0.0

    def networks(self) -> list[nn.Module | None]:
        """What it computes by, beside the target."""
        return [self.drafter.heads]  # type: ignore[attr-defined]

    def held(self) -> tuple[Any, ...]:
        """The weights, looked at once a text."""
        if self._weights[0] != self.drafter.generation:
            weights = (weight for network in self.networks() if network is not None for weight in network.parameters())
            self._weights = self.drafter.generation, tuple(map(id, weights))
        return self._weights[1]

    def catching_up(self, layers: int) -> int:
        return 1

    def lacks(self, context: list[int], most: int) -> Forward:
        """The last token of which the target's feature is known."""
        return self._rows(len(context) - 1, self.drafter.feature)

    def _rows(self, end: int, features: Float[Tensor, "rows wide"]) -> Forward:
        """Rows that end at a position, of which the target's features matter alone."""
        count = len(features)
        return Forward(
            None, np.zeros(count, dtype=int), np.arange(end - count, end), np.tri(count, dtype=bool), features
        )

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        return features[LAST][rows]

    def launched(self) -> None:
        self.drafter.ran(self._seconds)
        self._seconds = 0.0

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        begin = time.perf_counter()
        found = self._first(self._run(behind))
        self._seconds = time.perf_counter() - begin
        return found

    def _run(self, behind: Behind) -> Float[Tensor, "depths columns"]:
        assert behind.features is not None
        self.drafter.feature = behind.features
        return self.drafter.laws(behind.root[None], 0)

    def _first(self, scores: Float[Tensor, "depths columns"]) -> Float[Tensor, "1 columns"]:
        """Take the scores of all depths."""
        self._depths = LogProbs.of(scores, None, self.drafter.scale).values
        return self._depths[:1]

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        if pool.depth >= len(self._depths):
            return self._depths.new_full((len(tokens), self.columns), -torch.inf)
        return self._depths[pool.depth].expand(len(tokens), -1)


class OfBlock(OfDepths):
    """A block drafter; where its laws know the parent or the path, each frontier asks them."""

    drafter: BlockDrafter

    def networks(self) -> list[nn.Module | None]:
        return [self.drafter.model, self.drafter.block.law]

    def held(self) -> tuple[Any, ...]:
        return (*super().held(), self.drafter.cache.storage_version)

    def catching_up(self, layers: int) -> int:
        return layers + 1

    def room(self, growth: Growth, limit: int) -> int:
        return self.drafter.rows

    def lacks(self, context: list[int], most: int) -> Forward:
        """What was waiting; where a text begins, or the host took steps, a forward of the block takes it in."""
        drafter = self.drafter
        warn_beyond(drafter, len(context))
        if len(drafter.waiting) > most:
            drafter.run(send(np.array(context[-1:]), drafter.target.device), len(context))
        return self._rows(len(context) - 1, drafter.waiting)

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        return self.drafter.inputs(features)[rows]

    def launched(self) -> None:
        super().launched()
        self.drafter.took_in()

    def _run(self, behind: Behind) -> Float[Tensor, "depths columns"]:
        drafter, (_, positions, slots) = self.drafter, behind.missing
        assert behind.features is not None
        own, root = torch.arange(drafter.rows, device=slots.device), behind.root[None]
        places, ahead = behind.length + own, torch.arange(behind.keys, device=slots.device) - behind.length
        masks = {
            kind: ((ahead < len(own)) & sight.sees(own[:, None], ahead))[None, None]
            for kind, sight in drafter.sights.items()
        }
        drafter.cache.open(len(slots) + len(own), behind.keys, torch.cat([slots, places]))
        states = drafter.fill_in(root, behind.features, torch.cat([positions, places]), masks)
        drafter.cache.truncate(drafter.cache.length)  # which rows stay is said when the step is taken (`launched`)
        return drafter.scores(states, root)

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        first, root = super().begin(behind), behind.root[None]
        return first if self.drafter.block.law is None else self._ask(1, root, self.drafter.carried)

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        if self.drafter.block.law is None:
            return super().below(pool, tokens, above)
        return self._ask(pool.depth + 1, tokens, self._carried[above])

    def _ask(
        self, depth: int, parents: Int[Tensor, " parents"], carried: Float[Tensor, "parents width"]
    ) -> Float[Tensor, "parents columns"]:
        found = self.drafter.below(depth, parents, carried)
        self._carried = found.carried
        return LogProbs.of(found.scores, None, self.drafter.scale).values


class Masked(OfDepths):
    """ParallelSpec's head, and P-EAGLE's: the rows that it lacks and its masks are one forward."""

    drafter: ParallelSpecDrafter

    def __init__(self, drafter: ParallelSpecDrafter) -> None:
        super().__init__(drafter)
        self.lm: Any = drafter.eagle.lm
        self._masks = send(drafter.masks, self.lm.device)

    def networks(self) -> list[nn.Module | None]:
        return []  # its model's forwards are looked after by whoever captures them

    def catching_up(self, layers: int) -> int:
        return layers + 1

    def known(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        return torch.where(tokens < self.drafter.eagle.vocab, tokens, 0)

    def carried(
        self, features: dict[int, Float[Tensor, "path hidden"]], rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows wide"] | None:
        return self.drafter.eagle.inputs(features)[rows]

    def launched(self) -> None:
        """Its model counts."""

    def room(self, growth: Growth, limit: int) -> int:
        return len(self._masks)

    def widest(self, growth: Growth, layers: int) -> int:
        return self.catching_up(layers) + len(self._masks)

    def lacks(self, context: list[int], most: int) -> Forward:
        return self.lm.text(*self.drafter.eagle.take_pairs(context))

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        assert behind.features is not None
        count, columns = len(self._masks), torch.arange(behind.keys, device=behind.root.device)
        places = behind.length + torch.arange(count, device=behind.root.device)
        tokens, positions, slots = torch.cat([behind.missing, torch.stack([self._masks, places, places])], 1)
        features = [behind.features, self.drafter.of_masks(behind.features[-1:]).expand(count, -1)]
        rows = TensorRows(tokens, positions, slots, columns <= slots[:, None], columns, torch.cat(features))
        return self._first(self.drafter.scores(behind.forward(self.lm, rows, last_only=True)))
