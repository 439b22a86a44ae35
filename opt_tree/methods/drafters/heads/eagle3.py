"""EAGLE-3: a one-layer head on features of three of the target's layers (arXiv:2503.01840), and its form 3.1.

Owns the head (`Eagle3Head`), the drafter, and both checkpoint layouts, the published one and that of `speculators`.
Pair i of the head's input is (feature of token i, embedding of token i + 1), as in EAGLE-1. `fc` makes the first
feature from three hidden states of the target. Deeper ones are the head's own outputs; nothing asks them to look like
the target's. A norm and an output layer over the draft vocabulary read them. EAGLE-3.1 (arXiv:2605.09992) norms what
goes into `fc`, and passes on the output behind that last norm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from opt_tree.drafter import Drafter
from opt_tree.errors import one_line
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary, trimmed_further
from opt_tree.methods.drafters.heads.eagle import EagleDrafter, lend_embeddings, load_eagle
from opt_tree.methods.drafters.heads.eagle_head import HeadedEagle, OneLayerHead
from opt_tree.methods.drafters.heads.families import refuse_others
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import cast_weights
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, load_named, load_tensors, read_config, refused
from opt_tree.models.output_scaling import Scaling, scaling_of
from opt_tree.models.quantised_layers import rows_of
from opt_tree.models.tensor_parallel import replicated

ENTERED = "eagle_aux_hidden_state_layer_ids"
"""The setting that names the layers a head reads, each by what enters it."""
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
"""Settings of EAGLE-3.1: a norm of each state before `fc`, one of all of them, the last norm inside the recurrence."""
_NESTED = "eagle_config"
"""Under which some checkpoints keep `NORMS`."""
_READERS = ("q_proj", "k_proj", "v_proj")
"""The parts of the attention that read embedding and feature."""


def published_layers(count: int) -> tuple[int, int, int]:
    """Return the layers whose outputs an EAGLE-3 head reads, of `count`: what enters layers 2, count / 2, count - 3."""
    return 1, count // 2 - 1, count - 4


def chosen_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return the layers whose outputs a head reads, None being the usual ones; ValueError unless three of `count`."""
    chosen = tuple(layers or published_layers(count))
    if len(chosen) != 3 or not 0 <= min(chosen) <= max(chosen) < count:
        raise ValueError(f"an EAGLE-3 head reads three of the target's {count} layers, not {chosen}")
    return chosen


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer whose attention reads the normed embedding beside the normed feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        attention, bias = self.self_attn, config.attention_bias
        for name in _READERS:
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, width, bias=bias))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(OneLayerHead):
    """The trainable part, under the published names.

    `embed_tokens.weight`, `fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight` [draft vocabulary, hidden]; with
    `output=False` without the last one: the target's own rows then score. Config beside Llama's: `draft_vocab_size`,
    `target_hidden_size`, `norm_before_residual` (whether the attention's output is added to the normed feature), and
    `NORMS`: with `fc_norm` there are `fc_norm.{0,1,2}.weight`, with `norm_before_fc` there is `input_norm.weight`.
    """

    def __init__(self, config: LlamaConfig, output: bool = True) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.residual_normed = bool(getattr(config, "norm_before_residual", False))
        width = getattr(config, "target_hidden_size", None) or hidden
        of_each, of_all, self.output_normed = (bool(getattr(config, name, False)) for name in NORMS)
        if of_each and of_all:
            raise ValueError("its config sets both fc_norm and norm_before_fc, which norm the same states")
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(3 * of_each))
        self.input_norm = LlamaRMSNorm(3 * width, config.rms_norm_eps) if of_all else nn.Identity()
        self.fc = nn.Linear(3 * width, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        if output:
            columns = getattr(config, "draft_vocab_size", None) or config.vocab_size
            self.lm_head = nn.Linear(hidden, columns, bias=False)

    @property
    def layer(self) -> LlamaDecoderLayer:
        return self.midlayer

    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows wide"], Float[Tensor, "*rows hidden"]]:
        normed = self.midlayer.hidden_norm(features)
        read = torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)
        return read, normed if self.residual_normed else features

    def entered(self, embedded: Float[Tensor, "*rows hidden"]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        projections = [getattr(self.midlayer.self_attn, name) for name in _READERS]
        own, other = torch.cat([each.weight for each in projections]).chunk(2, 1)
        bias = None if projections[0].bias is None else torch.cat([each.bias for each in projections])
        share = F.linear(self.midlayer.input_layernorm(embedded), own, bias)

        def enter(features: Float[Tensor, "*rows hidden"]) -> tuple[Tensor, ...]:
            normed = self.midlayer.hidden_norm(features.to(embedded.dtype))
            parts = (share + F.linear(normed, other)).split([each.out_features for each in projections], -1)
            return *parts, normed if self.residual_normed else features

        return enter

    def fuse(self, states: Sequence[Float[Tensor, "*rows width"]]) -> Float[Tensor, "*rows hidden"]:
        """Return the features that three of the target's hidden states make."""
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        return self.fc(self.input_norm(torch.cat(list(states), -1)))

    def forward(self, *inputs: Any, **more: Any) -> tuple[Float[Tensor, "batch tokens hidden"]]:
        """Return the features of the next tokens, behind the last norm where `norm_output` says so."""
        (hidden,) = super().forward(*inputs, **more)
        return (self.norm(hidden) if self.output_normed else hidden,)

    def read(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Return what the output layer reads of the head's output: it is normed once."""
        return hidden if self.output_normed else self.norm(hidden)


class Eagle3Drafter(EagleDrafter):
    """Drafts with an EAGLE-3 head; rows are kept and run again as `EagleDrafter` does."""

    def __init__(
        self,
        head: Eagle3Head,
        target: CausalLM,
        buckets: Buckets | None = None,
        tokens: Int[Tensor, " columns"] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """`tokens`: the draft vocabulary; None: all tokens. `layers`: those whose outputs it reads; None: the usual."""
        self.features = chosen_layers(layers, target.model.config.get_text_config().num_hidden_layers)
        if head.fc.in_features != 3 * target.hidden:
            raise ValueError(
                f"wrong head for this target: the head reads features {head.fc.in_features // 3} wide, {target.name} "
                f"has {target.hidden}"
            )
        own = getattr(head, "lm_head", None)
        output = own or replicated(target.model.get_output_embeddings())
        if output.weight.shape[1] != head.config.hidden_size:
            raise ValueError(f"wrong head for this target: it is {head.config.hidden_size} wide and has no lm_head")
        if tokens is not None and output.weight.shape[0] != len(tokens):
            output = rows_of(output, tokens)
        scaling = Scaling() if own else scaling_of(target.model)
        self._begin(HeadedEagle(head, output, scaling), target, buckets, tokens)

    def inputs(self, features: Mapping[int, Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens hidden"]:
        head: Any = self.lm.model.base_model
        return head.fuse([features[layer].to(self.lm.device, self.lm.dtype) for layer in self.features])

    def describe(self) -> str:
        return f"EAGLE-3 head {self.name}: {self._size()}"


def load_eagle3(
    path: str, target: CausalLM, buckets: Buckets | None = None, tensors: dict[str, Tensor] | None = None
) -> Eagle3Drafter:
    """Load an EAGLE-3 head in the published layout or in that of `speculators` (`Eagle3Speculator`).

    Weights come to the target's dtype and device. `embed_tokens` and `lm_head` may be absent: then the target's are
    used, of the latter the rows of the draft vocabulary. That one may be `draft_vocabulary.safetensors` beside the
    weights. `tensors`: those of the checkpoint, if they are read already.
    """
    tensors, raw = load_tensors(path) if tensors is None else tensors, read_config(path, "an EAGLE head")
    refuse_others(path, raw)
    if not is_eagle3(tensors):
        raise CheckpointError(f"{path} is no EAGLE-3 head: it has neither midlayer.* nor layers.0.hidden_norm.weight")
    with refused(f"cannot use {path}"):
        config, layers = _understood(raw)
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        tokens = take_vocabulary(tensors, target.vocab)
        lend_embeddings(tensors, target, config.vocab_size)
        columns = getattr(config, "draft_vocab_size", None) or config.vocab_size
        if columns != (config.vocab_size if tokens is None else len(tokens)):
            raise ValueError(f"draft_vocab_size is {columns}, d2t has {'none' if tokens is None else len(tokens)}")
        tokens = trimmed_further(path, tokens, target.vocab)
        head = Eagle3Head(config, "lm_head.weight" in tensors)
        load_named(head, tensors, "it is not an EAGLE-3 head of this config")
        cast_weights(head, target.device, target.dtype).eval().requires_grad_(False)
        return Eagle3Drafter(head, target, buckets, tokens, layers)


def is_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of an EAGLE-3 head, in either layout."""
    return any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in tensors)


def _understood(raw: dict[str, Any]) -> tuple[LlamaConfig, list[int] | None]:
    """Return a head's config and the layers that it names; ValueError for a setting that it cannot follow.

    Layers are named by what enters them. `speculators` puts Llama's words under `transformer_layer_config`, and norms
    before the residual unless told otherwise.
    """
    apart = dict(raw.get(_NESTED) or {})
    if apart.get("use_aux_hidden_state"):  # as every EAGLE-3 head does
        del apart["use_aux_hidden_state"]
    if foreign := [f"{_NESTED}.{name}" for name in apart if name not in NORMS]:
        raise ValueError(f"its config sets {', '.join(foreign)}, which is not understood")
    raw = {**apart, **raw}
    entered = raw.get(ENTERED)
    layers = None if entered is None else [layer - 1 for layer in entered]
    if (nested := raw.get("transformer_layer_config")) is not None:
        own = dict(nested) | {"norm_before_residual": raw.get("norm_before_residual", True)}
        own |= {name: raw[name] for name in ("draft_vocab_size", "target_hidden_size", *NORMS) if name in raw}
        own["num_hidden_layers"] = own.get("num_hidden_layers", 1)
    else:
        own = dict(raw)
    own = {key: value for key, value in own.items() if key not in ("architectures", "model_type", ENTERED, _NESTED)}
    try:
        return LlamaConfig(**own), layers
    except Exception as error:  # strict configs raise errors of their own kind
        raise ValueError(f"its config is not one of a Llama layer: {one_line(error)}") from error


@register(
    "eagle", about="an EAGLE head of this target; which EAGLE, its tensors tell", paper="2401.15077", part="eagle"
)
def _load_either(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    tensors = load_tensors(path)
    load = load_eagle3 if is_eagle3(tensors) else load_eagle
    return load(path, feature_target(target), options.buckets, tensors)


@register(
    "eagle3", about="an EAGLE-3 or EAGLE-3.1 head of this target, and nothing else", paper="2503.01840", part="eagle3"
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_eagle3(path, feature_target(target), options.buckets)
