"""An EAGLE-3 head in training (arXiv:2503.01840): what it begins with, and the files that it is kept in.

By its paper: cross-entropy alone, over a draft vocabulary, through an output layer of its own; random weights; seven
passes, each on the estimates of the one before, weighed by powers of 0.8.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.eagle3 import chosen_layers
from opt_tree.methods.drafters.heads.eagle3_files import ENTERED
from opt_tree.methods.drafters.heads.eagle3_head import NORMS, Eagle3Head
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.eagle import EagleLoss, layer_config
from opt_tree.training.plans import LAYOUTS

_OWN = 5.0
"""The attention's score of a pair with itself when training begins; that with another token lies around 0."""


class Eagle3Loss(EagleLoss):
    """An EAGLE-3 head with what judges it."""

    @staticmethod
    def layers_of(plan: Any, target: PreTrainedModel) -> tuple[int, ...]:
        return (-1, *chosen_layers(plan.layers, target.config.num_hidden_layers))

    @staticmethod
    def new_head(plan: Any, target: PreTrainedModel, sizes: Sequence[float]) -> Eagle3Head:
        return new_eagle3_head(target, plan.vocab, plan.warm, sizes[-1], plan.norm_before_residual)

    def save(self, folder: Path) -> None:
        self.fold()
        plan = self.plan
        told = {"layers": plan.layers, "verifier": self.target, "depth": plan.passes(1.0)}
        save_eagle3(self.head, self.tokens, folder, plan.layout, plan.warm, **told)


def new_eagle3_head(
    target: PreTrainedModel, vocab: int, warm: bool = False, size: float = 1.0, normed: bool = False
) -> Eagle3Head:
    """Return an EAGLE-3 head in the target's width: random weights, an output layer of its own, the target's embedding.

    With `warm` it begins as a layer of the target on the uppermost feature, with the target's last norm, and its output
    rows stay the target's. `fc` passes on the last of the three features, the last layer gives its weights; what reads
    the two other features is small. Queries and keys read the embedding alike, so that every pair begins by seeing its
    own token: attention alone tells the head of it. `size`: what the last feature is divided by.
    Norms do not see it; what the layer adds to the feature is divided by it too. `normed`: `norm_before_residual`. Then
    the norm begins without weights, and queries, keys and values have them: the residual is the feature at size 1.
    """
    config = layer_config(target)
    config.draft_vocab_size, config.norm_before_residual = vocab, normed
    head = Eagle3Head(config)
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight[: config.vocab_size].float())
    head.embed_tokens.requires_grad_(False)
    if not warm:
        return head
    head.lm_head.requires_grad_(False)
    head.norm.weight.data.copy_(target.base_model.norm.weight.float())
    source, width = target.base_model.layers[-1], config.hidden_size
    own, weights = head.midlayer, source.input_layernorm.weight
    with torch.no_grad():
        nn.init.normal_(head.fc.weight, std=0.002)
        head.fc.weight[:, -width:] += torch.eye(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(own.self_attn, name).weight
            weight[:, width:] = getattr(source.self_attn, name).weight * (weights if normed else 1)
        own.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight / size)
        if not normed:
            own.hidden_norm.weight.copy_(weights)
        own.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        _see_own_token(own.self_attn, width)
        for name in ("gate_proj", "up_proj"):
            getattr(own.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
        own.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight / size)
    return head


def _see_own_token(attention: LlamaAttention, width: int) -> None:
    """Let queries and keys read a normed embedding of this width alike."""
    size, groups = attention.head_dim, attention.num_key_value_groups
    key = torch.randn(attention.k_proj.out_features // size, size, width) * (_OWN * attention.scaling / width) ** 0.5
    attention.k_proj.weight[:, :width] = key.flatten(0, 1)
    attention.q_proj.weight[:, :width] = key.repeat_interleave(groups, 0).flatten(0, 1)


def save_eagle3(
    head: Eagle3Head,
    tokens: Int[Tensor, " columns"] | None,
    folder: Path,
    layout: str = LAYOUTS[0],
    shared: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    layers: Sequence[int] | None = None,
    verifier: PreTrainedConfig | None = None,
    depth: int = 1,
) -> None:
    """Save a head in the "published" layout or in that of "speculators"; embeddings stay with the target.

    `shared`: its output layer is the target's rows, and stays there too. `layers`: those whose outputs it reads, where
    they are not the usual ones. `verifier`, `depth`: the target's config and the passes in training, which
    "speculators" notes as what an engine runs the head with.
    """
    left = ("embed_tokens.", "lm_head.") if shared else ("embed_tokens.",)
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith(left)}
    config = {**head.config.to_diff_dict(), "dtype": str(dtype).removeprefix("torch.")}
    config["norm_before_residual"] = head.residual_normed
    config[ENTERED] = None if layers is None else [layer + 1 for layer in layers]
    own = ("draft_vocab_size", "target_hidden_size", *NORMS, "norm_before_residual", ENTERED)
    extra = {name: value for name in own if (value := config.pop(name, None)) is not None}
    if tokens is not None:
        tensors |= vocabulary_tensors(tokens, head.config.vocab_size)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        config = {"transformer_layer_config": config, "speculators_model_type": "eagle3", **extra}
        config["architectures"] = ["Eagle3Speculator"]
        if verifier is not None:
            config["speculators_config"] = {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
                "verifier": {"name_or_path": verifier.name_or_path, "architectures": verifier.architectures or []},
            }
    elif layout == "published":
        config |= {**extra, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    write_checkpoint(config, tensors, folder, dtype)
