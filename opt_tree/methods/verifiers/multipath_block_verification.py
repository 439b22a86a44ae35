"""Greedy multi-path block verification: one of several drawn paths is chosen, and judged as a whole."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from opt_tree.methods.children.iid import IID
from opt_tree.methods.verifiers.block_verification import along
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Attempt, Probs, all_but_even, computes
from opt_tree.methods.verifiers.walks import Node, below, drafted_from, node_at, walk_up
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for

Counts = Float[np.ndarray, " counts"]
"""The probability of each number, 0 first, up to a common factor."""


def best_path(tree: Tree, logits: Logits) -> Iterator[Attempt]:
    """Attempt the prefixes of the chosen path, the longest first (arXiv:2602.16961).

    From the root the path goes on at the child of the greatest min(1, p(x) / q(x)), the first one drawn of equals. That
    is decided before anything is drawn but for the draws themselves, so the distribution of the chosen path is known
    token by token (`chosen_from`). Block verification is exact for a chain from any distributions: these take the place
    of the drafter's.
    """
    if tree.nodes:
        drafted_from(tree)  # raises where the children were not drawn
    rows, path, nodes = np.zeros(1, dtype=np.int64), [0], list[Node]()
    equal: Counts = np.array([0.0, 1.0])  # how many equal rows the path ends in, given the path alone: one root
    while len(children := below(tree, rows)):
        node = node_at(tree, logits, rows, children)
        ratio = np.divide(node.target, node.draft, out=np.zeros_like(node.target), where=node.draft > 0)
        ratio = np.minimum(ratio, 1).astype(np.float32)  # p = q is 1, however it was rounded
        token = int(node.children[ratio[node.children].argmax()])
        per_row = len(children) // len(rows)  # the same for all rows of a depth
        drawn = np.zeros(per_row * (len(equal) - 1) + 1)
        drawn[::per_row] = equal
        draft, equal = chosen_from(node.draft, ratio, drawn, token)
        nodes.append(node._replace(draft=draft, children=np.array([token])))
        rows = children[node.children == token]
        path.append(int(rows[0]))
    return along(path, [*nodes, node_at(tree, logits, rows, children)])


def chosen_from(draft: Probs, ratio: Float[np.ndarray, " possible"], drawn: Counts, token: int) -> tuple[Probs, Counts]:
    """The distribution of the token that is chosen at a node, and of how many draws carry it if it is `token`.

    `drawn`: how many draws there are, given the path to the node alone. Let a be the drafter's probability of a lesser
    ratio, and c that of a lesser or equal one. Of n draws x is chosen with probability q(x) S_n, where S_n is the sum
    of a^i c^(n - 1 - i): i draws before it are less, those behind it are not greater. With q(x) s in place of q(x) in
    c, the power of s counts those behind it that are x, too. S_(n + 1) = c S_n + a^n is without any difference, so
    nothing cancels, however many paths there are.
    """
    _, which = np.unique(ratio, return_inverse=True)
    upto = np.append(0.0, np.bincount(which, draft).cumsum())
    less, most = upto[which], upto[which + 1]
    law, sums = np.zeros_like(draft), np.ones_like(draft)
    same, others = float(draft[token]), max(float(most[token] - draft[token]), 0.0)
    carrying, behind = np.zeros(len(drawn)), np.ones(1)
    for n in range(1, len(drawn)):
        law += drawn[n] * sums
        carrying[1 : n + 1] += drawn[n] * behind
        sums = most * sums + less**n
        behind = np.convolve(behind, [others, same])
        behind[0] += less[token] ** n
    return draft * law / (draft * law).sum(), carrying / carrying.sum()


@register(
    "multipath_block",
    about="chooses among independent paths by p / q, and judges the chosen one as a whole (GBV)",
    paper="2602.16961",
)
@valid_for(IID, refuses=all_but_even)
@computes(attempts=best_path)
def multipath_block(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Choose the path whose tokens the target likes best against the drafter, and judge it by block verification.

    With one path it is block verification. Of the paper only the abstract, reviews and its authors' code were at hand.
    The path is chosen as that code does it. Its distribution is worked out anew: the code takes equal ratios in the
    order of the tokens, though it chooses the first one drawn, which is not exact. Here it takes any independent draws
    whose number is fixed by depth (`Sampled.kary`, `Sampled.delayed`); the paper's are paths from the root
    (`Sampled.chains`).

    Example, two chains of one token, q = (1/2, 1/2) and p = (1/4, 3/4):

        b has the greater ratio, so a is chosen with probability (1/2)^2: the path comes from (1/4, 3/4), which is p
        whatever is chosen is accepted, where SpecInfer's rule accepts one of the two with probability 7/8

        Decoder(pair.target, pair.drafter, Sampled.chains(3, 5), multipath_block).generate(ids, sampling=Sampling(1.0))
    """
    return walk_up(tree, logits, random, best_path)
