"""How far a model can count: the positions it tells apart, and where its context ends before they do."""

from typing import Any

_WIDENING = ("linear", "yarn")
"""Rotary positions that are pressed together by one factor, the same at every length of a text."""


def positions_of(config: Any) -> int:
    """Return how many positions a model of this config tells apart: what it was trained on, widened where it says so.

    `max_position_embeddings` is what a model was trained on in checkpoints that a linear `rope_scaling` was added to
    (vicuna-7b-v1.5-16k: 4,096 times 4); in others it is the widened number already. YaRN names both. Of layers that
    differ the least counts. What changes with the length of a text ("dynamic") widens nothing here.
    """
    limit = getattr(config, "max_position_embeddings", None) or 0
    if limit <= 0:  # -1 stands for none
        return 1 << 30

    def widened(kind: dict[str, Any]) -> int:
        if kind.get("rope_type") not in _WIDENING:
            return limit
        return max(limit, int((kind.get("factor") or 1) * (kind.get("original_max_position_embeddings") or limit)))

    return min(widened(kind) for kind in _rope_kinds(config))


def rope_border(model: Any) -> int | None:
    """Return the first position that takes the long factors of LongRoPE; None for a model of another `rope_type`.

    transformers rotates all rows of a forward by one set of factors, as the largest position in it says
    (`modeling_rope_utils.dynamic_rope_update`): a tree that reached across would rotate its first rows wrongly.
    """
    kinds = _rope_kinds(model.config.get_text_config())
    positions = [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(positions, default=None)


def context_limit(model: Any) -> tuple[int, str]:
    """Return how many tokens of context the model can be given; and, for a message, why not all it has positions for.

    Behind the ends that are named here transformers disagrees with itself: with a cache, and without.
    """
    config = model.config.get_text_config()
    limit = positions_of(config)
    if (first_long := rope_border(model) or limit + 1) <= limit:
        return first_long, " (LongRoPE: the factors of its positions change there)"
    if config.model_type == "moshi" and config.sliding_window < limit:
        return config.sliding_window, " (its window: behind it a cache changes its answers)"
    if (chosen := _chosen_keys(config)) < limit:
        return chosen, " (keys its index chooses: behind them the choice changes with the tokens of a forward)"
    return limit, ""


def _chosen_keys(config: Any) -> int:
    """Return the longest context whose keys an indexer all chooses (`index_topk`); without indexers there is no end.

    Behind it an index leaves keys out. Its scores are sums of ReLUs: many are 0, and which of equal keys `topk` takes
    depends on the shape of the forward. So one text gets other logits token by token than several tokens at once.
    """
    kinds, ends = set(getattr(config, "layer_types", None) or ()), [1 << 30]
    if "indexed_attention" in kinds:
        ends.append(getattr(config, "index_topk", None) or config.indexer_budget)
    if (kind := "compressed_sparse_attention") in kinds:  # DeepSeek V4: of rows that stand for several tokens each
        ends.append(config.index_topk * config.compress_rates[kind])
    if "minimax_m3_sparse" in kinds:
        ends.append(config.index_topk_blocks * config.index_block_size)
    return int(min(ends))


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    """Return a config's settings of rotary positions: one set for all layers, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [kind for kind in rope.values() if isinstance(kind, dict)]
    return nested or [rope]
