"""Recursive rejection sampling without replacement: distinct children, each against what it was drawn from."""

import itertools

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import in_turn, walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def shrinking(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept child x with probability min(1, p(x) / q(x)); on rejection p becomes norm(p - q)+ and q forgets x.

    arXiv:2402.12374, Alg. 2, but for its end: where q has no tokens left the paper draws among the others uniformly.
    """
    return in_turn(target, tokens, itertools.accumulate(tokens[:-1], without, initial=draft))


def without(draft: Probs, token: int | np.integer) -> Probs:
    """The distribution of the next sibling: the same without the token, renormalised; nothing where nothing is left."""
    rest = draft.copy()
    rest[token] = 0
    total = rest.sum()
    return rest / total if total > 0 else rest


@register(
    "without_replacement",
    about="recursive rejection of distinct children, each against what it was drawn from",
    paper="2402.12374",
)
@valid_for(WithoutReplacement)
@computes(branching=shrinking)
def without_replacement(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Try distinct children in the order they were drawn (Sequoia's verification; RRSw).

    A child that the target likes as little as the drafter thinks is never tried twice, and where all tokens were drawn
    one of them is always accepted. Example, p = (.2, .5, .3), q = (.6, .3, .1), children a, b:

        a against (.2, .5, .3), drawn from (.6, .3, .1): 1/3
        b against (0, .5, .5), drawn from (0, .75, .25): 2/3; then c from (0, 0, 1)
        emitted: (1/3, 4/9, 2/9)

        tree = sequoia_tree(rates, nodes=60, siblings=WithoutReplacement)     # or Sampled, or DySpec
        Decoder(pair.target, pair.drafter, tree, without_replacement).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, shrinking)
