"""A model above, a table below: the first layers of a draft from a model, the others looked up at no forward.

Owns who answers for which layer. Trees grow by layers, so that the model's nodes come first and keep their numbers; of
the others it never hears.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from opt_tree.drafter import Asked, Drafter
from opt_tree.errors import counted
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.around import DrafterAround, described, settings_of
from opt_tree.methods.drafters.registry import DrafterOptions, register, two_specs
from opt_tree.methods.drafters.tables.lookup import Lookup, Tails, load_with_table
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, refused
from opt_tree.pool import Frontier


class Joined(DrafterAround):
    """A model, `drafter`, and a `table`: both begin every prompt, and read whatever either reads.

    It names a few tokens of each node, as the table does. Behind the model's last position the table drafts alone. A
    subclass calls `lead` before a root is drafted.
    """

    def __init__(self, drafter: Drafter, table: Lookup) -> None:
        super().__init__(drafter)
        self.parts = parts = (drafter, table)
        self.features = tuple(dict.fromkeys(layer for part in parts for layer in part.features))
        self.reads_logits = any(part.reads_logits for part in parts)
        self.learns = any(part.learns for part in parts)
        self.names_few = True
        self.led = True
        """Whether the model takes part in this step."""

    def room(self, length: int) -> int:
        own = self.drafter.room(length)
        return own if own > 0 else self.parts[1].room(length)

    def lead(self, context: list[int]) -> None:
        """Begin a step behind this context: see who takes part."""
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

    def lead(self, context: list[int]) -> None:
        super().lead(context)
        self._own = 0 if self.led else -1

    def root(self, context: list[int]) -> Asked:
        self.lead(context)
        tails = self._tails.root(context)
        return self.after(self.drafter.root(context)) if self.led else self.table.look_up(tails)

    def expand(self, frontier: Frontier) -> Asked:
        tails = self._tails.expand(frontier)
        if not self.led or frontier.depths[0] >= self.depth:
            return self.table.look_up(tails)
        self._own += len(tails)
        return self.after(self.drafter.expand(frontier))

    def accept(self, outcome: Outcome) -> None:
        # To the model its own rows: what it never ran is no row of its cache.
        own = [row if row <= self._own else -1 for row in outcome.tree.draft_rows.tolist()]
        self.drafter.accept(numbered(outcome, np.array(own)))
        self.table.accept(outcome)

    def describe(self) -> str:
        return f"{described(self.drafter)} for {counted(self.depth, 'layer')}, {self.table.describe()} below"

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.drafter) | {"depth": self.depth, "table": self.table.describe(), **self.table.settings}


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


def numbered(outcome: Outcome, draft_rows: Int[np.ndarray, " rows"]) -> Outcome:
    """Return the same outcome for a drafter that was handed other nodes, or the same ones in another order."""
    return replace(outcome, tree=replace(outcome.tree, draft_rows=draft_rows))
