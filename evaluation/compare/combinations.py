"""What `evaluation.compare` can compare: a tree, its judge, a temperature, a node budget, a drafter, its sharpening.

Owns which combinations there are and which are refused. Policies and verifiers are the library's, by their names there.
Decodes nothing. In the output and in its keys a combination is called a cell.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opt_tree import TreePolicy, Verifier, verifiers
from opt_tree.core.children import IID, Children, TopK, WithoutReplacement
from opt_tree.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.policies.registry import make_policy, takes

VERIFIERS: dict[str, Verifier] = {name: method.make for name, method in verifiers.VERIFIERS.items()}
SIBLINGS: dict[str, Callable[[int], Children]] = {"TopK": TopK, "IID": IID, "WithoutReplacement": WithoutReplacement}
WANTED = {
    "greedy": ("TopK",),
    "match": ("TopK",),
    "typical": ("TopK",),
    "without_replacement": ("WithoutReplacement",),
    "rheo": ("WithoutReplacement",),
    "traversal": ("IID", "WithoutReplacement"),
}
"""The kinds of siblings that a fixed shape is given for a verifier; `IID` for those not named here."""
SHARPENING = ("bare", "fitted")


@dataclass(frozen=True)
class Combination:
    """One line of the comparison."""

    policy: str
    """A name of the library's registry, with its parameters: `opt:0.2`, `delayed:3:2:6`."""
    budget: int
    """Drafted nodes sent to the target each step, at most."""
    drafter: str
    """Its spec: lm:demo."""
    sharpening: str
    """bare or fitted; either: at temperature 0 a shape fixed by ranks alone, which sharpening does not change."""
    temperature: float
    children: str
    """How siblings are picked; of policies that decide this themselves, the class's name."""
    verifier: str

    @property
    def key(self) -> str:
        """The name of the combination, unique."""
        return (
            f"{self.drafter} {self.sharpening}, T {self.temperature:g}, {self.policy}, {self.budget} nodes, "
            f"{self.children}, {self.verifier}"
        )

    @property
    def needs_rates(self) -> bool:
        return takes(self.policy.partition(":")[0], "rates")

    def build(self, rates: AcceptanceRates = HALVING) -> TreePolicy:
        """Make the policy. Raises ValueError for parameters it does not take, or that break the budget."""
        return make_policy(self.policy, self.budget, SIBLINGS.get(self.children, TopK), rates)

    def refusal(self, lossy: bool) -> str | None:
        """Why the library does not run this combination, in its own words; None if it does."""
        if self.temperature > 0 and self.verifier == "greedy":
            return "verifier greedy judges at temperature 0 only"
        try:
            verifiers.check(VERIFIERS[self.verifier], self.build().children, lossy)
        except (TypeError, ValueError) as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Grid:
    """What is combined with what.

    Raises ValueError for unknown names and bad numbers; what is merely invalid is for `Combination.refusal`.
    """

    policies: Sequence[str]
    judges: Sequence[str] = ("match",)
    temperatures: Sequence[float] = (0,)
    budgets: Sequence[int] = (60,)
    drafters: Sequence[str] = ("lm:demo",)
    sharpening: Sequence[str] = ("bare",)

    def __post_init__(self) -> None:
        for known, asked in ((VERIFIERS, self.judges), (SHARPENING, self.sharpening)):
            if unknown := [name for name in asked if name not in known]:
                raise ValueError(f"unknown {unknown[0]!r}; there are {', '.join(known)}")
        if min(self.budgets, default=1) < 1:
            raise ValueError(f"a budget is at least 1 node, got {min(self.budgets)}")
        if bad := [temperature for temperature in self.temperatures if not 0 <= temperature < math.inf]:
            raise ValueError(f"a temperature must be 0 or more, and finite, got {bad[0]:g}")

    def combinations(self) -> list[Combination]:
        """Every combination once; at temperature 0 the judge is `greedy`, above it the drafter is bare.

        So it is for sampled children, whose distribution is the drafter's own.
        """
        found: dict[Combination, None] = {}
        for drafter, temperature, budget, sharpening, policy in itertools.product(
            self.drafters, self.temperatures, self.budgets, self.sharpening, self.policies
        ):
            shaped = takes(policy.partition(":")[0], "siblings")
            own = "" if shaped else type(make_policy(policy, max(budget, 10**6)).children).__name__
            if temperature > 0 or own not in ("", "TopK", "LayerBest"):
                sharpening = "bare"
            elif shaped:
                sharpening = "either"
            for judge in self.judges if temperature else ("greedy",):
                for children in WANTED.get(judge, ("IID",)) if shaped else (own,):
                    one = Combination(policy, budget, drafter, sharpening, float(temperature), children, judge)
                    found[one] = None
        return list(found)
