"""Sample and match: one draw from the target's distribution at every node, shared by all paths through it.

Exact for every tree that does not depend on the draws: the emitted token is the target's own draw, whatever was drafted
and however. It is NSS in table 1 of arXiv:2602.16994, which has it from SpecInfer (arXiv:2305.09781), and OPT-Tree's
sampling mode (arXiv:2406.17276). The only one that is exact for deterministic children.
"""

import numpy as np
from jaxtyping import Float, Int

from opt_tree.core.children import IID, BestAndDraw, TopK, WithoutReplacement
from opt_tree.core.random import Random
from opt_tree.core.sampling import LazyLogits, Logits
from opt_tree.core.tree import Tree, fetch
from opt_tree.verifiers.base import Probs, Verdict, follow, valid_for
from opt_tree.verifiers.registry import register


def _as_target(target: Probs, draft: Float[np.ndarray, " any"], tokens: Int[np.ndarray, " children"]) -> Probs:
    return target


@register(
    "match",
    about="draws the target's token at every node and follows the draws; exact for every tree",
    paper="2305.09781",
)
@valid_for(TopK, IID, WithoutReplacement, BestAndDraw, branching=_as_target)
def match(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Draw the target's next token at every node and follow the draws. One read-back.

    Acceptance at a node is the target's mass on its children: P(accept) = sum of p over the distinct ones. Example,
    p = (.2, .5, .3): the children a, c are hit with probability .5, by q = (.6, .3, .1) or by anything else.
    """
    if isinstance(logits, LazyLogits):
        return follow(tree, lambda row: int(random.draw(logits[row].softmax(-1)[None], tree.depths[row : row + 1])))
    (choice,) = fetch(random.draw(logits.softmax(-1), tree.depths))
    return follow(tree, choice.tolist().__getitem__)
