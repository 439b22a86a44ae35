"""What the target says of a tree, as a function of tensors: the accepted path, and what the next step begins with.

Knows nothing of models, and of who reads it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.backends.tensor_pool import TensorTree
from opt_tree.sampling import noise_from


class TensorVerdict(NamedTuple):
    """What came of a tree."""

    path: Int[Tensor, " path"]
    """The accepted rows, the last one over and over."""
    accepted: Int[Tensor, ""]
    """How many of them were drafted."""
    told: Int[Tensor, " numbers"]
    """See `Left` (tensor_step.py)."""
    emitted: Int[Tensor, " path"]
    """The emitted tokens, the target's own over and over."""
    latest: Int[Tensor, " rows"]
    """Places of the emitted tokens that a drafter may lack next, behind any for padding."""
    facts: Int[Tensor, " facts"]
    """`FACTS` of the next step (tensor_step.py)."""


def judged(
    tree: TensorTree,
    scores: Float[Tensor, "rows vocab"],
    starts: Int[Tensor, " depths"],
    lengths: Int[Tensor, " 2"],
    sizes: tuple[int, int, bool],
) -> TensorVerdict:
    """Judge a tree by the target's own tokens: its argmax, or the draw of `match` where the noise's starts are there.

    Arguments:
        lengths: of both contexts, the drafter's with the rows that it lacked.
        sizes: layers of the tree, how many rows the drafter lacks at most, and whether rows of accepted nodes stay
            with it.
    """
    limit, most, keeps_rows = sizes
    if len(starts):
        noise = noise_from(starts, scores.shape[1])
        choice = (noise[tree.depths] / scores.softmax(-1)).argmin(-1)
    else:
        choice = scores.argmax(-1)
    path, count = tree.walk(choice, limit)
    token, leaf, new = choice[path[-1:]], path[-1:], count[None] + 1
    steps, back = (torch.arange(*ends, device=path.device) for ends in ((0, limit + 1), (-most, 0)))
    emitted = torch.where(steps < count, tree.tokens[torch.cat([path[1:], leaf])], token)
    # A model lacks its own token, and the last node if nothing was drafted below it.
    lacks = (tree.draft_rows[leaf] < 0) + 1 if keeps_rows else new.clamp(max=most)
    told = torch.cat([*tree.told(), path, count[None], token])
    facts = torch.cat([lacks, lengths + new, token, new])
    return TensorVerdict(path, count, told, emitted, (new + back).clamp(min=0), facts)
