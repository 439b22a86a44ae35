"""Distinct siblings, each drawn from what the ones before it left over."""

from dataclasses import dataclass
from typing import ClassVar

from opt_tree.methods.children.drawn import Drawn, DrawnChildren, DrawnLayer, check_siblings, known, read, siblings_at
from opt_tree.methods.children.draws import draws_of, probs_of
from opt_tree.sampling import Random


@dataclass(frozen=True)
class WithoutReplacement(Drawn):
    """Distinct siblings, each drawn without the ones before it: `per_node` of them, or as many as pay.

    With `total`, another sibling is drawn while its reach, the node's path probability times the mass that the siblings
    before it left over, is among the pool's `total` best (DySpec, arXiv:2410.11744). Probabilities (.5, .3, .2), drawn
    b, a:

        reach          1     .7 = 1 - .3     .2 = 1 - .3 - .5       known before each draw
        probability   .3     .5                                     of the token that came out
    """

    per_node: int | tuple[int, ...] | None = None
    """Children of every node, or of a node by its depth, the root's first; fewer where there are fewer tokens."""
    total: int | None = None
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("WithoutReplacement takes either per_node or total")
        check_siblings(self.per_node if self.total is None else self.total)

    @property
    def budget(self) -> int | None:
        return self.total

    def pick(self, layer: DrawnLayer, random: Random) -> DrawnChildren:
        """See `Drawn.pick`."""
        facts = known(layer)
        probs = probs_of(facts.log_probs)
        most = self.total if self.total is not None else siblings_at(self.per_node, layer.depth)
        columns = draws_of(random).distinct(probs, min(most, probs.shape[-1]), facts.among)
        rows, tokens = facts.rows.expand_as(columns), facts.tokens(columns)
        drawn = probs.gather(1, columns)
        left = 1 - (drawn.cumsum(1) - drawn)
        reach = facts.above + left.clamp(min=0).log()
        # Either condition holds for the first few siblings and for none further: the possible ones come first, and
        # reach falls, so that ending there is a decision about a sibling that has not been drawn yet.
        real = drawn > 0
        if self.total is not None:
            real &= reach > layer.floor
        values = facts.log_probs.gather(1, columns) + facts.above
        return read(values, tokens, rows, reach, real)
