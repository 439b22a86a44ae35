"""What `evaluation.compare` can compare: a tree, its judge, a temperature, a node budget, a drafter, its sharpening.

Owns which combinations there are and which are refused. Policies and verifiers are the library's, by their names there.
Decodes nothing. In the output and in its keys a combination is called a cell.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evaluation.answers.comparison import SHARPENING
from opt_tree import TreePolicy, Verifier, verifiers
from opt_tree.core.children import IID, Children, TopK, WithoutReplacement
from opt_tree.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.policies.base import MOST_NODES
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
        try:
            verifiers.check_temperature(VERIFIERS[self.verifier], self.temperature)
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
            own = "" if shaped else type(make_policy(policy, max(budget, MOST_NODES)).children).__name__
            if temperature > 0 or own not in ("", "TopK", "LayerBest"):
                sharpening = "bare"
            elif shaped:
                sharpening = "either"
            for judge in self.judges if temperature else ("greedy",):
                for children in WANTED.get(judge, ("IID",)) if shaped else (own,):
                    one = Combination(policy, budget, drafter, sharpening, float(temperature), children, judge)
                    found[one] = None
        return list(found)


DRAFT, HEAD = "lm:demo", "eagle:demo"


def paper() -> list[Grid]:
    """The OPT-Tree paper's: its trees at equal budgets, the scaling figure, the threshold and temperature sweeps."""
    trees = ("opt:0.2", "eagle2", "sequoia", "eagle1", "binary")
    both = (DRAFT, HEAD)
    sweep = [f"opt:{threshold}" for threshold in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)]
    return [
        Grid(trees, budgets=(25, 30, 50, 60, 130), drafters=both, sharpening=("bare", "fitted")),
        Grid(("opt:0.2", "sequoia"), budgets=(10, 25, 60, 130, 250, 500), sharpening=("fitted",)),
        Grid(sweep, budgets=(50,), drafters=both, sharpening=("fitted",)),
        Grid(("opt:0.2",), ("match",), (0, 0.2, 0.4, 0.6, 0.8, 1), (50,), both, ("fitted",)),
    ]


def verification() -> list[Grid]:
    """The verification study's: i.i.d. rollouts by K and L, all verifiers at equal budget, temperatures, delay.

    One judge suffices for the rollouts and the temperatures: on a cell's trees the expectation of all is computed.
    """
    judges: tuple[str, ...] = ("multi_round", "k_seq", "khisti", "naive", "match", "traversal")
    temperatures: tuple[float, ...] = (0.2, 0.6, 1, 1.2)
    ks, lengths, drafters, budget = (1, 2, 3, 4), (1, 2, 4, 6, 8), (DRAFT, HEAD), (24,)
    chains, rollouts = ("multi_round",), ("chains:3", "delayed:3:2")
    best = {"dyspec": "without_replacement", "rheo:0.2": "rheo", "opt:0.2": "match", "chain": "block"}
    grids = [Grid((f"chains:{k}",), chains, (1,), (k * length,)) for k, length in itertools.product(ks, lengths)]
    grids += [Grid(rollouts, judges, (1,), budget, drafters), Grid(rollouts, chains, temperatures, budget)]
    for policy, judge in best.items():
        grids.append(Grid((policy,), (judge,), temperatures, budget))
        grids.append(Grid((policy,), (judge,), (1,), budget, drafters))
    grids.append(Grid(("sequoia",), ("without_replacement", "traversal"), (1,), budget, drafters))
    pair = ("multi_round", "traversal")
    grids.append(Grid(("delayed:3:1", "delayed:3:4"), pair, (1,), budget, drafters))
    grids.append(Grid(("kary:2", "kary:3"), pair, (1,), budget))
    grids.append(Grid(("chain", "dyspec"), ("naive", "traversal"), (1,), budget))
    return grids


def rules() -> list[Grid]:
    """OPT-Tree's rule against the published code's, thresholds, and the fitted sharpening; small trees beside them."""
    both = (DRAFT, HEAD)
    return [
        Grid(("published:0.5", "opt:0.5", "opt:0.2"), drafters=both),
        Grid(("opt:0.5", "opt:0.2"), drafters=both, sharpening=("fitted",)),
        Grid(("binary",), budgets=(30,), drafters=both),
        Grid(("chain",), budgets=(4,), drafters=both),
    ]


RASD, GRAFT = f"rasd:{HEAD}+store:demo", f"{HEAD}+store:demo"
DRAFTERS: dict[str, tuple[str, ...]] = {
    DRAFT: ("opt:0.2", "binary"),
    HEAD: ("opt:0.2", "eagle2"),
    "eagle3:demo": ("opt:0.2", "eagle2"),
    "ngram": ("opt:0", "chain"),
    "store:demo": ("opt:0",),
    "recycling": ("opt:0", "recycling_tree"),
    f"graft:1:{GRAFT}": ("opt:0.05",),
    f"graft:2:{GRAFT}": ("opt:0.05",),
    RASD: ("opt:0.2", "eagle2"),
    **dict.fromkeys(SMALL := ("exit:demo", "parallelspec:demo", "dspark:demo"), ("opt:0.05", "chain")),
}
"""What drafts, and under which trees: OPT-Tree, whose threshold is about what a layer costs, then its paper's."""
FITTED = (DRAFT, HEAD, "eagle3:demo", f"graft:1:{GRAFT}", f"graft:2:{GRAFT}", RASD, *SMALL)
"""Those that bring a fitted sharpening."""


def drafters() -> list[Grid]:
    """What drafts: models, tables, and a model above a table, each under OPT-Tree and under its paper's tree.

    Tables that learn from prompt to prompt (recycling) are as warm as the combinations before have made them.
    """
    sizes = {0: (8, 12, 24, 60), 1: (8, 60)}
    grids = []
    for (temperature, budgets), (drafter, trees) in itertools.product(sizes.items(), DRAFTERS.items()):
        read = ("fitted",) if drafter in FITTED else ("bare",)
        grids.append(Grid(trees, temperatures=(temperature,), budgets=budgets, drafters=(drafter,), sharpening=read))
    return grids


STUDIES = {"paper": paper, "verification": verification, "rules": rules, "drafters": drafters}


@dataclass(frozen=True)
class Size:
    """How much is decoded, where the command line does not say it."""

    questions: int = 8
    tokens: int = 64
    """New tokens a question, at most."""
    plain_every: int = 2
    """Of so many questions one is decoded plainly, too: before the combination's own answer or after it, by turns."""
    peers: bool = False
    """Whether `transformers` decodes the questions, too."""


SIZES = {"drafters": Size(24, 32, plain_every=8, peers=True)}
"""Of the studies that are not of the usual size: that of drafters has some hundred combinations."""


def study(name: str) -> list[Combination]:
    """The combinations of a study, each once."""
    return list(dict.fromkeys(one for grid in STUDIES[name]() for one in grid.combinations()))
