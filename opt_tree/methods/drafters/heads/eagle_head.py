"""The networks of EAGLE heads: Llama layers on features, under the published names, and an output layer behind them.

Owns what EAGLE-1/2 and EAGLE-3 heads have in common, the head of EAGLE-1/2 (`EagleHead`, arXiv:2401.15077), and how
tensors get into a head. Pair i of its input is (feature of token i, embedding of token i + 1); its output estimates the
feature of token i + 1, to which the target's own output layer is applied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from opt_tree.backend import cache_argument
from opt_tree.models.checkpoints import load_named
from opt_tree.models.output_scaling import Scaling
from opt_tree.models.quantised_layers import home_of


class FeatureHead(nn.Module, ABC):
    """What EAGLE heads have in common: an embedding, rotary positions, and a Llama layer on features.

    A subclass adds its own tensors under their published names, and says what the layer reads. Layers behind it are
    stock ones. With `qk_norm` in the config queries and keys are normed head by head, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.num_hidden_layers < 1:
            raise ValueError(f"an EAGLE head has a layer, this config has {config.num_hidden_layers}")
        if config._attn_implementation_internal is None:
            config._attn_implementation = "sdpa"
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    @abstractmethod
    def layer(self) -> LlamaDecoderLayer:
        """The layer on features."""

    @property
    def deeper(self) -> Sequence[nn.Module]:
        """The layers behind it."""
        return ()

    def check_unrolled(self) -> None:
        """Raise ValueError for a head that training does not unroll: it computes one plain layer by itself."""
        if len(self.deeper) or getattr(self.config, "qk_norm", False):
            raise ValueError("training knows heads of one layer without q_norm and k_norm")

    @abstractmethod
    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows wide"], Float[Tensor, "*rows hidden"]]:
        """Return what the attention reads and what its output is added to."""

    @abstractmethod
    def entered(self, embedded: Float[Tensor, "*rows hidden"]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Return what makes queries, keys, values [*rows, heads * head_dim] and `enter`'s second answer of features.

        The share of the embedding is computed here, once for all features that follow: training unrolls with it.
        """

    def embed(self, input_ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        """Return the embeddings of tokens."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        features: Float[Tensor, "batch tokens hidden"],
        position_ids: Int[Tensor, "batch tokens"],
        attention_mask: Float[Tensor, "batch 1 tokens keys"] | None = None,
        cache: object | None = None,
    ) -> tuple[Float[Tensor, "batch tokens hidden"]]:
        """Return the estimated features. Row i gets the embedding of token i + 1 and the feature of token i."""
        embedded = self.embed(input_ids)
        read, residual = self.enter(embedded, features.to(embedded.dtype))
        more: dict[str, Any] = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **{cache_argument(type(self.layer.self_attn)): cache},
            "use_cache": cache is not None,
            "position_embeddings": self.rotary(embedded, position_ids),
        }
        attended, _ = self.layer.self_attn(hidden_states=read, **more)
        hidden = residual + attended
        hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        for layer in self.deeper:
            hidden = layer(hidden, **more)
        return (hidden,)


def head_layer(config: LlamaConfig, index: int) -> LlamaDecoderLayer:
    """Return a stock layer of a head, with the attention of Qwen3 where the config says `qk_norm`."""
    layer = LlamaDecoderLayer(config, index)
    if getattr(config, "qk_norm", False):
        layer.self_attn = Qwen3Attention(config, index)  # type: ignore[arg-type, assignment]
    return layer


def take_biases(head: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the projections of a head's layers the biases that its checkpoint has, and no others.

    Configs do not tell: `qkv_bias`, `attention_bias` and `bias` mean other projections to each who writes or reads
    them. Raises ValueError where some of an attention's queries, keys and values have one and others have none.
    """
    for name, module in head.named_modules():
        if name.endswith(".self_attn"):
            found = [part for part in ("q_proj", "k_proj", "v_proj") if f"{name}.{part}.bias" in tensors]
            if len(found) in (1, 2):
                raise ValueError(f"of {name}'s queries, keys and values only {' and '.join(found)} has a bias")
        if isinstance(module, nn.Linear) and (".self_attn." in name or ".mlp." in name):
            there = f"{name}.bias" in tensors
            bias = nn.Parameter(module.weight.new_zeros(module.out_features)) if there else None
            module.register_parameter("bias", bias)


class EagleHead(FeatureHead):
    """The trainable part: embedding, `fc` from (embedding, feature) to one, and Llama layers, the first of which has no
    input norm.

    State-dict names are those of the published checkpoints: `embed_tokens.weight`, `fc.weight` (`fc.bias` unless the
    config says `"bias": false`), `layers.0.*` without `input_layernorm`; no final norm and no output layer.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList(head_layer(config, number) for number in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()

    @property
    def layer(self) -> LlamaDecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    @property
    def deeper(self) -> Sequence[nn.Module]:
        return list(self.layers)[1:]

    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows hidden"], Float[Tensor, "*rows hidden"]]:
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], -1))
        return hidden, hidden

    def entered(self, embedded: Float[Tensor, "*rows hidden"]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        self.check_unrolled()
        own, other = self.fc.weight.chunk(2, 1)
        share, attention = F.linear(embedded, own, self.fc.bias), self.layer.self_attn

        def enter(features: Float[Tensor, "*rows hidden"]) -> tuple[Tensor, ...]:
            hidden = share + F.linear(features.to(embedded.dtype), other)
            return attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden), hidden

        return enter

    def read(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Return what the output layer reads of the head's output: all of it, the feature being normed."""
        return hidden

    def load_published(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load a published checkpoint; every missing, unexpected or misshapen tensor is named in one error.

        Which of a layer's projections have biases, its tensors tell (`qkv_bias` of Qwen2's heads).
        """
        take_biases(self, tensors)
        load_named(self, tensors, f"{source} is not an EAGLE-1/2 head of this config")


class HeadedEagle(nn.Module):
    """A head followed by an output layer: the shape of a causal LM, so that `CausalLM` can run it.

    `scaling` is what the target makes of the numbers of its output layer, where that is the one.
    """

    def __init__(self, head: Any, output: nn.Module, scaling: Scaling = Scaling()) -> None:
        super().__init__()
        self.base_model, self.config = head, head.config
        # In a list, so that the target's layer does not become a submodule (it is not ours to move or to save).
        self._output = [output]
        self.scaling = scaling

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        cache: object | None = None,
        **attention: Any,
    ) -> SimpleNamespace:
        """`attention`: positions and mask, as the head takes them; a cache that is given is used."""
        (hidden,) = self.base_model(input_ids, features, cache=cache, **attention)
        output = self._output[0]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        read = self.base_model.read(hidden[:, kept])
        return SimpleNamespace(logits=self.scaling(output(read.to(*home_of(output)))))

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self._output[0]
