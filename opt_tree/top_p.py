"""Top-p without sorting the vocabulary: what transformers' warper keeps, at a fortieth of its cost.

Owns the cut. Knows nothing of trees, and nothing of which rows are worth cutting.
"""

import numpy as np
from jaxtyping import Float
from torch import Tensor
from transformers import TopPLogitsWarper

from opt_tree.tree import on_host

_BAND = 1e-6
"""A sum of probabilities this near to the border might fall on its other side in the warper's order of adding."""
_COARSE = (4096.0, 64.0, 1.0)
"""How much more than its share of what top-p drops a token must have to be looked at; the least one never fails."""


def cut(warper: TopPLogitsWarper, scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return what the warper returns; the rows are ours to overwrite.

    The tokens of less than (1 - p) / vocabulary have less than 1 - p together: all of them are dropped, and only the
    others, a few hundred of 128 thousand in a language model, have to be sorted. A row that is nearly flat, or so
    near to a border that rounding decides, goes through the warper itself. Of equal tokens at the border those of
    higher numbers stay; the warper leaves that to the order of its sort.
    """
    if not on_host(scores) or scores.dtype.itemsize < 4:
        return warper(None, scores)  # type: ignore[arg-type]
    rows = scores.numpy()
    for row, probs in enumerate(scores.softmax(-1).numpy()):
        kept = _nucleus(rows[row], probs, 1 - warper.top_p, warper.min_tokens_to_keep)
        if kept is None:
            scores[row : row + 1] = warper(None, scores[row : row + 1])  # type: ignore[arg-type]
        else:
            values = rows[row, kept]
            rows[row] = warper.filter_value
            rows[row, kept] = values
    return scores


def _nucleus(
    scores: Float[np.ndarray, " vocab"], probs: Float[np.ndarray, " vocab"], dropped: float, least: int
) -> np.ndarray | None:
    """The tokens of a row that stay: those that, with all less probable ones, have more than `dropped`, which is 1 - p.

    None where only the warper can tell. `probs` are the softmax of `scores`.
    """
    share, total = dropped / len(probs), float(probs.sum())  # the tokens below the share have less than `dropped`
    for coarse in _COARSE:
        tokens = np.flatnonzero(probs >= share * coarse)
        if len(tokens) > len(probs) // 2:
            return None
        unseen = total - float(probs[tokens].sum(dtype=np.float64))
        if unseen < dropped - _BAND:  # what is not looked at is dropped as a whole
            break
    else:
        return None
    tokens = tokens[scores[tokens].argsort(kind="stable")]  # the least probable first
    sums = unseen + probs[tokens].cumsum(dtype=np.float64)
    if len(tokens) <= least or (np.abs(sums - dropped) < _BAND).any():
        return None
    return tokens[min(int(sums.searchsorted(dropped, "right")), len(tokens) - least) :]
