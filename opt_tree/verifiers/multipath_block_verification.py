"""Greedy multi-path block verification: one of several drawn paths is chosen, and judged as a whole."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from opt_tree.core.children import IID
from opt_tree.core.random import Random
from opt_tree.core.sampling import Logits
from opt_tree.core.tree import Tree
from opt_tree.verifiers.base import Attempt, Node, Probs, Verdict, below, drafted_from, node_at, valid_for, walk_up
from opt_tree.verifiers.block_verification import along
from opt_tree.verifiers.registry import register


class Turn(NamedTuple):
    """What was drawn at a node of the chosen path."""

    lower: float
    """The drafter's probability of a token that ranks below the chosen one."""
    same: float
    """Its probability of the chosen one."""
    width: int
    """How many children each such node has."""


def best_path(tree: Tree, logits: Logits) -> Iterator[Attempt]:
    """Attempt the prefixes of the greatest path, the longest first (arXiv:2602.16961).

    Paths are ordered from the root by p(x) / q(x) of their tokens, the greater token of equal ones. The order is fixed
    before anything is drawn, so the distribution of the greatest path is known, token by token: `skewed`. Block
    verification is exact for a chain from any distributions, so it is with these in place of the drafter's.
    """
    if tree.nodes:
        drafted_from(tree)
    rows, path, nodes, above = np.zeros(1, dtype=np.int64), [0], list[Node](), list[Turn]()
    while len(children := below(tree, rows)):
        node = node_at(tree, logits, rows, children)
        ratio = np.divide(node.target, node.draft, out=np.zeros_like(node.target), where=node.draft > 0)
        order = ratio.astype(np.float32).argsort(kind="stable")  # the rounding of p = q orders nothing
        ranks = order.argsort()
        chosen = node.children[ranks[node.children].argmax()]
        lower = np.append(0.0, node.draft[order].cumsum())[ranks]
        turn = Turn(float(lower[chosen]), float(node.draft[chosen]), len(children) // len(rows))
        nodes.append(node._replace(draft=skewed(node.draft, lower, turn.width, above), children=np.array([chosen])))
        above.append(turn)
        rows = children[node.children == chosen]
        path.append(int(rows[0]))
    return along(path, [*nodes, node_at(tree, logits, rows, children)])


def skewed(draft: Probs, lower: Float[np.ndarray, " possible"], width: int, above: list[Turn]) -> Probs:
    """The distribution of the greatest path's next token, given its tokens `above`.

    F(t), the probability that no drawn path is greater than the one through the turns above to a token with cumulative
    probability t, is a nest of powers: t^width at this node, (lower + same * F)^width at each one above. A token x is
    the next with a probability in proportion to F(lower(x) + q(x)) - F(lower(x)). Each power's difference is its
    argument's difference times a sum of positive products, so that nothing cancels, however many paths there are.
    """
    change, high, low = draft, lower + draft, lower
    change, high, low = _powers(change, high, low, width)
    for turn in reversed(above):
        high, low = turn.lower + turn.same * high, turn.lower + turn.same * low
        change, high, low = _powers(change, high, low, turn.width)
    return change / change.sum()


def _powers(change: Probs, high: Probs, low: Probs, width: int) -> tuple[Probs, Probs, Probs]:
    """The change between two powers, up to a factor that all tokens share, and the powers."""
    grown = sum((high**k * low ** (width - 1 - k) for k in range(width)), np.zeros_like(high))
    return change * grown, high**width, low**width


@register(
    "multipath_block",
    about="judges the path of the greatest p / q among independent ones as a whole (GBV)",
    paper="2602.16961",
)
@valid_for(IID, attempts=best_path, even_only=True)
def multipath_block(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Choose the path whose tokens the target likes best against the drafter, and judge it by block verification.

    With one path it is block verification. The paper's drafts are independent paths from the root, `Sampled.chains`.
    The nest of powers is this library's form of the paper's K-th powers: it takes any independent draws whose number is
    fixed by depth (`Delayed`, `Sampled.kary`), and no K is too large for it. Ties are broken by the token, which makes
    the order strict; the rest of the paper's text could not be had, only its abstract and its authors' code.

    Example, two chains of one token, q = (1/2, 1/2) and p = (1/4, 3/4):

        b ranks above a, so a is chosen with probability (1/2)^2 only: the path comes from (1/4, 3/4), which is p
        whatever is chosen is accepted, where SpecInfer's rule accepts one of the two with probability 7/8

        Decoder(pair.target, pair.drafter, Sampled.chains(3, 5), multipath_block).generate(ids, sampling=Sampling(1.0))
    """
    return walk_up(tree, logits, random, best_path)
