"""A model above, a table below: the first layers of a draft from a model, the others looked up at no forward.

Owns who answers for which layer. Trees grow by layers, so that the model's nodes come first and keep their numbers; of
the others it never hears.
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Few, Picking, Reduced
from opt_tree.core.pool import Frontier
from opt_tree.core.step import Outcome
from opt_tree.core.target import Laws
from opt_tree.core.words import counted
from opt_tree.drafters.base import Drafter, DrafterAround, normalised
from opt_tree.drafters.registry import DrafterOptions, register, two_specs
from opt_tree.drafters.tables.lookup import Lookup, Tails, load_with_table
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, refused


class Joined(DrafterAround):
    """A model, `drafter`, and a `table`: both begin every prompt, and read whatever either reads.

    It answers in `Few`, as the table does. Behind the model's last position the table drafts alone. A subclass calls
    `begin` before a root is drafted.
    """

    def __init__(self, drafter: Drafter, table: Lookup) -> None:
        super().__init__(drafter)
        self.parts = parts = (drafter, table)
        self.features = tuple(dict.fromkeys(layer for part in parts for layer in part.features))
        self.logits = any(part.logits for part in parts)
        self.learns = any(part.learns for part in parts)
        self.sparse = True
        self.led = True
        """Whether the model takes part in this step."""

    def room(self, length: int) -> int:
        own = self.drafter.room(length)
        return own if own > 0 else self.parts[1].room(length)

    def begin(self, context: list[int]) -> None:
        """Begin a step behind this context."""
        self.led = self.drafter.room(len(context)) > 0


class Grafted(Joined):
    """A drafter, `drafter`, answers for the first `depth` layers of a draft; the table answers below, at no forward.

    `depth` is the number of layers, hence the most forwards that a step costs: 1 means one forward behind the root, 2
    another one behind its best children. Which nodes of both are worth verifying, OPT-Tree's ranking decides, so that
    weak branches of the table are pruned by the model's probabilities above them. Two layers of the model, one of the
    table:

        draft row   0 root   1 a   2 b   3 below a   4 below b
        answers     model    model model table       table

    Others prune a whole tree of the model and put retrieved tokens into the room (Graft, arXiv:2605.20104), or merge
    two whole trees (`Rasd`, arXiv:2503.03434); there the model still pays for every layer.
    """

    def __init__(self, drafter: Drafter, table: Lookup, depth: int = 1) -> None:
        if depth < 1:
            raise ValueError(f"the model answers for at least one layer, got depth {depth}; below that take the table")
        super().__init__(drafter, table)
        self.table, self.depth = table, depth
        self._tails = Tails(table.order)
        self._own = 0
        """How many nodes of this step the model expanded, the root apart; -1: not even the root."""

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Few | Reduced:
        return self._begin(context) or self.drafter.root(context)

    def root_laws(self, context: list[int], picking: Picking = Picking()) -> Laws:
        few = self._begin(context)
        return self.drafter.root_laws(context, picking) if few is None else normalised(few, picking.scale)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Few | Reduced:
        return self._looked_up(frontier) or self.drafter.expand(frontier)

    def expand_laws(self, frontier: Frontier, picking: Picking = Picking()) -> Laws:
        few = self._looked_up(frontier)
        return self.drafter.expand_laws(frontier, picking) if few is None else normalised(few, picking.scale)

    def _begin(self, context: list[int]) -> Few | None:
        """What the table says behind the root, where the model has no say."""
        self.begin(context)
        tails, self._own = self._tails.root(context), 0 if self.led else -1
        return None if self.led else self.table.look_up(tails)

    def _looked_up(self, frontier: Frontier) -> Few | None:
        """What the table says, where it is its turn."""
        tails = self._tails.expand(frontier)
        if not self.led or frontier.depths[0] >= self.depth:
            return self.table.look_up(tails)
        self._own += len(tails)
        return None

    def observe(self, outcome: Outcome) -> None:
        # To the model its own rows: what it never ran is no row of its cache.
        own = [row if row <= self._own else -1 for row in outcome.tree.draft_rows.tolist()]
        self.drafter.observe(outcome.numbered(np.array(own)))
        self.table.observe(outcome)

    def at_temperature(self, temperature: float) -> "Grafted":
        drafter = self.drafter.at_temperature(temperature)
        return self if drafter is self.drafter else Grafted(drafter, self.table, self.depth)

    def describe(self) -> str:
        return f"{self.drafter.describe()} for {counted(self.depth, 'layer')}, {self.table.describe()} below"

    @property
    def settings(self) -> dict[str, Any]:
        return self.drafter.settings | {"depth": self.depth, "table": self.table.describe(), **self.table.settings}


@register(
    "graft",
    about="a model for the first layers, a table below: graft:1:eagle:demo+store:demo",
    others=lambda path: two_specs("graft", path.partition(":")[2]),
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    depth, _, pair = path.partition(":")
    if not depth.isdigit():
        raise CheckpointError(f"graft:DEPTH:SPEC+SPEC names the model's layers, the model, the table; got graft:{path}")
    model, table = load_with_table(f"graft:{depth}", pair, target, options)
    with refused(f"graft:{path}"):
        return Grafted(model, table, int(depth))
