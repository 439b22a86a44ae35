"""What `evaluation.compare` can compare: cells (a tree, its judge, a temperature, a node budget, a drafter, its law).

Owns the names of policies and verifiers on the command line, how many nodes a name may spend, which combinations are
refused, and the two presets. Decodes nothing.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opt_tree import OptTree, Static, TreePolicy, Verifier, verifiers
from opt_tree.children import IID, Children, TopK, WithoutReplacement
from opt_tree.policies import (
    HALVING,
    AcceptanceRates,
    Delayed,
    DynamicDepth,
    DySpec,
    Eagle2,
    Rheo,
    Sampled,
    SequoiaTree,
    Talon,
    greedy_static_tree,
)

DEPTH = 10
"""Layers drafted at most, for every policy whose paper does not say otherwise."""
VERIFIERS: dict[str, Verifier] = {
    name: found for name in verifiers.__all__ if hasattr(found := getattr(verifiers, name), "valid_for")
}
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
class Cell:
    """One line of the comparison."""

    policy: str
    """A name of `FAMILIES`, with its parameters: `opt:0.2`, `delayed:3:2:6`."""
    budget: int
    """Drafted nodes sent to the target each step, at most."""
    drafter: str
    """draft or eagle."""
    law: str
    """bare or sharpened; either: at temperature 0 a shape fixed by ranks alone, which sharpening does not change."""
    temperature: float
    children: str
    """How siblings are picked; of policies that decide this themselves, the class's name."""
    verifier: str

    @property
    def key(self) -> str:
        """The name of the cell, unique."""
        return (
            f"{self.drafter} {self.law}, T {self.temperature:g}, {self.policy}, {self.budget} nodes, {self.children}, "
            f"{self.verifier}"
        )

    @property
    def family(self) -> str:
        return self.policy.partition(":")[0]

    @property
    def draws_from(self) -> str:
        """The law that the drafter answers with."""
        return "bare" if self.law == "either" else self.law

    @property
    def needs_rates(self) -> bool:
        return "rates" in inspect.signature(FAMILIES[self.family]).parameters

    def build(self, rates: AcceptanceRates = HALVING) -> TreePolicy:
        """Make the policy. Raises ValueError for parameters it does not take, or that break the budget."""
        return _build(self.policy, self.budget, self.children, rates)

    def refusal(self, lossy: bool) -> str | None:
        """Why the library does not run this combination, in its own words; None if it does."""
        if self.temperature > 0 and self.verifier == "greedy":
            return "verifier greedy judges at temperature 0 only"
        try:
            verifiers.check(VERIFIERS[self.verifier], self.build().children, lossy)
        except (TypeError, ValueError) as error:
            return str(error)
        return None


def _chain(nodes: int, siblings: Callable[[int], Children]) -> Static:
    return Static(Static.chain(min(nodes, DEPTH)).paths, siblings)


def _kary(nodes: int, siblings: Callable[[int], Children], k: int = 2) -> Static:
    """Breadth first until the budget is spent."""
    layers = (itertools.product(range(k), repeat=depth) for depth in itertools.count(1))
    return Static(tuple(itertools.islice(itertools.chain.from_iterable(layers), nodes)), siblings)


def _sequoia(
    nodes: int, siblings: Callable[[int], Children], rates: AcceptanceRates, depth: int = DEPTH
) -> SequoiaTree:
    return SequoiaTree(rates, nodes, depth, siblings)


def _medusa(nodes: int, siblings: Callable[[int], Children], rates: AcceptanceRates, depth: int = 4) -> Static:
    if siblings is not TopK:  # drawn siblings come one after another: no rank can be skipped
        rates = AcceptanceRates(*_falling(rates))
    return Static(greedy_static_tree(rates, nodes, depth).paths, siblings)


def _eagle(nodes: int, siblings: Callable[[int], Children], rates: AcceptanceRates, depth: int = 5) -> Static:
    return _medusa(nodes, siblings, rates, depth)


def _falling(rates: AcceptanceRates) -> Iterable[Any]:
    """The rates, none above an earlier rank's."""
    yield tuple(itertools.accumulate(rates.by_rank, min))
    yield tuple(tuple(itertools.accumulate(rates.below(depth), min)) for depth in range(len(rates.by_depth)))


def _eagle2(nodes: int, top_k: int = Eagle2.top_k, depth: int = Eagle2.depth) -> Eagle2:
    return Eagle2(top_k, depth, nodes)


def _ddd(nodes: int, threshold: float = 0.2) -> DynamicDepth:
    """The threshold is a probability here: the paper's H is its logarithm."""
    return DynamicDepth(depth=DEPTH - 1, nodes=nodes, threshold=math.log(threshold) if threshold else -math.inf)


def _talon(nodes: int, ratio: float = Talon.ratio) -> Talon:
    return Talon(ratio, nodes, max_depth=DEPTH)


def _opt(nodes: int, threshold: float = OptTree.threshold, depth: int = DEPTH) -> OptTree:
    return OptTree(nodes, threshold, depth)


def _rheo(nodes: int, threshold: float = Rheo.threshold, depth: int = DEPTH) -> Rheo:
    return Rheo(nodes, threshold, depth)


def _dyspec(nodes: int, threshold: float = 0.0) -> DySpec:
    return DySpec(nodes, threshold, DEPTH)


def _chains(nodes: int, k: int = 3) -> Sampled:
    if k > nodes:
        raise ValueError(f"{k} chains need at least {k} nodes, the budget is {nodes}")
    return Sampled.chains(k, min(nodes // k, DEPTH))


def _delayed(nodes: int, branches: int = 3, trunk: int = 2, length: int | None = None) -> Delayed:
    """Without a length, branches as long as the budget allows."""
    trunk = min(trunk, nodes)
    return Delayed(trunk, branches, min((nodes - trunk) // branches, DEPTH - trunk) if length is None else length)


FAMILIES: dict[str, Callable[..., TreePolicy]] = {
    "opt": _opt,
    "eagle2": _eagle2,
    "ddd": _ddd,
    "talon": _talon,
    "sequoia": _sequoia,
    "eagle": _eagle,
    "medusa": _medusa,
    "binary": lambda nodes, siblings: _kary(nodes, siblings),
    "kary": _kary,
    "chain": _chain,
    "chains": _chains,
    "delayed": _delayed,
    "dyspec": _dyspec,
    "rheo": _rheo,
}
"""Policies by name. One that takes `siblings` has a fixed shape, whose kind of children follows from the verifier;
`rates` are measured; what follows can be given behind colons."""


def _build(policy: str, budget: int, children: str, rates: AcceptanceRates) -> TreePolicy:
    name, *given = policy.split(":")
    if name not in FAMILIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(FAMILIES)}")
    provided = {"nodes": budget, "siblings": SIBLINGS.get(children, TopK), "rates": rates}
    parameters = list(inspect.signature(FAMILIES[name]).parameters)
    own = [parameter for parameter in parameters if parameter not in provided]
    if len(given) > len(own):
        raise ValueError(f"{policy}: {name} takes {', '.join(own) or 'no parameters'}, got {len(given)} numbers")
    try:
        numbers = {key: int(text) if text.isdigit() else float(text) for key, text in zip(own, given, strict=False)}
    except ValueError as error:
        raise ValueError(f"{policy}: what follows {name} must be numbers: {', '.join(own)}") from error
    built = FAMILIES[name](**{key: value for key, value in provided.items() if key in parameters}, **numbers)
    if (nodes := getattr(built, "nodes", 0)) > budget:
        raise ValueError(f"{policy} has {nodes} nodes, the budget is {budget}")
    return built


def grid(
    policies: Sequence[str],
    judges: Sequence[str],
    temperatures: Sequence[float],
    budgets: Sequence[int],
    drafters: Sequence[str] = ("draft",),
    laws: Sequence[str] = ("bare",),
) -> list[Cell]:
    """Every combination once; at temperature 0 the judge is `greedy`, above it and for sampled children the law bare.

    Raises ValueError for unknown names and bad numbers; combinations that are merely invalid are for `Cell.refusal`.
    """
    for known, asked in ((VERIFIERS, judges), (("draft", "eagle"), drafters), (("bare", "sharpened"), laws)):
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"unknown {unknown[0]!r}; there are {', '.join(known)}")
    if min(budgets, default=1) < 1:
        raise ValueError(f"a budget is at least 1 node, got {min(budgets)}")
    if bad := [temperature for temperature in temperatures if not 0 <= temperature < math.inf]:
        raise ValueError(f"a temperature must be 0 or more, and finite, got {bad[0]:g}")
    cells: dict[Cell, None] = {}
    for drafter, temperature, budget, law, policy in itertools.product(drafters, temperatures, budgets, laws, policies):
        shaped = "siblings" in inspect.signature(FAMILIES.get(policy.partition(":")[0], _opt)).parameters
        own = "" if shaped else type(_build(policy, max(budget, 10**6), "", HALVING).children).__name__
        for judge in judges if temperature else ("greedy",):
            for children in WANTED.get(judge, ("IID",)) if shaped else (own,):
                ranked = temperature == 0 and shaped
                known = "either" if ranked else law if temperature == 0 and own in ("TopK", "LayerBest") else "bare"
                cells[Cell(policy, budget, drafter, known, float(temperature), children, judge)] = None
    return list(cells)


def paper(quick: bool) -> list[Cell]:
    """The OPT-Tree paper's: its trees at equal budgets, the scaling figure, the threshold and temperature sweeps."""
    trees, both, laws = ("opt:0.2", "eagle2", "sequoia", "eagle", "binary"), ("draft", "eagle"), ("bare", "sharpened")
    budgets, sizes = (25, 30, 50, 60, 130), (10, 25, 60, 130, 250, 500)
    deltas, temperatures = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9), (0, 0.2, 0.4, 0.6, 0.8, 1)
    if quick:
        both, laws, budgets, sizes, deltas, temperatures = ("draft",), laws[1:], (25, 60), (), (0.2, 0.5, 0.9), (0.5, 1)
    sweep = [f"opt:{delta}" for delta in deltas]
    cells = grid(trees, ("match",), (0,), budgets, both, laws)
    cells += grid(("opt:0.2", "sequoia"), ("match",), (0,), sizes, ("draft",), ("sharpened",))
    cells += grid(sweep, ("match",), (0,), (50,), both, ("sharpened",))
    cells += grid(("opt:0.2",), ("match",), temperatures, (50,), both, ("sharpened",))
    return list(dict.fromkeys(cells))


def verification(quick: bool) -> list[Cell]:
    """The verification study's: i.i.d. rollouts by K and L, all verifiers at equal budget, temperatures, delay.

    One judge suffices for the rollouts and the temperatures: on a cell's trees the expectation of all is computed.
    """
    judges, temperatures, budget = (
        ("multi_round", "k_seq", "khisti", "naive", "match", "traversal"),
        (0.2, 0.6, 1, 1.2),
        24,
    )
    ks, lengths, drafters = (1, 2, 3, 4), (1, 2, 4, 6, 8), ("draft", "eagle")
    best = {"dyspec": "without_replacement", "rheo:0.2": "rheo", "opt:0.2": "match", "chain": "block"}
    if quick:
        judges, temperatures, ks, lengths, drafters = ("multi_round", "traversal"), (0.4, 1), (1, 3), (2, 6), ("draft",)
    rollouts, delays = ("chains:3", "delayed:3:2"), ("delayed:3:1", "delayed:3:4")
    cells = [
        cell
        for k, length in itertools.product(ks, lengths)
        for cell in grid((f"chains:{k}",), ("multi_round",), (1,), (k * length,))
    ]
    cells += grid(rollouts, judges, (1,), (budget,), drafters)
    cells += grid(rollouts, ("multi_round",), temperatures, (budget,))
    for policy, judge in best.items():
        cells += grid((policy,), (judge,), temperatures, (budget,)) + grid(
            (policy,), (judge,), (1,), (budget,), drafters
        )
    cells += grid(("sequoia",), ("without_replacement", "traversal"), (1,), (budget,), drafters)
    if not quick:
        cells += grid(delays, ("multi_round", "traversal"), (1,), (budget,), drafters)
        cells += grid(("kary:2", "kary:3"), ("multi_round", "traversal"), (1,), (budget,))
        cells += grid(("chain", "dyspec"), ("naive", "traversal"), (1,), (budget,))
    return list(dict.fromkeys(cells))


PRESETS: dict[str, Callable[[bool], list[Cell]]] = {"paper": paper, "verification": verification}
