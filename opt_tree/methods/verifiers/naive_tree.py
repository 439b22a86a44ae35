"""Naive tree verification: speculative sampling of the first child, the others only by luck."""

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import residual, walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def first_child(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept the first child x with probability min(1, p(x) / q(x)); otherwise draw from norm(p - q)+.

    arXiv:2211.17192, Alg. 1, at every node. The mean over x ~ q: min(p, q) + (1 - sum min(p, q)) norm(p - q)+ = p.
    """
    first = tokens[0]
    accepted = min(1.0, target[first] / draft[first])
    emitted = (1 - accepted) * residual(target, draft)
    emitted[first] += accepted
    return emitted


@register("naive", about="speculative sampling of the first child, the others only by luck", paper="2211.17192")
@valid_for(IID, WithoutReplacement)
@computes(branching=first_child)
def naive(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Judge the first child by speculative sampling; a rejection's residual draw may still hit one of its siblings.

    NaiveTree in arXiv:2602.16994, table 1; on a chain it is classic speculative sampling. The first child must come
    from q, its siblings from anywhere. Example, p = (.2, .5, .3), q = (.6, .3, .1), children a, b:

        a is accepted with probability .2 / .6 = 1/3; otherwise the draw is from (0, .2, .2) / .4 = (0, .5, .5)
        emitted: (1/3, 1/3, 1/3), so that the walk goes on with probability 2/3: at a, or at b by luck

        Decoder(pair.target, pair.drafter, Sampled.chain(4), naive).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, first_child)
