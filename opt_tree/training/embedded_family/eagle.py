"""Train an EAGLE-1 head for a frozen target (arXiv:2401.15077), optionally unrolled over its own estimates.

    python -m opt_tree.training.embedded_family.eagle --target DIR --own DIR --output DIR [--unroll 3]

Pair i of the input is (the target's feature of token i, the embedding of token i + 1); the output estimates feature
i + 1. While drafting, the deeper levels see the head's own estimates instead of features. With `--unroll k` training
does so too (arXiv:2408.15766; "training-time test" in arXiv:2503.01840): pass s reads the estimates of pass s - 1.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from opt_tree.core.command_line import from_fields
from opt_tree.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.drafters.heads.eagle_head import EagleHead, OneLayerHead
from opt_tree.training.command_line import Parser, command, fit_as_told
from opt_tree.training.embedded_family.distil import body_loss, distillation_loss, load_lesson, teacher_parser
from opt_tree.training.files import write_checkpoint
from opt_tree.training.trainer import Schedule


@dataclass(frozen=True)
class Objective:
    """The weights of the loss; the published ones are feature 1.0, logit 0.1, hard 0, unroll 1, noise 0.1."""

    feature: float = 1.0  # SmoothL1 to the target's feature
    logit: float = 0.1  # cross-entropy through the target's output layer
    hard: float = 0.0  # share of the target's argmax in that cross-entropy
    unroll: int = 1  # passes, each on the estimates of the one before
    noise: float = 0.1  # half-width of the uniform feature noise in rows of 512 tokens


def new_head(target: PreTrainedModel) -> EagleHead:
    """Return an untrained head in the target's width, its embedding copied from the target and frozen."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1, "tie_word_embeddings": False})
    config._attn_implementation = "sdpa"
    head = EagleHead(config)
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight.float())
    head.embed_tokens.requires_grad_(False)
    return head


class Unrolled(nn.Module):
    """A head together with its objective: `forward` is the loss of a batch, so any wrapper of modules may run it."""

    def __init__(self, head: EagleHead, output: Float[Tensor, "vocab hidden"], objective: Objective) -> None:
        super().__init__()
        self.head, self.objective = head, objective
        self.register_buffer("output", output, persistent=False)

    def forward(self, ids: Int[Tensor, "rows length"], states: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the mean loss over passes; pass s is judged on the pairs that have s earlier ones."""
        weights, features = self.objective, states[-1]
        goals = features[:, 1:].float()
        logits = features[:, 1:].to(self.output.dtype) @ self.output.T
        spread = weights.noise * 512 / ids.shape[1]
        inputs = features[:, :-1].float() + (torch.rand_like(goals) - 0.5) * 2 * spread
        total = torch.zeros((), device=ids.device)
        for step, estimate in enumerate(passes(self.head, ids[:, 1:], inputs, weights.unroll)):
            near = F.smooth_l1_loss(estimate[:, step:].float(), goals[:, step:])
            drafted = estimate[:, step:].to(self.output.dtype) @ self.output.T
            apart = distillation_loss(drafted, logits[:, step:], weights.hard)
            total = total + weights.feature * near + weights.logit * apart
        return total / weights.unroll


class LayerPasses:
    """The one layer of a head, run pass after pass over the same pairs; keys and values of every pass are kept.

    A pair attends to those of the first pass where that is `visible`, and to one pair of each later pass: of the s-th
    last one to the pair s places back (`backwards`), or to the pair of its own place in every one.
    """

    def __init__(self, head: OneLayerHead, backwards: bool) -> None:
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
    head: OneLayerHead,
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


def new_parser() -> Parser:
    schedule = Schedule(rows="0.9:512,0.1:2048", lr=2e-3, warmup=50)
    return teacher_parser("Train an EAGLE-1 head for a frozen target.", schedule, Objective())


def train(args: argparse.Namespace) -> None:
    target, _, examples = load_lesson(args)
    head = new_head(target)
    if args.init:
        head.load_published(load_file(args.init / "model.safetensors"), str(args.init))
    model = Unrolled(head, target.get_output_embeddings().weight.detach(), from_fields(Objective, args))
    if fit_as_told(args, model, examples, body_loss(target, args.compile)):
        save_head(head, args.output / "final")


main = command(new_parser, train)

if __name__ == "__main__":
    main()
