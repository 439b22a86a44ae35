"""What follows the last few tokens, without a forward: a shortcut that a drafter may offer and a policy may take.

A model is asked layer by layer, as a forward over many nodes costs what one over a single node does. A table is asked
node by node, and below nodes of the tree only. The loop knows neither: it hands the one to the other.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from opt_tree.core.pool import CandidatePool
from opt_tree.core.tree import Tree

Tail = tuple[int, ...]
"""The last tokens before the one that is to be drafted, the newest last; shorter where the text is."""


class Continuations(NamedTuple):
    """What a drafter says of a node by its last tokens alone, from some depth on."""

    probs: Callable[[Tail], Mapping[int, float]]
    """From a tail to {token: probability}. They are meant: a mass below 1 stays below 1."""
    order: int
    """How many tokens a tail has."""
    first: int = 0
    """The depth from which on this holds. The drafter is asked layer by layer above."""


@runtime_checkable
class GrowsOverContinuations(Protocol):
    """A policy that grows its tree over continuations by itself: the tree that the loop would grow."""

    def grow(
        self, continuations: Continuations, context: list[int], limit: int, above: CandidatePool | None = None
    ) -> Tree:
        """Return a tree below the last token of `context`, at most `limit` layers deep; `above` is what is there."""
        ...
