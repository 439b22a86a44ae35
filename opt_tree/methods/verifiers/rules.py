"""What a verifier computes, and which children it refuses: what tags say of it beside `valid_for`.

A rule is what a verifier does without its coins. Who knows it knows exactly what to expect (`walks.block_efficiency`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int

from opt_tree.children import Children
from opt_tree.sampling import Logits
from opt_tree.tree import Tree
from opt_tree.verify import Verifier, greedy, match

Probs = Float[np.ndarray, " possible"]
"""Probabilities of the next token: of every one in the vocabulary, or of those that are possible at the node."""
Branching = Callable[[Probs, Probs, Int[np.ndarray, " children"]], Probs]
"""From the target's probabilities, the drafter's (empty for deterministic children) and the children, in order and with
multiplicity, to the probabilities of the token emitted there. Exact if their mean over the children is the target's.

The coins of the papers' accept and reject rules are summed out: one draw from these does what they do, and they say
exactly what to expect."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a bottom-up verifier: accept the path to `row`, or go on to the next attempt."""

    row: int
    probability: float
    """Of accepting it, given that all attempts before failed; 1 for the last."""
    token_probs: Probs
    """The distribution of the token emitted behind it."""
    tokens: Int[np.ndarray, " tokens"] | None = None
    """The tokens that it is over; None: the vocabulary."""


Attempts = Callable[[Tree, Logits], Iterable[Attempt]]
"""From a tree and its processed logits to what is tried, the first thing first."""
Tagged = TypeVar("Tagged", bound=Callable)


def computes(branching: Branching | None = None, attempts: Attempts | None = None) -> Callable[[Tagged], Tagged]:
    """Tag a verifier with its rule: what it emits at a node, or what it tries in turn."""

    def tag(verifier: Tagged) -> Tagged:
        verifier.__dict__.update(branching=branching, attempts=attempts)
        return verifier

    return tag


def branching_of(verifier: Verifier) -> Branching | None:
    """The branching rule that a verifier is tagged with."""
    return getattr(verifier, "branching", None)


def attempts_of(verifier: Verifier) -> Attempts | None:
    """The attempts that a verifier is tagged with."""
    return getattr(verifier, "attempts", None)


# Those of the core, which knows no rules.
computes(lambda target, draft, tokens: np.eye(1, len(target), int(target.argmax()))[0])(greedy)
computes(lambda target, draft, tokens: target)(match)


# What `refuses` of a tag may be.


def all_but_chains(children: Children) -> str | None:
    """Refuse more than one child a node."""
    per_node = getattr(children, "per_node", None)
    chains = per_node == 1 or (isinstance(per_node, tuple) and max(per_node) == 1)
    return None if chains else "judges chains, one child a node"


def all_but_even(children: Children) -> str | None:
    """Refuse trees whose nodes may not have as many children as all others of their depth."""
    per_node = getattr(children, "per_node", None)
    return None if per_node == 1 or isinstance(per_node, tuple) else "judges trees with so many children by depth"
