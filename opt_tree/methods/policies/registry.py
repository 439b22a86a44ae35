"""Policies by name: `@register` stands above each in its file, or above a function that makes it at a node budget.

Owns how a policy is made from its name, its parameters and a budget, which is how trees are compared.
"""

import inspect
from collections.abc import Callable
from typing import Any

from opt_tree.children import Children, TopK
from opt_tree.methods.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.methods.registry import Method, Registry
from opt_tree.policy import OptTree, TreePolicy

DEPTH = 10
"""Layers drafted at most, for every policy whose paper does not say otherwise."""

Siblings = Callable[[int], Children]


def _of_object(name: str, made: Any) -> Callable[..., TreePolicy]:
    """What makes a policy: a class, a function, or one that is made already, whose budget is its own."""
    if callable(made):
        return made
    if not isinstance(made, TreePolicy):
        raise ValueError(f"{name} is {made!r:.80}: neither a tree policy nor what makes one")
    return lambda: made


POLICIES = Registry("policy", Method[Callable[..., TreePolicy]], _of_object, __package__)
"""A policy, or how to make one, from `nodes`. One that takes `siblings` has a fixed shape, and any kind of children;
`rates` are acceptance rates; what else it takes can be given behind colons."""
register = POLICIES.register
register("opt", about="OPT-Tree: the most expected tokens at this budget", paper="2406.17276")(OptTree)

_PROVIDED = ("nodes", "siblings", "rates")


def parameters(name: str) -> list[str]:
    """The numbers that can be given behind the name. Raises ValueError for an unknown one."""
    return [one for one in inspect.signature(POLICIES.named(name).make).parameters if one not in _PROVIDED]


def takes(name: str, what: str) -> bool:
    """Whether the policy of this name takes `siblings` (its shape is fixed), or `rates`. ValueError if unknown."""
    return what in inspect.signature(POLICIES.named(name).make).parameters


def name_of(spec: str) -> str:
    """The name that a spec begins with: `opt` of `opt:0.2`, `mine.py:Trunk` of `mine.py:Trunk:2`."""
    return POLICIES.split(spec)[0]


def make_policy(spec: str, nodes: int, siblings: Siblings = TopK, rates: AcceptanceRates = HALVING) -> TreePolicy:
    """Make the policy of a name and its parameters, such as `opt:0.2` or `delayed:3:1`, at a budget of `nodes`.

    Raises ValueError for an unknown name, for parameters that it does not take, and where the budget is exceeded.
    """
    name, rest = POLICIES.split(spec)
    given = rest.split(":") if rest else []
    own = parameters(name)
    provided = dict(zip(_PROVIDED, (nodes, siblings, rates), strict=True))
    if len(given) > len(own):
        raise ValueError(f"{spec}: {name} takes {', '.join(own) or 'no parameters'}, got {len(given)} numbers")
    try:
        numbers = {key: int(text) if text.isdigit() else float(text) for key, text in zip(own, given, strict=False)}
    except ValueError as error:
        raise ValueError(f"{spec}: what follows {name} must be numbers: {', '.join(own)}") from error
    made = {key: value for key, value in provided.items() if takes(name, key)} | numbers
    try:
        built = POLICIES.named(name).make(**made)
    except TypeError as error:  # a class of one's own may want more
        raise ValueError(f"{spec} cannot be made of {', '.join(made) or 'nothing'}: {error}") from error
    if not isinstance(built, TreePolicy):
        raise ValueError(f"{spec} is {built!r:.80}: no tree policy, which has children, max_depth, expand and select")
    if (spent := getattr(built, "nodes", 0)) > nodes:
        raise ValueError(f"{spec} has {spent} nodes, the budget is {nodes}")
    return built
