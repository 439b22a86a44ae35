"""Recursive rejection for sibling groups of one sampled child among deterministic ones (RheoSampling)."""

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.recursive_rejection import without
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.walks import in_turn, walk_down
from opt_tree.random import Random
from opt_tree.sampling import Logits
from opt_tree.tree import Tree
from opt_tree.verify import Probs, Verdict, valid_for


def by_proposal(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept each child x with probability min(1, p(x) / r(x)), r what it was proposed from; then p = norm(p - r)+.

    The second child was drawn from q without the first; every other one is taken as given, so r is a point mass there.
    """
    proposals = (
        without(draft, tokens[0]) if rank == 1 else np.eye(1, len(target), int(token))[0]
        for rank, token in enumerate(tokens)
    )
    return in_turn(target, tokens, proposals)


@register(
    "rheo",
    about="recursive rejection of one drawn child among the most probable ones (RheoSampling)",
    paper="2609.21827",
)
@valid_for(BestAndDraw, WithoutReplacement, branching=by_proposal)
def rheo(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Try the best token, the one that was drawn, then the others, each against the distribution that proposed it.

    For the trees of arXiv:2609.21827, which judges a group by optimal transport; recursive rejection is exact for the
    same reason and takes what `match` takes of the deterministic ones. Children drawn without replacement may be judged
    like this, too (`without_replacement` accepts more of them). Example, p = (.2, .5, .3), q = (.6, .3, .1), children a
    (certain), c (drawn from (0, .75, .25)):

        a against p: .2.   c against (0, .625, .375): min(1, .375 / .25) = 1, where `match` takes .375 of it
        emitted: (.2, 0, .8); with b for c (.2, .667, .133); and .75 times this plus .25 times that is p

        Decoder(pair.target, pair.drafter, Rheo(nodes=30), rheo).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, by_proposal)
