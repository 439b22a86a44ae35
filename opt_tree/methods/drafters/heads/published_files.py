"""What files of EAGLE heads of every generation have in common: names of tensors, what is left out, what is refused."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from opt_tree.models.checkpoints import CheckpointError, find_file, load_tensors

LENT = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that are the target's where a head's file has none, or holds nothing but NaN (`speculators`)."""
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Settings that a head's config has from its target's: a Llama layer knows no windows."""
_IGNORED = ("verifier_", "rotary_emb.")
"""Parts of names of what a head computes or has from its target: `verifier_norm`, `verifier_lm_head`, `inv_freq`."""


def read_head(path: str) -> dict[str, Tensor]:
    """Read the tensors of a head, a leading `model.` taken off their names, without those that no head here reads.

    CheckpointError for a quantised export, and for two tensors of one name.
    """
    _refuse_quantised(path)
    tensors = load_tensors(path, unfilled=LENT)
    return renamed(path, tensors, {name: name.removeprefix("model.") for name in tensors})


def renamed(path: str, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors under other names, those left out that no head reads. CheckpointError where two get one name."""
    found: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        new = names[old]
        if any(part in new for part in _IGNORED):
            continue
        if new in found:
            twice = [name for name in tensors if names[name] == new]
            raise CheckpointError(f"{path} holds one tensor twice, as {' and as '.join(twice)}")
        found[new] = tensor
    return found


def refuse_windows(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a head's config whose layers see a window of the context, which none does here."""
    kinds = {*(config.get("layer_types") or ["full_attention"])} - {"full_attention"}
    if config.get("use_sliding_window") and config.get("model_type") not in (None, "llama"):
        kinds |= {"sliding_attention"}
    if kinds:
        raise ValueError(f"its layers are of kind {', '.join(sorted(map(str, kinds)))}, in which nothing here drafts")


def _refuse_quantised(path: str) -> None:
    """Raise CheckpointError for weights that some tool packed: `quantization_config`, or ModelOpt's own file."""
    said = _said(path, "hf_quant_config.json").get("quantization")
    method = said.get("quant_algo") if isinstance(said, Mapping) else None
    where = "hf_quant_config.json"
    if method is None and (own := _said(path, "config.json").get("quantization_config")):
        where = "quantization_config"
        method = own.get("quant_algo") or own.get("quant_method") or "unknown" if isinstance(own, Mapping) else own
    if method is not None:
        raise CheckpointError(f"{path} is a quantised export ({where}: {method}): take the head's plain weights")


def _said(path: str, name: str) -> dict[str, Any]:
    """What a JSON file of a checkpoint says; nothing, where it is not there. Whoever needs it says what is wrong."""
    try:
        return dict(json.loads(find_file(path, name).read_text()))
    except (CheckpointError, ValueError, TypeError):
        return {}
