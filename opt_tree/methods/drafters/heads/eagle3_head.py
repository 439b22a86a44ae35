"""The network of an EAGLE-3 head (arXiv:2503.01840) and of its form 3.1 (arXiv:2605.09992), under the published names.

Pair i of its input is (feature of token i, embedding of token i + 1), as in EAGLE-1. `fc` makes the first feature from
hidden states of the target. Deeper ones are the head's own outputs; nothing asks them to look like the target's. A norm
and an output layer over the draft vocabulary read them. EAGLE-3.1 norms what goes into `fc`, and passes on the output
behind that last norm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from opt_tree.methods.drafters.heads.eagle_head import FeatureHead, head_layer

NORMS = ("fc_norm", "norm_before_fc", "norm_output")
"""Settings of EAGLE-3.1: a norm of each state before `fc`, one of all of them, the last norm inside the recurrence."""
_READERS = ("q_proj", "k_proj", "v_proj")
"""The parts of the attention that read embedding and feature."""


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer whose attention reads the normed embedding beside the normed feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        self.self_attn = head_layer(config, 0).self_attn
        attention, bias = self.self_attn, config.attention_bias
        for name in _READERS:
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, width, bias=bias))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(FeatureHead):
    """The trainable part, under the published names.

    `embed_tokens.weight`, `fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight` [draft vocabulary, hidden]; with
    `output=False` without the last one: the target's own rows then score. Config beside Llama's: `draft_vocab_size`,
    `target_hidden_size`, `norm_before_residual` (whether the attention's output is added to the normed feature), and
    `NORMS`: with `fc_norm` there are `fc_norm.{0,1,2}.weight`, with `norm_before_fc` there is `input_norm.weight`. And
    ModelOpt's `use_input_layernorm_in_first_layer` and `use_last_layernorm`: false leaves these norms out. `states`:
    how many of the target's states `fc` reads, 3 unless told otherwise. With `use_aux_hidden_state` false there is no
    `fc`: the layer reads the target's last state behind its norm. `num_hidden_layers` above 1: stock layers behind
    `midlayer`, called `layers.1` and on. With `masks`, `mask_hidden` [1, 1, states * width] stands for the
    target's states beside a mask (P-EAGLE).
    """

    def __init__(self, config: LlamaConfig, output: bool = True) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.residual_normed = bool(getattr(config, "norm_before_residual", False))
        width = getattr(config, "target_hidden_size", None) or hidden
        of_each, of_all, self.output_normed = (bool(getattr(config, name, False)) for name in NORMS)
        if of_each and of_all:
            raise ValueError("its config sets both fc_norm and norm_before_fc, which norm the same states")
        self.states = int(getattr(config, "states", 3)) if getattr(config, "use_aux_hidden_state", True) else 0
        if not self.states and (of_each or of_all):
            raise ValueError("its config norms states before fc, and sets use_aux_hidden_state to False: it has no fc")
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(self.states * of_each))
        self.input_norm = LlamaRMSNorm(self.states * width, config.rms_norm_eps) if of_all else nn.Identity()
        if self.states:
            self.fc = nn.Linear(self.states * width, hidden, bias=False)
        if getattr(config, "masks", False):
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.states * width))
        self.midlayer = Eagle3Layer(config)
        numbers = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(number): head_layer(config, number) for number in numbers})
        if not getattr(config, "use_input_layernorm_in_first_layer", True):
            self.midlayer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        last = getattr(config, "use_last_layernorm", True)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps) if last else nn.Identity()
        if output:
            columns = getattr(config, "draft_vocab_size", None) or config.vocab_size
            self.lm_head = nn.Linear(hidden, columns, bias=False)

    @property
    def layer(self) -> LlamaDecoderLayer:
        return self.midlayer

    @property
    def deeper(self) -> Sequence[nn.Module]:
        return list(self.layers.values())

    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows wide"], Float[Tensor, "*rows hidden"]]:
        normed = self.midlayer.hidden_norm(features)
        read = torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)
        return read, normed if self.residual_normed else features

    def entered(self, embedded: Float[Tensor, "*rows hidden"]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        self.check_unrolled()
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
        """Return the features that the target's hidden states make, in the order of `fc`'s columns."""
        if not self.states:
            return states[0]
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        return self.fc(self.input_norm(torch.cat(list(states), -1)))

    def of_mask(self) -> Float[Tensor, " hidden"]:
        """Return the feature that a mask carries."""
        return self.fuse(self.mask_hidden[0, 0].chunk(self.states))

    def forward(self, *inputs: Any, **more: Any) -> tuple[Float[Tensor, "batch tokens hidden"]]:
        """Return the features of the next tokens, behind the last norm where `norm_output` says so."""
        (hidden,) = super().forward(*inputs, **more)
        return (self.norm(hidden) if self.output_normed else hidden,)

    def read(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Return what the output layer reads of the head's output: it is normed once."""
        return hidden if self.output_normed else self.norm(hidden)
