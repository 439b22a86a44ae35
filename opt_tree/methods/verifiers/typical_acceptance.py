"""Typical acceptance: keep what the target finds plausible. Not lossless; here to be compared with."""

from collections.abc import Iterator

import numpy as np

from opt_tree.children import TopK
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Attempt, computes
from opt_tree.methods.verifiers.walks import target_probs_at, walk_up
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for

EPSILON, DELTA = 0.09, 0.3
"""The paper's epsilon (a hard threshold) and delta (one that falls with the entropy): what the released code generates
with. The paper tries epsilon from 0.01 to 0.25, each with delta its square root."""


def longest_typical(tree: Tree, logits: Logits) -> Iterator[Attempt]:
    """Find the longest path of tokens with p(token) > min(epsilon, delta exp(-H(p))) (arXiv:2401.10774)."""
    target_probs = [target_probs_at(logits, row) for row in range(len(tree))]
    plausible = np.ones(len(tree), dtype=bool)
    for row in range(1, len(tree)):
        parent = tree.parents[row]
        probs = target_probs[parent]
        surprise = -np.log(probs, where=probs > 0, out=np.zeros_like(probs))
        cut = min(EPSILON, DELTA * np.exp(-(probs * surprise).sum()))
        plausible[row] = plausible[parent] and probs[tree.tokens[row]] > cut
    row = int(np.where(plausible, tree.depths, -1).argmax())
    yield Attempt(row, 1.0, target_probs[row])


@register("typical", about="keeps what the target finds plausible (Medusa's rule); not lossless", paper="2401.10774")
@valid_for(TopK, IID, WithoutReplacement, BestAndDraw, lossy=True)
@computes(attempts=longest_typical)
def typical(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Accept the longest path whose every token the target finds plausible, then draw from the target (Medusa).

    The emitted distribution is not the target's: a plausible token is taken whenever it was drafted. The paper takes
    the target's best token behind the path instead of a draw (section 2.3.1), and its released code of equally long
    paths the likeliest, not the first. Example, p = (.2, .5, .3): H = 1.03 nats, the cut is min(.09, .3 * .357) = .09,
    so whatever was drafted is accepted.

        Decoder(pair.target, pair.drafter, OptTree(), typical, lossy=True).generate(ids, sampling=Sampling(0.7))
    """
    return walk_up(tree, logits, random, longest_typical)
