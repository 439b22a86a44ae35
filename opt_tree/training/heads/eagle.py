"""An EAGLE-1 head in training (arXiv:2401.15077): a new one, its passes over its own estimates, and what is saved.

By its paper: SmoothL1 to the target's next feature, a tenth as much cross-entropy through the target's own output
layer, noise on the features, no pass on estimates. The released code multiplies the noise by 512 over a text's length;
here it does not depend on it. Other options are HASS's (2408.15766), GRIFFIN's (2502.11018), FR-Spec's draft vocabulary
(2502.14856), and what the embedded heads were trained by.

Pair i of the input is (the target's feature of token i, the embedding of token i + 1); the output estimates feature
i + 1. While drafting, the deeper levels see the head's own estimates instead of features. So does training in several
passes (arXiv:2408.15766; "training-time test" in arXiv:2503.01840): pass s reads the estimates of pass s - 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.eagle_head import EagleHead, FeatureHead
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.head_loss import HeadLoss, columns_of


def layer_config(target: PreTrainedModel) -> LlamaConfig:
    """Return the config of one Llama layer in the target's width, with what such a layer has in common with it."""
    theirs, known = target.config.get_text_config().to_dict(), LlamaConfig().to_dict()
    shared = {name: theirs[name] for name in known if name in theirs and name not in ("architectures", "model_type")}
    return LlamaConfig(**{**shared, "num_hidden_layers": 1, "tie_word_embeddings": False})


def new_head(target: PreTrainedModel) -> EagleHead:
    """Return an untrained head in the target's width, its embedding copied from the target and frozen."""
    config = layer_config(target)
    config._attn_implementation = "sdpa"
    head = EagleHead(config)
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight[: config.vocab_size].float())
    head.embed_tokens.requires_grad_(False)
    return head


class LayerPasses:
    """The one layer of a head, run pass after pass over the same pairs; keys and values of every pass are kept.

    A pair attends to those of the first pass where that is `visible`, and to one pair of each later pass: of the s-th
    last one to the pair s places back (`backwards`), or to the pair of its own place in every one.
    """

    def __init__(self, head: FeatureHead, backwards: bool) -> None:
        self.head, self.backwards = head, backwards
        self._seen: list[list[Tensor]] = []

    def run(
        self, read: Sequence[Tensor], rotary: tuple[Tensor, Tensor], visible: Bool[Tensor, "pairs pairs"]
    ) -> Float[Tensor, "rows pairs hidden"]:
        """Return what the layer makes of queries, keys, values and a residual, as `entered` gives them."""
        layer, attention = self.head.layer, self.head.layer.self_attn
        *parts, residual = read
        split = (*residual.shape[:2], -1, attention.head_dim)
        query, key, value = (each.view(split).transpose(1, 2) for each in parts)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        self._seen.append([repeat_kv(each, attention.num_key_value_groups) for each in (key, value)])
        mixed = self._attend(query * attention.scaling, visible)
        hidden = residual + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _attend(
        self, query: Float[Tensor, "rows heads pairs head_dim"], visible: Bool[Tensor, "pairs pairs"]
    ) -> Float[Tensor, "rows heads pairs head_dim"]:
        pairs, (first, *later) = query.shape[2], self._seen
        scores = [(query @ first[0].mT).masked_fill(~visible, -1e4)]
        if self.backwards:
            later = [
                [F.pad(each, (0, 0, back, 0))[:, :, :pairs] for each in kept] for back, kept in enumerate(later[::-1])
            ]
        for back, (key, _) in enumerate(later):
            score = (query * key).sum(-1, keepdim=True)
            missing = torch.arange(pairs, device=query.device)[:, None] < back * self.backwards
            scores.append(score.masked_fill(missing, -1e4))
        probs = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
        mixed = probs[..., :pairs] @ first[1]
        for place, (_, value) in enumerate(later, pairs):
            mixed = mixed + probs[..., place : place + 1] * value
        return mixed


def passes(
    head: FeatureHead,
    ids: Int[Tensor, "rows pairs"],
    features: Float[Tensor, "rows pairs hidden"],
    unroll: int,
) -> list[Float[Tensor, "rows pairs hidden"]]:
    """Return the estimates of each of `unroll` passes over pairs (feature, next token).

    In pass s, pair i attends to itself and to the s pairs before it as passes s, s - 1, ... computed them, and to
    all earlier pairs as the first pass did, on true features: what the head's cache holds s levels below the root.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    embedded = head.embed_tokens(ids)
    enter, rotary = head.entered(embedded), head.rotary(embedded, positions)
    layer, estimates = LayerPasses(head, backwards=True), list[Tensor]()
    for step in range(unroll):
        estimates.append(layer.run(enter(features), rotary, positions.mT - positions >= step))
        # Pair i reads feature i, which pair i - 1 estimated; pair 0 has no estimate and keeps the true feature.
        features = torch.cat([features[:, :1], estimates[-1][:, :-1].to(features.dtype)], 1)
    return estimates


class EagleLoss(HeadLoss):
    """An EAGLE-1 head with what judges it."""

    passes = staticmethod(passes)

    @classmethod
    def new(cls, plan: Any, target: PreTrainedModel, documents: Documents) -> "EagleLoss":
        tokens, output, goal = columns_of(target, documents.folder, plan)
        sizes = [documents.size(layer) for layer in documents.layers[1:]]
        goal = replace(goal, feature=plan.feature, noise=plan.noise)
        loss = cls(cls.new_head(plan, target, sizes).float(), output, goal, sizes, tokens)
        loss.tokens, loss.plan, loss.target = tokens, plan, target.config
        return loss

    @staticmethod
    def new_head(plan: Any, target: PreTrainedModel, sizes: Sequence[float]) -> FeatureHead:
        """Return what training begins with; `sizes`: what the features of each layer are divided by."""
        head = new_head(target)
        if plan.init:
            head.load_published(load_file(plan.init / "model.safetensors"), str(plan.init))
        head.embed_tokens.requires_grad_(plan.embedding)
        return head

    def save(self, folder: Path) -> None:
        whole = len(self.tokens) == self.head.config.vocab_size
        save_head(self.head, folder, None if whole else self.tokens)


def save_head(head: EagleHead, folder: Path, tokens: Int[Tensor, " columns"] | None = None) -> None:
    """Save a head in the published layout: a one-layer Llama config and bf16 tensors under the published names.

    With `tokens`, its draft vocabulary, the embeddings stay with the target, whose rows score as well.
    """
    config = {**head.config.to_diff_dict(), "architectures": ["LlamaForCausalLMEagle"], "dtype": "bfloat16"}
    config["use_cache"] = True  # copied from a target that was loaded for training
    tensors = head.state_dict()
    if tokens is not None:
        del tensors["embed_tokens.weight"]
        tensors |= vocabulary_tensors(tokens, head.config.vocab_size)
    write_checkpoint(config, tensors, folder)
