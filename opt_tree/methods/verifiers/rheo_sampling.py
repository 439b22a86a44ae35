"""A group of one drawn child among deterministic ones, the drawn one judged first (RheoSampling)."""

import itertools

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.recursive_rejection import without
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import in_turn, walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def by_proposal(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept each child x with probability min(1, p(x) / r(x)), r what it was proposed from; then p = norm(p - r)+.

    The second child was drawn from q without the first, and is tried before it; every other one is taken as given, so
    r is a point mass there.
    """
    drawn, given = tokens[1:2], np.delete(tokens, slice(1, 2))
    laws = (without(draft, tokens[0]) for _ in drawn)
    points = (np.eye(1, len(target), int(token))[0] for token in given)
    return in_turn(target, np.append(drawn, given), itertools.chain(laws, points))


@register(
    "rheo",
    about="one drawn child, then the most probable ones, each against what proposed it (RheoSampling)",
    paper="2609.21827",
)
@valid_for(BestAndDraw, WithoutReplacement)
@computes(branching=by_proposal)
def rheo(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Try the one that was drawn, then the best token, then the others, each against the distribution that proposed it.

    RheoVerification of arXiv:2609.21827, by two summaries of its text. In this order the best token and a draw are
    accepted with p(best) + sum min(p, q without the best), which no order and no transport passes. Children drawn
    without replacement may be judged like this, too (`without_replacement` accepts more of them). Example,
    p = (.2, .5, .3), q = (.6, .3, .1), children a (certain), c (drawn from (0, .75, .25)):

        c against p: min(1, .3 / .25) = 1, so it is emitted: (0, 0, 1)
        b for c: .5 / .75, then a against (.8, 0, .2): (.267, .667, .067); and .75 times this plus .25 times that is p

        Decoder(pair.target, pair.drafter, Rheo(nodes=30), rheo).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, by_proposal)
