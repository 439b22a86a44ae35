"""Traversal verification: judge a tree from its leaves to its root, so that a path counts as a whole."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.recursive_rejection import without
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Attempt, computes
from opt_tree.methods.verifiers.walks import below, drafted_from, node_at, walk_up
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def leaves_first(tree: Tree, logits: Logits) -> Iterator[Attempt]:
    """Attempt the first leaf in depth-first order, delete it, and go on until the root (arXiv:2505.12398).

    w(root) = 1 and w(child x of v) = min(1, w(v) p(x) / q(x)): the probability that the verdict is v or below. When a
    child is deleted, its parent's p becomes the excess (w p - q)+ / S, S its sum, w becomes S / (S + 1 - w), and q
    forgets the child. Nothing above a node changes before its last leaf is deleted: its w is computed on the way down.

    Equal siblings are one node with all their children, in the order in which they first occur.
    """
    if tree.nodes:
        drafted_from(tree)
    yield from _attempts(tree, logits, np.zeros(1, dtype=np.int64), 1.0)


def _attempts(tree: Tree, logits: Logits, rows: Int[np.ndarray, " equal"], weight: float) -> Iterator[Attempt]:
    """The attempts at a node, made of equal rows, and below it."""
    children, root = below(tree, rows), rows[0] == 0
    tokens, target, draft, places = node_at(tree, logits, rows, children)
    while len(children):
        token = places[0]
        equal = places == token
        yield from _attempts(tree, logits, children[equal], min(1.0, weight * target[token] / draft[token]))
        excess = np.maximum(weight * target - draft, 0)
        total = float(excess.sum())
        # No excess at the root: p = q, the child was certain to be accepted, and only rounding leads here.
        weight = 1.0 if root else total / (total + (1 - weight)) if total > 0 else 0.0
        target = excess / total if total > 0 else target
        draft = without(draft, token)
        children, places = children[~equal], places[~equal]
    yield Attempt(int(rows[0]), weight, target, tokens)


@register("traversal", about="judges from the leaves to the root, so that a path counts as a whole", paper="2505.12398")
@valid_for(IID, WithoutReplacement)
@computes(attempts=leaves_first)
def traversal(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Accept the first path that survives, leaves before their parents.

    On a chain it is block verification. Independent draws without their repetitions are draws without replacement, so
    it takes both. Example, p = (.3, .4, .3) and q = (.6, .3, .1) at every node, a below the root and b below a:

        w(a) = .3 / .6 = .5,   w(b) = min(1, .5 * .4 / .3) = .667: accepted as often, where token by token it is .5
        b rejected: .5 p - q has the excess (0, 0, .05), so w(a) = .05 / (.05 + .5) = .091, and p behind a is (0, 0, 1)
        a rejected: p behind the root is (0, .1, .2) / .3, and that is what is drawn from

        Decoder(pair.target, pair.drafter, Sampled.chains(3, 5), traversal).generate(ids, sampling=Sampling(1.0))
    """
    return walk_up(tree, logits, random, leaves_first)
