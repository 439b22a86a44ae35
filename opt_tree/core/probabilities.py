"""From scores to probabilities: the one way, so that two rounds of rounding never make two distributions.

Owns normalisation. Knows nothing of who scored what.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.core.tree import on_host


def log_probs_of(scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return the log-probabilities that scores stand for, in float32 or wider.

    A row of -inf says that nothing is known there, and stays as it is.
    """
    log_probs = scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # Normalising such a row divides nothing by nothing. One column tells whether there is one: its NaN is everywhere.
    if on_host(scores) and not log_probs[:, 0].isnan().any():
        return log_probs
    return log_probs.masked_fill(_unknown(scores), -torch.inf)


def probs_of(scores: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Return the probabilities that scores or log-probabilities stand for, in float64; zeros for a row of -inf.

    Children are drawn from them, and verifiers are told them: both sides have the same numbers.
    """
    probs = scores.softmax(-1, dtype=torch.float64)
    # One column tells whether a row of -inf is among them, as in `log_probs_of`.
    if on_host(scores) and not probs[..., 0].isnan().any():
        return probs
    return probs.masked_fill(_unknown(scores), 0.0)


def _unknown(scores: Float[Tensor, "*rows vocab"]) -> Tensor:
    """Which rows are -inf throughout. Other NaNs are a fault of whoever scored, and stay visible."""
    return scores.isneginf().all(-1, keepdim=True)
