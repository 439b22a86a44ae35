"""Train a block drafter from hidden states on disk: a DSpark model (arXiv:2607.05147, section 3.3), or a plainer one.

    python -m opt_tree.training.heads.dspark --target DIR --features DIR --output DIR --minutes 12

Anchors are drawn from the answers anew for each batch. A block behind an anchor sees the target's hidden states before
it and its own places, never another block's. Embedding and output layer are the target's and stay as they are. The loss
of place k is 0.1 times the cross-entropy of the token that follows, 0.9 times the L1 distance to the target's law, and
the cross-entropy of the confidence with 1 - L1 / 2, weighed by exp(-(k - 1) / 4) as in the released configuration. Each
place has a mean of its own here; a draft vocabulary is judged as if the target had no other tokens. With
`--markov none` there are no heads: that is DeepSpec's DFlash, trained by this loss. With `--causal` as well no place
sees a later one, as in JetSpec's models. Stream, clock and files are those of `opt_tree.training.heads.train`.
"""

import math
import sys
from dataclasses import dataclass

from opt_tree.system.command_line import whole_numbers
from opt_tree.training.command_line import Parser, command, stream_parser
from opt_tree.training.plans import Pace


@dataclass(frozen=True)
class DSparkPlan(Pace):
    """The model, and how many blocks a batch has."""

    lr: float = 3e-3  # highest learning rate; it falls linearly to nothing
    decay: float = math.exp(-1 / 4)  # weight of each place relative to the one before
    block: int = 7  # places of a block, the anchor's included: layers of a draft
    depth: int = 5  # layers of the block's network
    rank: int = 256  # of the Markov head
    anchors: float = 0.125  # blocks, as a share of the answers' tokens

    def passes(self, progress: float) -> int:
        return self.block


MARKOV = ("vanilla", "gated", "none")
"""Kinds of Markov heads that know the parent alone, and no heads at all."""


def new_parser() -> Parser:
    parser = stream_parser("Train a DSpark model from hidden states on disk.", DSparkPlan())
    parser.add_argument(
        "--layers", type=whole_numbers, help="layers that it reads (default: as many as it has, spread)"
    )
    parser.add_argument("--markov", choices=MARKOV, default=MARKOV[0], help="Markov head (%(default)s)")
    parser.add_argument("--causal", action="store_true", help="no place sees a later one (JetSpec); with --markov none")
    parser.add_argument("--mask", type=int, help="token that stands for a mask (default: the target's padding)")
    return parser


main = command(new_parser, "opt_tree.training.heads.dspark:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.block_files import read_block_file, spread
from opt_tree.methods.drafters.heads.block_laws import DSparkHeads
from opt_tree.methods.drafters.heads.block_network import block_network, run_blocks
from opt_tree.models.checkpoints import load_weights
from opt_tree.models.output_scaling import scaling_of
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype, write_checkpoint
from opt_tree.training.heads.batches import Batch, Documents, most_frequent
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.heads.head_loss import Judge
from opt_tree.training.heads.run import Training, train_as_told

AS_TARGET = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
)
"""What of its config is the target's."""


_BACKBONE = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""What DeepSpec calls the parts of transformers' network that have other names there."""


class DSparkModel(nn.Module):
    """A block and its heads under the published names: what is trained and saved."""

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        file = read_block_file(config, int(config["num_target_layers"]))
        self.config, self.sights = config, file.sights
        self.block, self.heads = block_network(file.config), DSparkHeads(config, columns)

    def published(self) -> dict[str, Tensor]:
        """Return its tensors under DeepSpec's names."""
        tensors = {**self.block.state_dict(), **self.heads.state_dict()}
        for ours, theirs in _BACKBONE.items():
            tensors = {n.replace(ours, theirs, 1) if n.startswith(ours) else n: t for n, t in tensors.items()}
        return tensors


class DSparkLoss(Judge):
    """A DSpark model with what judges it; pass k is place k.

    `tokens` are the columns. Embedding and output layer are the target's, and no part of what is trained.
    """

    def __init__(
        self,
        head: DSparkModel,
        target: PreTrainedModel,
        tokens: Int[Tensor, " columns"],
        plan: DSparkPlan,
    ) -> None:
        super().__init__()
        self.head: DSparkModel = head
        self.plan = plan
        self.embedding: Tensor = target.get_input_embeddings().weight.detach()
        self.output: Tensor = target.get_output_embeddings().weight.detach()[tokens]
        self.scaling = scaling_of(target)
        self.columns = torch.full((len(self.embedding),), -1)
        self.columns[tokens] = torch.arange(len(tokens))

    def draw(self, batch: Batch) -> tuple[Int[Tensor, "rows anchors"], Bool[Tensor, "rows anchors"]]:
        """Draw anchors in each document, among the tokens whose follower belongs to the answer; mark those that are."""
        able = batch.judged.clone()
        able[:, 0] = False  # nothing of the context comes before it
        count = max(1, round(self.plan.anchors * int(able.sum(1).max())))
        chances = torch.rand(able.shape).masked_fill(~able, -1.0)
        best, places = chances.topk(min(count, able.shape[1]), 1)
        return places, best >= 0

    def states(self, batch: Batch, anchors: Int[Tensor, "rows anchors"]) -> Float[Tensor, "rows anchors block hidden"]:
        """Run the blocks behind some anchors; all of a document in one forward."""
        context = torch.cat([batch.features[layer].float() for layer in batch.layers[1:]], -1)
        ids = torch.full((*anchors.shape, self.head.config["block_size"]), self.head.config["mask_token_id"])
        ids[..., 0] = batch.ids.gather(1, anchors)
        return run_blocks(self.head.block, self.embedding[ids].float(), context, anchors, self.head.sights)

    def forward(self, batch: Batch, unroll: int) -> tuple[Float[Tensor, " places"], Float[Tensor, " places"]]:
        anchors, real = self.draw(batch)
        states, length = self.states(batch, anchors), batch.ids.shape[1]
        asked = anchors[..., None] + torch.arange(unroll)  # where the target says what place k should
        able = real[..., None] & (asked < length - 1)
        asked = asked.clamp(max=length - 2)
        able &= batch.judged.gather(1, (asked + 1).flatten(1)).view_as(asked)  # a token that is there
        parents, follower = (batch.ids.gather(1, (asked + ahead).flatten(1)).view_as(asked) for ahead in (0, 1))
        goals = batch.features[-1].gather(1, asked.flatten(1)[..., None].expand(-1, -1, states.shape[-1]))
        logits, confidence = self.score(states[able], parents[able])
        law = self.read(goals.view_as(states)[able]).float().softmax(-1)
        losses = losses_of(logits, confidence, law, self.columns[follower[able]])
        place = torch.arange(unroll).expand_as(able)[able]
        counts = torch.bincount(place, minlength=unroll).clamp(min=1)
        equal = (logits.argmax(-1) == law.argmax(-1)).float()
        loss, hits = (torch.zeros(unroll).index_add(0, place, each) / counts for each in (losses, equal))
        return loss, hits

    def read(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows columns"]:
        """Return the logits that the target has where these are its last hidden states."""
        return self.scaling(states.to(self.output.dtype) @ self.output.T)

    def score(
        self, states: Float[Tensor, "rows hidden"], parents: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, " rows"] | None]:
        """Return the logits of children and of the confidence, below parents whose children have these states."""
        markov, confidence = self.head.heads.markov_head, self.head.heads.confidence(states, parents)
        logits = self.read(states)
        if markov is not None:
            logits = logits + markov.markov_w2(markov.latent(states, parents))
        return logits.float(), None if confidence is None else confidence.float()


def losses_of(
    logits: Float[Tensor, "rows columns"],
    confidence: Float[Tensor, " rows"] | None,
    law: Float[Tensor, "rows columns"],
    follower: Int[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return the weighed sum of the losses; a follower of -1 has no column to be asked for."""
    log_probs = logits.log_softmax(-1)
    hard = -log_probs.gather(1, follower.clamp(min=0)[:, None])[:, 0] * (follower >= 0)
    apart = (log_probs.exp() - law).abs().sum(-1)
    if confidence is None:
        return 0.1 * hard + 0.9 * apart
    sure = F.binary_cross_entropy_with_logits(confidence, (1 - apart.detach() / 2).clamp(0, 1), reduction="none")
    return 0.1 * hard + 0.9 * apart + sure


def new_config(
    target: PreTrainedModel, plan: DSparkPlan, layers: Sequence[int], kind: str, mask: int
) -> dict[str, Any]:
    """Return the config of a DSpark model for this target, under the published names; `kind`: of its Markov head."""
    text, scaling = target.config.get_text_config().to_dict(), scaling_of(target)
    return {name: text[name] for name in AS_TARGET if text.get(name) is not None} | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": plan.depth,
        "num_target_layers": text["num_hidden_layers"],
        "block_size": plan.block,
        "mask_token_id": mask,
        "target_layer_ids": list(layers),
        "markov_rank": 0 if kind == "none" else plan.rank,
        "markov_head_type": None if kind == "none" else kind,
        "enable_confidence_head": kind != "none",
        "confidence_head_with_markov": True,
        "output_multiplier": scaling.factor,
        "final_logit_softcapping": scaling.cap,
    }


def save_dspark(model: DSparkModel, folder: Path, tokens: Int[Tensor, " columns"]) -> None:
    """Save a model in bf16 as DeepSpec does, but for the target's layers; with its draft vocabulary."""
    vocabulary = vocabulary_tensors(tokens, model.config["vocab_size"])
    write_checkpoint(model.config, model.published() | dict(vocabulary), folder)


def train(args: argparse.Namespace) -> None:
    plan, target = from_fields(DSparkPlan, args), load_weights(str(args.target), working_dtype())
    if args.causal and args.markov != "none":
        raise ValueError(f"--causal goes with --markov none, not {args.markov}")
    count = target.config.get_text_config().num_hidden_layers
    layers = args.layers or spread(count, plan.depth)
    mask = target.config.pad_token_id if args.mask is None else args.mask
    if mask is None or not 0 <= mask < target.config.vocab_size:
        raise ValueError(f"--mask is a token of the target that no text has, got {mask}")
    kept = most_frequent(np.load(args.features / COUNTS), args.vocab, "target")
    config = new_config(target, plan, layers, args.markov, mask)
    if args.causal:  # its places speak one place earlier than in JetSpec's released models
        nested = {name: config[name] for name in ("target_layer_ids", "mask_token_id")}
        nested |= {"causal_head": True, "draft_shift": True}
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    head = DSparkModel(config, len(kept))
    if head.heads.markov_head is not None:
        nn.init.normal_(head.heads.markov_head.markov_w1.weight, std=0.02)
    read = [-1 if layer == count - 1 else layer for layer in layers]  # the drafter has the last one behind its norm
    documents = Documents(args.features, plan.tokens, (-1, *read))
    training = Training(DSparkLoss(head.float(), target, kept, plan), documents, plan, args.output)
    train_as_told(
        training, args, "dflash" if args.causal else "dspark", lambda loss, folder: save_dspark(loss.head, folder, kept)
    )
