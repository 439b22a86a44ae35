"""Heads of one pass on tensors: one forward at the root, whose laws are looked up below it.

Owns what the forward reads there: nothing beside what the drafter keeps (`OfDepths`), a block and the parents
(`OfBlock`), masks behind the missing rows of an EAGLE head (`Masked`).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.answers import LogProbs
from opt_tree.backends.tensor_drafter import Behind, Rows, TensorDrafter
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool
from opt_tree.methods.drafters.heads.blocks import BlockDrafter
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

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        return self._first(self.drafter.run(behind.root[None], behind.tokens))

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

    def catching_up(self, layers: int) -> int:
        return layers + 1

    def room(self, growth: Growth, limit: int) -> int:
        return len(self._masks)

    def widest(self, growth: Growth, layers: int) -> int:
        return self.catching_up(layers) + len(self._masks)

    def lacks(self, context: list[int]) -> Forward:
        return self.lm.text(*self.drafter.eagle.take_pairs(context))

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        assert behind.features is not None
        count, columns = len(self._masks), torch.arange(behind.keys, device=behind.root.device)
        places = behind.length + torch.arange(count, device=behind.root.device)
        tokens, positions, slots = torch.cat([behind.missing, torch.stack([self._masks, places, places])], 1)
        features = [behind.features, self.drafter.of_masks(behind.features[-1:]).expand(count, -1)]
        rows = Rows(tokens, positions, slots, columns <= slots[:, None], columns, torch.cat(features))
        return self._first(self.drafter.scores(behind.forward(self.lm, rows, last_only=True)))
