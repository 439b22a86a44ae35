"""Sample and match: one draw from the target's law at every node, shared by all paths through it.

Exact for every tree that does not depend on the draws, deterministic ones above all: the emitted token is the target's
own draw, whatever was drafted (NSS in arXiv:2602.16994, table 1; the sampling mode of arXiv:2406.17276).
"""

from jaxtyping import Float
from torch import Tensor

from opt_tree.sampling import Random, TopK
from opt_tree.tree import Tree, fetch
from opt_tree.verifiers.base import Verdict, follow, valid_for


@valid_for(TopK)
def match(tree: Tree, scores: Float[Tensor, "rows vocab"], random: Random) -> Verdict:
    """Draw the target's next token at every node and follow the draws. One read-back.

    Acceptance at a node is the target's mass on its children: P(accept) = sum of p over them.
    """
    (choice,) = fetch(random.draw(scores.softmax(-1), tree.depths))
    return follow(tree, choice)
