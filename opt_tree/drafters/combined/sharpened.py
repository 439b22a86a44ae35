"""The drafter as an estimate of what the target will choose.

At temperature 0 the right score of a token is the probability that it is the target's argmax, not the drafter's q: E(A)
computed from q can be far below the A that follows. One temperature, fitted by maximum likelihood of the target's own
choices (`python -m opt_tree.training.fitting.calibrate`), mends most of that.
"""

from numbers import Real
from typing import Any

from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Few, Picking, Reduced
from opt_tree.core.errors import require
from opt_tree.core.pool import Frontier
from opt_tree.core.target import Laws
from opt_tree.drafters.base import Drafter, DrafterAround, scaled


class Sharpened(DrafterAround):
    """Wraps a drafter: its scores divided by `temperature`, in float32 or wider, for greedy targets only.

    Above temperature 0 the target draws from a distribution of its own, and the bare drafter is used.
    """

    def __init__(self, drafter: Drafter, temperature: float) -> None:
        require(Drafter, drafter=drafter)
        require(Real, temperature=temperature)
        if not temperature > 0:
            raise ValueError(f"the sharpening temperature must be positive, got {temperature}")
        if drafter.sparse:
            raise TypeError(f"{type(drafter).__name__} names a few tokens only: they cannot be sharpened")
        super().__init__(drafter)
        self.any_order = drafter.any_order
        self.temperature = temperature

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Reduced:
        return self._sharpen(self.drafter.root(context))

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Reduced:
        return self._sharpen(self.drafter.expand(frontier))

    def root_laws(self, context: list[int], picking: Picking = Picking()) -> Laws:
        return self.drafter.root_laws(context, picking._replace(scale=picking.scale / self.temperature))

    def expand_laws(self, frontier: Frontier, picking: Picking = Picking()) -> Laws:
        return self.drafter.expand_laws(frontier, picking._replace(scale=picking.scale / self.temperature))

    def _sharpen(self, scores: Float[Tensor, "rows vocab"] | Few | Reduced) -> Float[Tensor, "rows vocab"] | Reduced:
        if isinstance(scores, Reduced):
            return scores._replace(scores=scaled(scores.scores, 1 / self.temperature))
        assert not isinstance(scores, Few), f"{self.drafter.describe()} is not sparse, and answers in Few"
        return scaled(scores, 1 / self.temperature)

    def describe(self) -> str:
        return f"{self.drafter.describe()}, sharpened by temperature {self.temperature:.2f}"

    @property
    def settings(self) -> dict[str, Any]:
        return self.drafter.settings | {"sharpening": self.temperature}

    def at_temperature(self, temperature: float) -> Drafter:
        return self if temperature == 0 else self.drafter.at_temperature(temperature)
