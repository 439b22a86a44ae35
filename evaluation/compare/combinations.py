"""What `evaluation.compare` can compare: a tree, its judge, a temperature, a node budget, a drafter, its sharpening.

Owns which combinations there are and which are refused. Policies and verifiers are the library's, by their names there.
Decodes nothing. In the output and in its keys a combination is called a cell.
"""

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.answers.comparison import SHARPENING
from evaluation.compare.rates import KINDS
from opt_tree import TreePolicy, Verifier
from opt_tree.children import TopK
from opt_tree.methods.controllers.registry import CONTROLLERS, chooses, parse_controller
from opt_tree.methods.drafters.registry import folders_of
from opt_tree.methods.own_files import digests, object_of, split_name
from opt_tree.methods.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.methods.policies.registry import make_policy, name_of, takes
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.models.checkpoints import read_calibration, read_minutes
from opt_tree.policy import MOST_NODES
from opt_tree.verify import check, check_temperature

WEIGHTS = (".safetensors", ".bin", ".pt")
SIBLINGS = {name: siblings for name, (siblings, _) in KINDS.items()}
WANTED = {
    "greedy": ("TopK",),
    "match": ("TopK",),
    "typical": ("TopK",),
    "without_replacement": ("WithoutReplacement",),
    "rheo": ("WithoutReplacement",),
    "traversal": ("IID", "WithoutReplacement"),
}
"""The kinds of siblings that a fixed shape is given for a verifier; `IID` for those not named here."""


def verifier_of(name: str) -> Verifier:
    """The verifier of a name. Raises ValueError with the names that there are."""
    return VERIFIERS.named(name).make


def is_controller(policy: str) -> bool:
    """Whether what stands in a policy's place chooses one for each step. ValueError for what there is not."""
    name = CONTROLLERS.split(policy)[0]
    if not (own := split_name(name)):
        return name in CONTROLLERS
    made = object_of(own[0])
    if isinstance(made, type) or not callable(made):
        return chooses(made)
    return "wanted" in inspect.signature(made).parameters


@dataclass(frozen=True)
class Combination:
    """One line of the comparison."""

    policy: str
    """A name with its parameters: `opt:0.2`, `delayed:3:2:6`, `mine.py:Trunk`; or a controller's: `auto`."""
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
    def code(self) -> dict[str, str]:
        """The files of one's own that it is made of, and a checksum of each."""
        return digests((self.policy, self.drafter, self.verifier))

    @property
    def controls(self) -> bool:
        return is_controller(self.policy)

    def build(self, rates: AcceptanceRates = HALVING) -> TreePolicy:
        """Make the policy. Raises ValueError for parameters it does not take, or that break the budget."""
        return make_policy(self.policy, self.budget, SIBLINGS.get(self.children, TopK), rates)

    def refusal(self, lossy: bool) -> str | None:
        """Why the library does not run this combination, in its own words; None if it does."""
        try:
            judge = verifier_of(self.verifier)
            check_temperature(judge, self.temperature)
            check(judge, TopK(2) if self.controls else self.build().children, lossy)
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
        for judge in self.judges:
            verifier_of(judge)
        if unknown := [name for name in self.sharpening if name not in SHARPENING]:
            raise ValueError(f"unknown {unknown[0]!r}; there are {', '.join(SHARPENING)}")
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
            own = _children(policy, budget)
            shaped = not own
            if temperature > 0 or own not in ("", "TopK", "LayerBest"):
                sharpening = "bare"
            elif shaped:
                sharpening = "either"
            for judge in self.judges if temperature else ("greedy",):
                for children in WANTED.get(judge, ("IID",)) if shaped else (own,):
                    one = Combination(policy, budget, drafter, sharpening, float(temperature), children, judge)
                    found[one] = None
        return list(found)


def _children(policy: str, budget: int) -> str:
    """The kind of siblings that a policy picks, empty for one that is told; controllers choose among the best."""
    if is_controller(policy):
        parse_controller(policy)
        return "TopK"
    if takes(name_of(policy), "siblings"):
        return ""
    return type(make_policy(policy, max(budget, MOST_NODES)).children).__name__


def is_calibrated(drafter: str) -> bool:
    """Whether a fitted sharpening is stored beside a drafter, or a part of it."""
    return any(read_calibration(folder) is not None for folder in folders_of(drafter))


def footprint(spec: str) -> dict[str, Any]:
    """Bytes on disk and minutes of training, over all parts; None where a part that has weights does not say.

    A table that learns as it goes weighs nothing and was trained for no time.
    """
    folders = [Path(folder) for folder in folders_of(spec)]
    minutes = [read_minutes(str(folder)) for folder in folders]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.suffix in WEIGHTS]
    known = all(folder.is_dir() for folder in folders)
    return {
        "weights_bytes": sum(file.stat().st_size for file in files) if known else None,
        "training_minutes": None if None in minutes else sum(minute or 0.0 for minute in minutes),
    }
