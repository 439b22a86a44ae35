"""Policies by name: the one list that presets, comparisons, plots and the documents read.

A new policy is one file beside this one and one line here. `make_policy` builds any of them at a node budget, which is
how trees are compared.
"""

import inspect
import itertools
import math
from collections.abc import Callable

from opt_tree.core.children import Children, TopK
from opt_tree.policies.acceptance_rates import HALVING, AcceptanceRates, Rates
from opt_tree.policies.base import TreePolicy
from opt_tree.policies.delayed import Delayed
from opt_tree.policies.dynamic_depth import DynamicDepth
from opt_tree.policies.dyspec import DySpec
from opt_tree.policies.eagle2 import Eagle2
from opt_tree.policies.greedy_static import greedy_static_tree
from opt_tree.policies.opt import OptTree
from opt_tree.policies.published_rule import PublishedRule
from opt_tree.policies.rheo import Rheo
from opt_tree.policies.sampled import Sampled
from opt_tree.policies.sequoia import SequoiaTree
from opt_tree.policies.shared import Shared
from opt_tree.policies.static import Static
from opt_tree.policies.talon import Talon
from opt_tree.policies.threshold_chain import ThresholdChain

DEPTH = 10
"""Layers drafted at most, for every policy whose paper does not say otherwise."""

Siblings = Callable[[int], Children]


def _plain(nodes: int) -> Static:
    return Static.empty()


def _chain(nodes: int, siblings: Siblings) -> Static:
    return Static(Static.chain(min(nodes, DEPTH)).paths, siblings)


def _kary(nodes: int, siblings: Siblings, k: int = 2) -> Static:
    """Breadth first until the budget is spent."""
    layers = (itertools.product(range(k), repeat=depth) for depth in itertools.count(1))
    return Static(tuple(itertools.islice(itertools.chain.from_iterable(layers), nodes)), siblings)


def _binary(nodes: int, siblings: Siblings) -> Static:
    return _kary(nodes, siblings)


def _sequoia(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = DEPTH) -> SequoiaTree:
    return SequoiaTree(rates, nodes, depth, siblings)


def _medusa(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = 4) -> Static:
    if siblings is not TopK:  # drawn siblings come one after another: no rank can be skipped
        rates = AcceptanceRates(_falling(rates.by_rank), tuple(map(_falling, map(rates.below, range(rates.depths)))))
    return Static(greedy_static_tree(rates, nodes, depth).paths, siblings)


def _falling(rates: Rates) -> Rates:
    """The rates, none above an earlier rank's."""
    return tuple(itertools.accumulate(rates, min))


def _eagle1(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = 5) -> Static:
    return _medusa(nodes, siblings, rates, depth)


def _dynamic_depth(nodes: int, threshold: float = 0.2) -> DynamicDepth:
    """The threshold is a probability here: the paper's H is its logarithm."""
    return DynamicDepth(depth=DEPTH - 1, nodes=nodes, threshold=math.log(threshold) if threshold else -math.inf)


def _talon(nodes: int, ratio: float = Talon.ratio) -> Talon:
    return Talon(ratio, nodes, max_depth=DEPTH)


def _threshold_chain(nodes: int, threshold: float = ThresholdChain.threshold, least: int = 0) -> ThresholdChain:
    return ThresholdChain(min(nodes, DEPTH), threshold, least)


def _chains(nodes: int, k: int = 3) -> Sampled:
    if k > nodes:
        raise ValueError(f"{k} chains need at least {k} nodes, the budget is {nodes}")
    return Sampled.chains(k, min(nodes // k, DEPTH))


def _delayed(nodes: int, branches: int = 3, trunk: int = 2, length: int | None = None) -> Delayed:
    """Without a length, branches as long as the budget allows."""
    trunk = min(trunk, nodes)
    return Delayed(trunk, branches, min((nodes - trunk) // branches, DEPTH - trunk) if length is None else length)


POLICIES: dict[str, Callable[..., TreePolicy]] = {
    "opt": OptTree,
    "eagle2": Eagle2,
    "dynamic_depth": _dynamic_depth,
    "talon": _talon,
    "sequoia": _sequoia,
    "eagle1": _eagle1,
    "medusa": _medusa,
    "binary": _binary,
    "kary": _kary,
    "chain": _chain,
    "threshold_chain": _threshold_chain,
    "chains": _chains,
    "delayed": _delayed,
    "dyspec": DySpec,
    "rheo": Rheo,
    "plain": _plain,
    "published": PublishedRule,
    "shared": Shared,
}
"""A policy, or how to make one, from `nodes`. One that takes `siblings` has a fixed shape, and any kind of children;
`rates` are acceptance rates; what else it takes can be given behind colons."""

_PROVIDED = ("nodes", "siblings", "rates")


def takes(name: str, what: str) -> bool:
    """Whether the policy of this name takes `siblings` (its shape is fixed), or `rates`. ValueError if unknown."""
    return what in inspect.signature(_known(name)).parameters


def make_policy(spec: str, nodes: int, siblings: Siblings = TopK, rates: AcceptanceRates = HALVING) -> TreePolicy:
    """Make the policy of a name and its parameters, such as `opt:0.2` or `delayed:3:1`, at a budget of `nodes`.

    Raises ValueError for an unknown name, for parameters that it does not take, and where the budget is exceeded.
    """
    name, *given = spec.split(":")
    build, provided = _known(name), dict(zip(_PROVIDED, (nodes, siblings, rates), strict=True))
    parameters = list(inspect.signature(build).parameters)
    own = [parameter for parameter in parameters if parameter not in provided]
    if len(given) > len(own):
        raise ValueError(f"{spec}: {name} takes {', '.join(own) or 'no parameters'}, got {len(given)} numbers")
    try:
        numbers = {key: int(text) if text.isdigit() else float(text) for key, text in zip(own, given, strict=False)}
    except ValueError as error:
        raise ValueError(f"{spec}: what follows {name} must be numbers: {', '.join(own)}") from error
    built = build(**{key: value for key, value in provided.items() if key in parameters}, **numbers)
    if (spent := getattr(built, "nodes", 0)) > nodes:
        raise ValueError(f"{spec} has {spent} nodes, the budget is {nodes}")
    return built


def _known(name: str) -> Callable[..., TreePolicy]:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
