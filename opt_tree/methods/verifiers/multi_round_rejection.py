"""Multi-round speculative sampling: one child after the other, each against what the rejections before it left over."""

import itertools

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import in_turn, walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def in_rounds(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept child x with probability min(1, p(x) / q(x)); on rejection p becomes norm(p - q)+; at the end draw from p.

    arXiv:2305.09781, Alg. 2 (verify_stochastic).
    """
    return in_turn(target, tokens, itertools.repeat(draft))


@register(
    "multi_round",
    about="one child after the other, each against what the rejections before it left over (SpecInfer)",
    paper="2305.09781",
)
@valid_for(IID)
@computes(branching=in_rounds)
def multi_round(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Try the children in the order they were drawn, each against the residual of the ones before it (SpecInfer).

    The paper picks the next child uniformly from those left; independent draws have no order, so taking them as they
    come is the same distribution, and stays exact where a node's number of children depends on what was drawn before.
    Example, p = (.2, .5, .3), q = (.6, .3, .1), children a, b:

        a against (.2, .5, .3): 1/3.   b against (0, .5, .5): 1.   Emitted: (1/3, 2/3, 0).
        (The mean over all nine pairs is p. The two *most probable* children are always a, b: always (1/3, 2/3, 0),
        which is why deterministic children are refused.)

        Decoder(pair.target, pair.drafter, Sampled.kary(2, 4), multi_round).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, in_rounds)
