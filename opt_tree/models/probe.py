"""The probe: whether a model's rows over a small tree are those of plain forwards, before anybody relies on it."""

from typing import Any

import numpy as np
import torch

from opt_tree.backends.recurrent import all_limited
from opt_tree.errors import UnsupportedModelError, one_line
from opt_tree.models.capabilities import cause, plain_logits
from opt_tree.models.quantised_layers import weights_of
from opt_tree.target import Work
from opt_tree.tree import Tree


@torch.inference_mode()
def check_tree_mask(lm: Any) -> None:
    """Compare a small tree with plain causal forwards, commit a branch, go on from it; refuse what differs.

    The yardstick is how far the logits move when siblings do see each other, at the same positions: a model that
    ignores the mask is off by exactly that, rounding by a small part of it.
    """
    name = type(lm.model).__name__
    window = max(lm.windows.values(), default=0)
    length = min(window + 3 if 0 < window <= 128 else 4, lm.max_context - 8)
    ids = [(7 * i + 3) % lm.vocab for i in range(length + 6)]
    context, (r, a, b, c, d, e) = ids[:length], ids[length:]

    try:
        with all_limited(lm.cache):
            left, right = (plain_logits(lm.model, [*context, r, *more]) for more in ((a, c), (b, d, e)))
            left, right = left[-3:], right[-4:]
            lm.append(context)
            tree = Tree.of([r, a, b, c, d], [-1, 0, 0, 1, 2])
            mixed = lm.extend(tree.tokens, lm.length + tree.depths, np.tri(5, dtype=bool)).logits.double().clone()
            rows = lm.score(tree).logits.double()
            expected = torch.stack([left[0], left[1], right[1], left[2], right[2]])
            yardstick = (expected - mixed).abs().max()
            error = (rows - expected).abs().max()
            lm.commit([0, 2, 4])
            after = lm.extend(np.array([e]), np.array([lm.length]), np.ones((1, 1), dtype=bool)).logits.double()
            error = max(error, (after[0] - right[3]).abs().max())
    except Exception as why:
        told = cause(lm.model, ids) or one_line(why)
        raise UnsupportedModelError(f"{name} cannot score a tree: {told}") from why
    finally:
        lm.reset()
        lm.work = Work()
    share = 0.02 if lm.dtype in (torch.float32, torch.float64) and weights_of(lm.model) is None else 0.3
    if not error <= share * yardstick:
        if known := cause(lm.model, ids):
            raise UnsupportedModelError(f"{name} cannot score a tree: {known}")
        raise UnsupportedModelError(
            f"{name} does not honour a tree mask with {lm.model.config.get_text_config()._attn_implementation!r} "
            f"attention: its logits over a small tree differ from plain forwards by {error:.2g} (a mask ignored: "
            f"{yardstick:.2g})"
        )
