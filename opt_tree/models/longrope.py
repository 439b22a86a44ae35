"""LongRoPE: the position at which a model changes its rotary factors, and what it does with its cache there.

transformers rotates all rows of a forward by the short factors, or all by the long ones, as the largest position in it
says (`modeling_rope_utils.dynamic_rope_update`). A tree that reached across would rotate its first rows wrongly. Knows
no tree and no cache.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Border:
    """Where the factors change."""

    position: int
    """The first position that takes the long factors."""
    drops_cache: bool
    """Whether the model runs the whole context anew with the long factors when it gets there (Phi-3), or goes on behind
    rows that keep the short ones (Llama)."""


class _Filled:
    """A cache that says how long it is, and nothing else."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def border_of(model: Any) -> Border | None:
    """Return the border of a model whose `rope_type` is "longrope"; None for every other model.

    Raises ValueError where its layers have several.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *rope.values()]  # one set for all layers, or one for each kind of layer
    positions = {
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if isinstance(kind, dict) and kind.get("rope_type") == "longrope"
    }
    if not positions:
        return None
    if len(positions) > 1:
        raise ValueError(f"its layers change their rotary factors at several positions: {sorted(positions)}")
    (position,) = positions
    return Border(position, _drops_cache(model, position))


def _drops_cache(model: Any, position: int) -> bool:
    """Ask the model itself: at the border `prepare_inputs_for_generation` hands the cache on, or does not."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        return False
    ids = torch.zeros(1, position + 1, dtype=torch.long)
    inputs = model.prepare_inputs_for_generation(ids, past_key_values=_Filled(position), use_cache=True)
    return inputs.get("past_key_values") is None
