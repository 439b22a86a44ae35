"""The best token for certain, and one draw from the rest (RheoSampling)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from opt_tree.methods.children.drawn import Drawn, DrawnChildren, DrawnLayer, check_siblings, known, read
from opt_tree.methods.children.draws import draws_of, probs_of
from opt_tree.sampling import Random


@dataclass(frozen=True)
class BestAndDraw(Drawn):
    """The best token for certain, one draw from the rest, then the best of the others, while they pay.

    RheoSampling's sibling groups (arXiv:2609.21827), for the pool's `total` best. The draw is ranked by min(q_best,
    1 - q_best), at least what any token of the rest has, whichever comes out. Probabilities (.5, .3, .2):

        best a, drawn c, then b:      reach  .5   .5   .3       probability  .5   .2   .3
    """

    total: int
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_siblings(self.total)

    @property
    def budget(self) -> int:
        return self.total

    def pick(self, layer: DrawnLayer, random: Random) -> DrawnChildren:
        """See `Drawn.pick`. A distribution of one token has one child."""
        log_probs, above, rows, _ = facts = known(layer)
        probs = probs_of(log_probs)
        values = log_probs + above
        best = probs.argmax(1, keepdim=True)
        rest = probs.scatter(1, best, 0.0)
        more = rest.sum(1, keepdim=True) > 0
        drawn = draws_of(random).iid(torch.where(more, rest, probs), 1)
        top = values.gather(1, best).double()
        proxy = torch.minimum(top, above + (1 - probs.gather(1, best)).log())
        reach = torch.minimum(values, proxy).scatter(1, drawn, proxy).scatter(1, best, top)
        # In the order of judgement: the best, the draw, the others by falling reach (log-probabilities, none above 0).
        order = reach.scatter(1, drawn, 1.0).scatter(1, best, 2.0).topk(min(self.total, probs.shape[1])).indices
        reach, values = reach.gather(1, order), values.gather(1, order)
        return read(values, facts.tokens(order), rows.expand_as(order), reach, reach > layer.floor)
