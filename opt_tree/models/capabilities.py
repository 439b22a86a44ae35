"""Which models can hold a draft tree, and why the others cannot: what is known before anything is run.

What is not known is probed when a model is wrapped (`opt_tree.models.causal_lm`). Every refusal is one true line.
"""

import inspect
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from opt_tree.backends.recurrent_layers import limits_steps, recurrent_layers
from opt_tree.errors import UnsupportedModelError, one_line
from opt_tree.models.quantised_layers import columns_of, count_of, readable_weight, weights_of

Module = TypeVar("Module", bound=nn.Module)
_RECURRENT = "one running state for the whole text, where siblings need one each and rejected rows cannot be taken out"
_STATEFUL = {"linear_attention", "hybrid"}
"""Kinds of layers with a running state; the second has attention, too."""
_OWN_PAST = "it takes a cache class of its own only"
_PAST = {
    "cpmant": "it puts a soft prompt of its own before the rows of every forward, also behind a cache",
    "minimax": _OWN_PAST,
    "prophetnet": "where there is a cache, its code takes one token at a time",
    "xlstm": _OWN_PAST,
}
"""Why types of model do not go on from a cache, where their own errors do not say so."""
TREE_ATTENTION = ("sdpa", "eager")
"""Implementations that take any mask."""
_NUMBERED = "it numbers the rows by itself, and siblings of a tree need the same position"


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a compiled one or one with adapters."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile's wrapper; naming its class would import the compiler
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()
        else:
            return model


def end_tokens(*sources: Any) -> frozenset[int]:
    """Return the end tokens that generation configs and tokenizers name (`eos_token_id`): one, a list or none."""
    named = [getattr(source, "eos_token_id", None) for source in sources]
    lists = [one if isinstance(one, (list, tuple)) else [] if one is None else [one] for one in named]
    return frozenset(token for some in lists for token in some)


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
        kind = model.active_peft_config.peft_type.value
        raise UnsupportedModelError(
            f"{name} puts virtual tokens before the prompt (PEFT {kind}), which no tree's row sees"
        )
    for module in model.modules():
        if "quantized.dynamic" in type(module).__module__:
            raise UnsupportedModelError(
                f"{name} quantises activations while it runs ({type(module).__name__}): one scale for all rows of a "
                "forward, so a row's logits depend on the rows beside it"
            )
    readable_weight(model.get_input_embeddings(), "input layer")


def check_unchanged(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a model that was moved since it was wrapped, or is being trained."""
    weight, name = readable_weight(model.get_input_embeddings(), "input layer"), type(model).__name__
    if (found := (weight.dtype, weight.device)) != (dtype, device):
        was, now = (f"{str(kind).removeprefix('torch.')} on {place}" for kind, place in ((dtype, device), found))
        raise UnsupportedModelError(f"{name} was {was} when it was wrapped and is {now} now: wrap it again")
    attention = model.config.get_text_config()._attn_implementation
    if attention not in TREE_ATTENTION:
        raise UnsupportedModelError(
            f"{name} was switched to {attention!r} attention since it was wrapped, which takes no tree "
            "mask: wrap it again"
        )
    if model.training:
        raise UnsupportedModelError(
            f"{name} is in training mode, where dropout or gradient checkpointing change its answers: call eval() on it"
        )


def check_layers(model: Any) -> None:
    """Raise for a model some of whose layers cannot hold a tree, as its config and its class say."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; draft trees need a decoder-only model")
    attention = config._attn_implementation
    if attention not in TREE_ATTENTION:
        other = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        raise UnsupportedModelError(
            f"{name} runs {attention!r} attention, which takes no tree mask; load it with attn_implementation={other!r}"
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
    stateful = {number for number, kind in enumerate(kinds) if kind in _STATEFUL}
    follow = stateful == set(recurrent_layers(model)) != set()
    held = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"} | (_STATEFUL if follow else set())
    if unknown := sorted(set(kinds) - held):
        recurrent = {"linear_attention", "mamba", "conv", "recurrent", "rglru"} & set(unknown)
        why = _RECURRENT if recurrent else "only full, windowed and chunked attention are known to hold a tree"
        raise UnsupportedModelError(f"{name} has layers of kind {', '.join(unknown)}: {why}")
    if getattr(model, "_is_stateful", False) and not follow:
        raise UnsupportedModelError(f"{name} is recurrent: {_RECURRENT}")
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise UnsupportedModelError(f"{name} keeps its past in a form of its own, not in rows that can be taken back")
    if isinstance(plain := unwrapped(model), PreTrainedModel) and not cache_name(plain):
        raise UnsupportedModelError(f"{name} takes no key/value cache, so every forward begins with the first token")
    if not _takes_positions(model):
        raise UnsupportedModelError(f"{name} takes no position_ids: {_NUMBERED}")


def check_steps(model: Any) -> None:
    """Raise for state spaces (Mamba 2) that limit their time step: only where several tokens run at once.

    That is transformers' own code. `generate` runs token by token behind a prompt, so its text is not that of chains.
    """
    for module in model.modules():
        if limits_steps(module):
            low, high = module.time_step_limit
            raise UnsupportedModelError(
                f"{type(model).__name__} limits its time step ({low:g} to {high:g}) where several tokens run at once, "
                "but not token by token, as generate runs it"
            )


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What transformers calls a cache: since 5.24, before, and before in some state spaces."""


def cache_name(model: Any) -> str | None:
    """By what name the forward of a bare model takes a transformers cache; None: it takes none."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def _takes_positions(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def logits_per_row(model: Any) -> int:
    """Return the number of logits a row, or refuse a model without an output layer."""
    if (output := model.get_output_embeddings()) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output layer: is it an AutoModelForCausalLM?")
    return columns_of(output)


def key_limit(model: Any) -> int | None:
    """Return how many keys a forward may have for rows to be independent of later ones; None: any number."""
    config = model.config.get_text_config()
    return int(config.keep_window_size) if config.model_type == "doge" else None


def past_fault(model: Any, error: Exception) -> str:
    """Why a model fails that goes on from a cache: what is known of its type, else its own error."""
    return _PAST.get(model.config.model_type) or one_line(error)


def cast_weights(module: Module, device: torch.device, dtype: torch.dtype) -> Module:
    """Move a module to this device, and its weights to this dtype. What no checkpoint holds keeps its own dtype.

    Those are rotary frequencies: rounded to bfloat16 they turn far rows by other angles than in training.
    """
    own = [(part, name) for part in module.modules() for name in part._non_persistent_buffers_set]
    kept = [(part, name, getattr(part, name).to(device)) for part, name in own]
    module.to(device, dtype)
    for part, name, buffer in kept:
        setattr(part, name, buffer)
    return module


def size_of(module: nn.Module, dtype: torch.dtype | None = None) -> str:
    """Parameters and, where it is given, dtype, for a reader."""
    said = [f"{count_of(module) / 1e6:.1f} M parameters", *([str(dtype).removeprefix("torch.")] if dtype else [])]
    return ", ".join([*said, weights] if (weights := weights_of(module)) else said)


_LATER = "its rows see later ones, so it is no decoder (an encoder? is_decoder=False in its config?)"


def plain_logits(model: Any, tokens: list[int], **options: Any) -> torch.Tensor:
    """Return the logits of a forward without a cache, `[tokens, vocab]`, in float64."""
    ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    return model(input_ids=ids, use_cache=False, **options).logits[0].double()


def sees_later(model: Any, ids: list[int]) -> str | None:
    """Change the last token of `ids`, and say so where that moves an earlier row, or where there is no telling.

    Both forwards have one shape, so that a decoder's rounding is the same or nearly so in both.
    """
    last = next(token for token in ids if token != ids[-1])
    one, other = (plain_logits(model, tokens)[:-1] for tokens in (ids, [*ids[:-1], last]))
    if one.isnan().any():
        half = "float16 ends at 65,504: load it in bfloat16 or float32" if model.dtype == torch.float16 else ""
        return f"its logits are not numbers ({half or 'nor are its weights?'})"
    fine = model.dtype in (torch.float32, torch.float64)
    return None if (one - other).abs().max() <= (1e-5 if fine else 1e-3) * one.abs().max() else _LATER


def cause(model: Any, ids: list[int]) -> str | None:
    """Ask a model whose tree logits are wrong for the reason, by plain forwards; None: it ignores the mask."""

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        return not (one - other).abs().max() <= 1e-3 * one.abs().max()

    try:
        whole = plain_logits(model, ids)
        if later := sees_later(model, ids):
            return later
        rows = torch.arange(len(ids), device=whole.device)[None]
        counted = plain_logits(model, ids, position_ids=rows)
        if not differ(plain_logits(model, ids, position_ids=3 * rows), counted):
            return f"position_ids change nothing: {_NUMBERED}"
        if differ(counted, whole):
            return "it does not count positions from 0 (an offset for padding?), so those of a tree would be wrong"
    except Exception as error:
        return one_line(error)
    return None
