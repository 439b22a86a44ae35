"""Acceptance rates by rank and depth: fixed trees are computed from them, `evaluation.compare` measures them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

Rates = tuple[float, ...]


@dataclass(frozen=True)
class AcceptanceRates:
    """How often the child of each rank is the accepted one, given that its parent was.

    Rank 0 is the drafter's best token, or the first one drawn where siblings are sampled. The rates of one node add up
    to at most 1, one child at most being accepted; what is missing is the rate of none.
    """

    by_rank: Rates
    """At all depths together: the paper's acceptance vector p (arXiv:2402.12374, positional acceptance)."""
    by_depth: tuple[Rates, ...] = ()
    """By the depth of the parent, the root's children first, as far as it was measured (arXiv:2401.10774: by head)."""

    def __post_init__(self) -> None:
        if not self.by_rank:
            raise ValueError("no acceptance rates: by_rank is empty")
        for rate in (rate for row in (self.by_rank, *self.by_depth) for rate in row):
            if not 0 <= rate <= 1:
                raise ValueError(f"an acceptance rate must lie in [0, 1], got {rate}")

    @property
    def depths(self) -> int:
        """Depths that have rates of their own."""
        return len(self.by_depth)

    def below(self, depth: int) -> Rates:
        """The rates of the children of a node at `depth` (root: 0), or of all depths where it was not measured."""
        own = self.by_depth[depth] if depth < len(self.by_depth) else ()
        return own + self.by_rank[len(own) :]

    def expected_accepted(self, paths: Iterable[tuple[int, ...]]) -> float:
        """E(A) of a tree given by its paths: the sum over its nodes of the rates' product on the way to them."""
        return sum(prod(self._rate(depth, rank) for depth, rank in enumerate(path)) for path in paths)

    def _rate(self, depth: int, rank: int) -> float:
        rates = self.below(depth)
        return rates[rank] if rank < len(rates) else 0.0

    def to_dict(self) -> dict[str, list]:
        """For JSON."""
        return {"by_rank": list(self.by_rank), "by_depth": [list(rates) for rates in self.by_depth]}


HALVING = AcceptanceRates(tuple(0.5 ** (rank + 1) for rank in range(10)))
"""Acceptance rates for want of measured ones: each rank half as often as the one before it."""
