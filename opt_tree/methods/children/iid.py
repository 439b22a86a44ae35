"""Independent draws from the drafter's distribution."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from opt_tree.methods.children.drawn import Drawn, DrawnChildren, DrawnLayer, check_siblings, known, read, siblings_at
from opt_tree.methods.children.draws import draws_of, probs_of
from opt_tree.sampling import Random


@dataclass(frozen=True)
class IID(Drawn):
    """Independent draws: equal siblings are separate nodes, in the order of the draws."""

    per_node: int | tuple[int, ...]
    """Children of every node, or of a node by its depth, the root's first."""
    sampled: ClassVar[bool] = True
    budget: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_siblings(self.per_node)

    def pick(self, layer: DrawnLayer, random: Random) -> DrawnChildren:
        """See `Drawn.pick`. Every draw of a node has the same reach: the node's."""
        facts = known(layer)
        columns = draws_of(random).iid(probs_of(facts.log_probs), siblings_at(self.per_node, layer.depth))
        above, rows = facts.above.expand_as(columns), facts.rows.expand_as(columns)
        values, tokens = facts.log_probs.gather(1, columns) + above, facts.tokens(columns)
        return read(values, tokens, rows, above, values > -torch.inf)
