"""Block verification: judge a chain as a whole instead of token by token."""

from collections.abc import Iterator, Sequence

import numpy as np

from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Attempt, all_but_chains, computes
from opt_tree.methods.verifiers.walks import Node, drafted_from, node_at, residual, walk_up
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def longest_first(tree: Tree, logits: Logits) -> Iterator[Attempt]:
    """Attempt the longest prefix of the chain, then the next shorter one (arXiv:2403.10444, Alg. 2)."""
    if (tree.parents != np.arange(-1, tree.nodes)).any():
        raise ValueError(f"block verification is for chains; got a tree with parents {tree.parents.tolist()}")
    if tree.nodes:
        drafted_from(tree)
    rows = np.arange(len(tree))
    nodes = [node_at(tree, logits, rows[row : row + 1], rows[row + 1 : row + 2]) for row in rows]
    return along(rows.tolist(), nodes)


def along(rows: Sequence[int], nodes: Sequence[Node]) -> Iterator[Attempt]:
    """Block verification of a path, root first: its rows, and each one's node with the next token as its only child.

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)) is the probability that at least i tokens survive; with the excess
    S_i = sum (w_i p - q)+ behind prefix i, h_i = S_i / (S_i + 1 - w_i), and h = w at the end of the path.
    """
    weights = [1.0]
    for node in nodes[:-1]:
        (token,) = node.children
        weights.append(min(1.0, weights[-1] * node.target[token] / node.draft[token]))
    yield Attempt(rows[-1], weights[-1], nodes[-1].target, nodes[-1].tokens)
    for place in range(len(rows) - 2, -1, -1):
        tokens, target, draft, _ = nodes[place]
        excess = np.maximum(weights[place] * target - draft, 0).sum()
        chance = excess / (excess + (1 - weights[place])) if place and excess > 0 else float(place == 0)
        yield Attempt(rows[place], chance, residual(weights[place] * target, draft), tokens)


@register("block", about="judges a chain as a whole instead of token by token", paper="2403.10444")
@valid_for(IID, WithoutReplacement, refuses=all_but_chains)
@computes(attempts=longest_first)
def block(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Accept the longest prefix that passes its own coin; no verifier of a single chain accepts more on average.

    A token that looks bad alone may be kept for what comes behind it. Example, a chain of two, q = (2/3, 1/3) and
    p = (1/3, 2/3) at every node, drafted a, b:

        w = 1, 1/2, min(1, 1/2 * 2) = 1: both are accepted, with certainty
        token by token, a alone would have been rejected half the time

        Decoder(pair.target, pair.drafter, Sampled.chain(6), block).generate(ids, sampling=Sampling(1.0))
    """
    return walk_up(tree, logits, random, longest_first)
