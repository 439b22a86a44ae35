"""EAGLE-1/2: a one-layer head that drafts in the target's feature space (arXiv:2401.15077, arXiv:2406.16858).

Owns the head (`EagleHead`, the published checkpoint layout) and the drafter around it. Pair i of the head's input is
(feature of token i, embedding of token i + 1); its output estimates the feature of token i + 1, to which the target's
own output layer is applied.
"""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from opt_tree.checkpoints import CheckpointError, find_file, load_tensors, one_line
from opt_tree.children import Reduced
from opt_tree.drafters.base import Drafter
from opt_tree.drafters.reduced import take_vocabulary
from opt_tree.led import replicated, whole
from opt_tree.lm import Buckets, CausalLM
from opt_tree.pool import Frontier
from opt_tree.step import Outcome
from opt_tree.target import Output

LAST = -1
"""The layer that the head reads: the target's final hidden state, behind its last norm."""


class OneLayerHead(nn.Module):
    """What EAGLE heads have in common: an embedding, rotary positions, and one Llama layer on features.

    A subclass adds its own tensors under their published names, and says what the layer reads.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.num_hidden_layers != 1:
            raise ValueError(f"an EAGLE head has one layer, this config has {config.num_hidden_layers}")
        if config._attn_implementation_internal is None:
            config._attn_implementation = "sdpa"
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> LlamaDecoderLayer:
        """The one decoder layer."""
        raise NotImplementedError

    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows wide"], Float[Tensor, "*rows hidden"]]:
        """Return what the attention reads and what its output is added to."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        features: Float[Tensor, "batch tokens hidden"],
        position_ids: Int[Tensor, "batch tokens"],
        attention_mask: Float[Tensor, "batch 1 tokens keys"] | None = None,
        past_key_values: object | None = None,
    ) -> tuple[Float[Tensor, "batch tokens hidden"]]:
        """Return the estimated features. Row i gets the embedding of token i + 1 and the feature of token i."""
        embedded = self.embed_tokens(input_ids)
        read, residual = self.enter(embedded, features.to(embedded.dtype))
        attended, _ = self.layer.self_attn(
            hidden_states=read,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
            position_embeddings=self.rotary(embedded, position_ids),
        )
        hidden = residual + attended
        return (hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden)),)


class EagleHead(OneLayerHead):
    """The trainable part: embedding, `fc` from (embedding, feature) to one, and one Llama layer without its input norm.

    State-dict names are those of the published checkpoints: `embed_tokens.weight`, `fc.weight` (`fc.bias` unless the
    config says `"bias": false`), `layers.0.*` without `input_layernorm`; no final norm and no output layer.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    @property
    def layer(self) -> LlamaDecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    def enter(
        self, embedded: Float[Tensor, "*rows hidden"], features: Float[Tensor, "*rows hidden"]
    ) -> tuple[Float[Tensor, "*rows hidden"], Float[Tensor, "*rows hidden"]]:
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], -1))
        return hidden, hidden

    def read(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Return what the output layer reads of the head's output: all of it, the feature being normed."""
        return hidden

    def load_published(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load a published checkpoint; every missing, unexpected or misshapen tensor is named in one error."""
        load_named(self, tensors, f"{source} is not an EAGLE-1/2 head of this config")


def load_named(head: nn.Module, tensors: Mapping[str, Tensor], complaint: str) -> None:
    """Load a head's tensors; ValueError names every one that is missing, unexpected or misshapen."""
    own = head.state_dict()
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in own and "rotary_emb" not in name]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(f"{complaint}: {'; '.join(problems)}")
    head.load_state_dict({name: tensors[name] for name in own})


class HeadedEagle(nn.Module):
    """A head followed by an output layer: the shape of a causal LM, so that `CausalLM` can run it.

    `cap` is the target's `final_logit_softcapping`, where the output layer is the target's.
    """

    def __init__(self, head: Any, output: nn.Module, cap: float | None = None) -> None:
        super().__init__()
        self.base_model, self.config = head, head.config
        # In a list, so that the target's layer does not become a submodule (it is not ours to move or to save).
        self._output = [output]
        self._cap = cap

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        **attention: Any,
    ) -> SimpleNamespace:
        """`attention`: positions, mask and cache, as the head takes them; a cache that is given is used."""
        (hidden,) = self.base_model(input_ids, features, **attention)
        output = self._output[0]
        read = self.base_model.read(hidden[:, -logits_to_keep:])
        logits = output(read.to(output.weight.device, output.weight.dtype))
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        return SimpleNamespace(logits=logits)

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self._output[0]


def rows_of(output: Any, tokens: Int[Tensor, " columns"]) -> nn.Linear:
    """Return the output layer over some tokens only, its rows copied."""
    index = tokens.to(output.weight.device)
    rows = nn.Linear(output.weight.shape[1], len(tokens), output.bias is not None, device="meta")
    rows.weight = nn.Parameter(output.weight.detach()[index], False)
    if output.bias is not None:
        rows.bias = nn.Parameter(output.bias.detach()[index], False)
    return rows


class EagleDrafter(Drafter):
    """Drafts with an EAGLE-1/2 head.

    Committed pairs carry the target's own features. Rows of tree nodes were computed from estimated features, so they
    are dropped after the step and the accepted tokens run again with the real ones, as the published method does; the
    extra rows ride in the forward that is needed anyway for the target's own token.
    """

    features: tuple[int, ...] = (LAST,)
    any_order = True

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        buckets: Buckets | None = None,
        tokens: Int[Tensor, " columns"] | None = None,
    ) -> None:
        """`tokens`: the draft vocabulary; None: all tokens of the head."""
        if head.config.hidden_size != target.hidden:
            raise ValueError(
                f"wrong head for this target: the head is {head.config.hidden_size} wide, {target.name} {target.hidden}"
            )
        output = replicated(target.model.get_output_embeddings())
        cap = getattr(target.model.config.get_text_config(), "final_logit_softcapping", None)
        if tokens is not None:
            output = rows_of(output, tokens)
        self._begin(HeadedEagle(head, output, cap), target, buckets, tokens)

    def _begin(
        self, model: HeadedEagle, target: CausalLM, buckets: Buckets | None, tokens: Int[Tensor, " columns"] | None
    ) -> None:
        config = model.config
        if config.vocab_size > target.vocab:
            raise ValueError(
                f"wrong head for this target: the head has {config.vocab_size} tokens, {target.name} {target.vocab}"
            )
        self.lm = CausalLM(model, buckets, probe=False)
        self.lm.watch((LAST,))
        self.models = (self.lm,)
        self.max_context = min(self.lm.max_context, target.max_context)
        self._vocab, self._whole, self._tokens = config.vocab_size, target.vocab, tokens
        self._ready: Tensor = torch.zeros(0)
        """The head's inputs for tokens whose pair is not in its cache yet, from the target's features."""
        self._drafted: Tensor = torch.zeros(0)
        """The head's own features by draft row: 0 the root, k the k-th node expanded."""

    def _inputs(self, features: Mapping[int, Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens hidden"]:
        """Return what the head reads of the target's features."""
        return features[LAST].to(self.lm.device, self.lm.dtype)

    def reset(self, prompt: list[int], output: Output | None) -> None:
        self.lm.reset()
        if output is None:
            # A one-token prompt has no earlier feature: its pair starts from zeros.
            self._ready = torch.zeros(1, self.lm.hidden, dtype=self.lm.dtype, device=self.lm.device)
        else:
            self._ready = self._inputs(output.features)
        # With a feature for each token but the last, the pairs begin at the second token; without any, at the first.
        self._first = 0 if output is None else 1

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Reduced:
        """Run the pairs that the last step completed, with the target's features."""
        tokens = self._embeddable(context[self._first + self.lm.length :])
        output = self.lm.append(tokens, features=self._ready)
        self._ready = self._ready[:0]
        self._drafted = output.features[LAST][-1:].clone()
        return self._scores(output)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"] | Reduced:
        positions = self.lm.length - 1 + frontier.depths
        parents = self._drafted.index_select(0, torch.from_numpy(frontier.parents).to(self._drafted.device))
        output = self.lm.extend(frontier.tokens, positions, frontier.visible, parents)
        self._drafted = torch.cat([self._drafted, output.features[LAST]])
        return self._scores(output)

    @property
    def estimate(self) -> Float[Tensor, "1 hidden"]:
        """What the head estimated of the feature at the root, once `root` was asked."""
        return self._drafted[:1]

    def observe(self, outcome: Outcome) -> None:
        self.lm.commit([])
        self._ready = torch.cat([self._ready, self._inputs(outcome.features)])

    def _embeddable(self, tokens: list[int]) -> list[int]:
        return [token if token < self._vocab else 0 for token in tokens]

    def _scores(self, output: Output) -> Float[Tensor, "rows vocab"] | Reduced:
        if self._tokens is not None:
            return Reduced(output.logits, self._tokens, self._whole)
        # Tokens that only the target knows (a padded vocabulary) have no embedding here: never propose them.
        return output.logits[:, : self._vocab]

    def describe(self) -> str:
        return f"EAGLE head {self.name}: {self.lm.size}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"draft_dtype": str(self.lm.dtype).removeprefix("torch.")}


def load_eagle(
    path: str, target: CausalLM, buckets: Buckets | None = None, tensors: dict[str, Tensor] | None = None
) -> EagleDrafter:
    """Load an EAGLE-1/2 head as published: `config.json` and `model.safetensors` or `pytorch_model.bin`.

    Weights come to the target's dtype and device. `embed_tokens` may be absent: then the target's is used. `d2t` and
    `t2d` may be there: then it drafts these tokens only, by the target's own output rows. Missing, unexpected and
    misshapen tensors are all named. `tensors`: those of the checkpoint, if they are read already.
    """
    tensors = load_tensors(path) if tensors is None else tensors
    if any(name.startswith("midlayer.") for name in tensors):
        raise CheckpointError(f"{path} is an EAGLE-3 head, not one of EAGLE-1 or EAGLE-2")
    config = head_config(path)
    try:
        tokens = take_vocabulary(tensors, config.vocab_size)
        lend_embeddings(tensors, target, config.vocab_size)
        head = EagleHead(config)
        head.load_published(tensors, "it")
        output = target.model.get_output_embeddings().weight
        head.to(output.device, target.dtype).eval().requires_grad_(False)
        return EagleDrafter(head, target, buckets, tokens)
    except ValueError as error:
        raise CheckpointError(f"cannot use {path}: {error}") from error


def lend_embeddings(tensors: dict[str, Tensor], target: CausalLM, vocab: int) -> None:
    """Put the target's embeddings where a checkpoint has none."""
    if "embed_tokens.weight" not in tensors:
        embeddings = whole(cast(Tensor, target.model.get_input_embeddings().weight))
        tensors["embed_tokens.weight"] = embeddings.detach()[:vocab]


def head_config(path: str) -> LlamaConfig:
    """Read a head's config.json. Heads name no model type of their own: all are one Llama layer."""
    file = find_file(path, "config.json")
    try:
        raw = json.loads(file.read_text())
        own = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
        return LlamaConfig(**own)
    except Exception as error:  # strict configs raise errors of their own kind
        raise CheckpointError(f"{file} is not the config of an EAGLE head: {one_line(error)}") from error
