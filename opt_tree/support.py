"""Which models can hold a draft tree, and why the others cannot: what is known before anything is run.

What is not known is probed when a model is wrapped (`opt_tree.lm`). Every refusal is one line with its true cause.
"""

from typing import Any

import torch
from torch import nn

from opt_tree.longrope import Border, border_of


class UnsupportedModelError(ValueError):
    """The model cannot decode a tree exactly; the message says why."""


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a compiled one or one with adapters."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile's wrapper; naming its class would import the compiler
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()
        else:
            return model


def virtual_tokens(model: Any) -> bool:
    """Whether a PEFT model puts trained tokens or rows before the prompt, which a forward of ours would not see."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def check_model(model: Any) -> None:
    """Raise for what is no transformers model, and for what runs one in a way that no row of a tree survives."""
    name = type(model).__name__
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedModelError(f"{name} splits batches, and a tree is a batch of one: wrap its .module")
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{name} has no config: is it an AutoModelForCausalLM?")
    if virtual_tokens(model):
        raise UnsupportedModelError(
            f"{name} puts virtual tokens before the prompt (PEFT {model.active_peft_config.peft_type.value}), which a "
            "tree's forward would not see"
        )
    for module in model.modules():
        if "quantized.dynamic" in type(module).__module__:
            raise UnsupportedModelError(
                f"{name} quantises activations while it runs ({type(module).__name__}): one scale for all rows of a "
                "forward, so a row's logits depend on the rows beside it"
            )


def check_unchanged(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a model that was moved since it was wrapped, or is being trained."""
    weight = model.get_input_embeddings().weight
    if (weight.dtype, weight.device) != (dtype, device):
        was, now = (f"{str(kind).removeprefix('torch.')} on {place}" for kind, place in ((dtype, device), _at(weight)))
        raise UnsupportedModelError(
            f"{type(model).__name__} was {was} when it was wrapped and is {now} now: wrap it again"
        )
    if model.training:
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode, where dropout or gradient checkpointing change its answers: "
            "call eval() on it"
        )


def _at(weight: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return weight.dtype, weight.device


def border(model: Any) -> Border | None:
    """Return where LongRoPE changes its factors, or None; see `opt_tree.longrope`."""
    try:
        return border_of(model)
    except ValueError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot score a tree: {error}") from error


def layer_windows(model: Any) -> dict[str, int]:
    """Return the kinds of attention layers the model has, each with its window (0: none), or refuse it by name."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; draft trees need a decoder-only model")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{name} runs {attention!r} attention, which takes no tree mask; load it with attn_implementation='sdpa'"
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModelError(
            f"{name} uses ALiBi: its biases follow the order of rows, not their positions, so siblings cannot share one"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise UnsupportedModelError(
            f"{name} has local layers, whose window follows the order of rows, not their positions; siblings shift it"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(unknown)}; only attention layers hold a tree"
        )
    return {kind: int(window or 0) if kind == "sliding_attention" else 0 for kind in kinds}
