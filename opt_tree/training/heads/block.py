"""A block drafter in training: a DSpark, DFlash or JetSpec model.

Anchors are drawn from the answers anew for each batch. A block behind an anchor sees the target's hidden states before
it and its own places, never another block's. Embedding and output layer are the target's and stay as they are. Each
place has a mean of its own here; a draft vocabulary is judged as if the target had no other tokens. By `--kind`:

- dspark (arXiv:2607.05147, section 3.3): with a Markov head and a confidence head. Place k is weighed by
  exp(-(k - 1) / 4), as in the released configuration.
- dflash (arXiv:2602.06036, section 4.2): the anchor's row says nothing, the others fill in what follows it. The loss is
  the cross-entropy of these tokens, weighed as DSpark's (eq. 4): the paper's choice for blocks of 8 (appendix A.1).
- jetspec (arXiv:2606.18394, eq. 8 and 9): no row sees a later one; the loss is the KL divergence of the draft from the
  target's law at temperature 1, and all places count alike, as in the paper's main results.
"""

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
from opt_tree.methods.drafters.heads.families import JETSPEC
from opt_tree.models.output_scaling import scaling_of
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Batch, Documents, most_frequent
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.heads.head_loss import Judge
from opt_tree.training.plans import BlockPlan, DSparkPlan, JetSpecPlan

AS_TARGET = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
)
"""What of its config is the target's."""
_BACKBONE = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""What z-lab and DeepSpec call the parts of transformers' network that have other names there."""


class BlockModel(nn.Module):
    """A block and its heads, where it has some, under the published names: what is trained and saved."""

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        file = read_block_file(config, int(config["num_target_layers"]))
        self.config, self.family, self.first, self.sights = config, file.family, file.first, file.sights
        self.block, self.heads = block_network(file.config), DSparkHeads({"markov_rank": 0, **config}, columns)

    def published(self) -> dict[str, Tensor]:
        """Return its tensors under the names of z-lab and DeepSpec."""
        tensors = {**self.block.state_dict(), **self.heads.state_dict()}
        for ours, theirs in _BACKBONE.items():
            tensors = {n.replace(ours, theirs, 1) if n.startswith(ours) else n: t for n, t in tensors.items()}
        return tensors


class BlockLoss(Judge):
    """A block drafter with what judges it; pass k is its place k.

    `head`: a `BlockModel`. `tokens`: the columns, its draft vocabulary. `share`: blocks, as a share of the answers'
    tokens. Embedding and output layer are the target's, and no part of what is trained.
    """

    def __init__(self, head: Any, target: PreTrainedModel, tokens: Int[Tensor, " columns"], share: float) -> None:
        super().__init__()
        self.head: Any = head
        self.tokens, self.share = tokens, share
        self.embedding: Tensor = target.get_input_embeddings().weight.detach()
        self.output: Tensor = target.get_output_embeddings().weight.detach()[tokens]
        self.scaling = scaling_of(target)
        self.columns = torch.full((len(self.embedding),), -1)
        self.columns[tokens] = torch.arange(len(tokens))

    @staticmethod
    def layers_of(plan: BlockPlan, target: PreTrainedModel) -> tuple[int, ...]:
        last = target.config.get_text_config().num_hidden_layers - 1  # the drafter has it behind its norm
        return (-1, *(-1 if layer == last else layer for layer in _layers(plan, target)))

    @classmethod
    def new(cls, plan: BlockPlan, target: PreTrainedModel, documents: Documents) -> "BlockLoss":
        mask = target.config.pad_token_id if plan.mask is None else plan.mask
        if mask is None or not 0 <= mask < target.config.vocab_size:
            raise ValueError(f"--mask is a token of the target that no text has, got {mask}")
        tokens = most_frequent(np.load(documents.folder / COUNTS), plan.vocab, "target")
        head = BlockModel(new_config(target, plan, _layers(plan, target), mask), len(tokens))
        if head.heads.markov_head is not None:
            nn.init.normal_(head.heads.markov_head.markov_w1.weight, std=0.02)
        return cls(head.float(), target, tokens, plan.anchors)

    def save(self, folder: Path) -> None:
        """Save in bf16 as z-lab and DeepSpec do, but for the target's layers; with the draft vocabulary, if any."""
        config = self.head.config
        vocab = config["vocab_size"]
        vocabulary = vocabulary_tensors(self.tokens, vocab) if len(self.tokens) < vocab else {}
        write_checkpoint(config, self.head.published() | dict(vocabulary), folder)

    def draw(self, batch: Batch) -> tuple[Int[Tensor, "rows anchors"], Bool[Tensor, "rows anchors"]]:
        """Draw anchors in each document, among the tokens whose follower belongs to the answer; mark those that are."""
        able = batch.judged.clone()
        able[:, 0] = False  # nothing of the context comes before it
        count = max(1, round(self.share * int(able.sum(1).max())))
        chances = torch.rand(able.shape).masked_fill(~able, -1.0)
        best, places = chances.topk(min(count, able.shape[1]), 1)
        return places, best >= 0

    def states(self, batch: Batch, anchors: Int[Tensor, "rows anchors"]) -> Float[Tensor, "rows anchors block hidden"]:
        """Run the blocks behind some anchors; all of a document in one forward."""
        context = torch.cat([batch.features[layer].float() for layer in batch.layers[1:]], -1)
        sizes = self.head.block.config
        ids = torch.full((*anchors.shape, sizes.block_size), sizes.mask_token_id)
        ids[..., 0] = batch.ids.gather(1, anchors)
        return run_blocks(self.head.block, self.embedding[ids].float(), context, anchors, self.head.sights)

    def forward(self, batch: Batch, unroll: int) -> tuple[Float[Tensor, " places"], Float[Tensor, " places"]]:
        anchors, real = self.draw(batch)
        states, length = self.states(batch, anchors)[:, :, self.head.first :], batch.ids.shape[1]
        asked = anchors[..., None] + torch.arange(unroll)  # where the target says what place k should
        able = real[..., None] & (asked < length - 1)
        asked = asked.clamp(max=length - 2)
        able &= batch.judged.gather(1, (asked + 1).flatten(1)).view_as(asked)  # a token that is there
        parents, follower = (batch.ids.gather(1, (asked + ahead).flatten(1)).view_as(asked) for ahead in (0, 1))
        goals = batch.features[-1].gather(1, asked.flatten(1)[..., None].expand(-1, -1, states.shape[-1]))
        logits, confidence = self.score(states[able], parents[able])
        law = self.read(goals.view_as(states)[able]).float().softmax(-1)
        columns = self.columns[follower[able]]
        if confidence is not None:
            losses = dspark_losses(logits, confidence, law, columns)
        else:
            losses = divergences(logits, law) if self.head.family == JETSPEC else surprises(logits, columns)
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


def surprises(logits: Float[Tensor, "rows columns"], follower: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return the cross-entropy of the tokens that follow; a follower of -1 has no column to be asked for."""
    return -logits.log_softmax(-1).gather(1, follower.clamp(min=0)[:, None])[:, 0] * (follower >= 0)


def divergences(logits: Float[Tensor, "rows columns"], law: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    """Return the KL divergence of what is drafted from the target's law."""
    return F.kl_div(logits.log_softmax(-1), law, reduction="none").sum(-1)


def dspark_losses(
    logits: Float[Tensor, "rows columns"],
    confidence: Float[Tensor, " rows"],
    law: Float[Tensor, "rows columns"],
    follower: Int[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return the weighed sum of DSpark's losses (eq. 8 to 10).

    0.1 times the cross-entropy, 0.9 times the L1 distance to the law, and that of the confidence with 1 - L1 / 2.
    """
    apart = (logits.softmax(-1) - law).abs().sum(-1)
    sure = F.binary_cross_entropy_with_logits(confidence, (1 - apart.detach() / 2).clamp(0, 1), reduction="none")
    return 0.1 * surprises(logits, follower) + 0.9 * apart + sure


def _layers(plan: BlockPlan, target: PreTrainedModel) -> tuple[int, ...]:
    """Return the target's layers that a model reads."""
    return plan.layers or spread(target.config.get_text_config().num_hidden_layers, plan.depth)


def new_config(target: PreTrainedModel, plan: BlockPlan, layers: Sequence[int], mask: int) -> dict[str, Any]:
    """Return the config of a model for this target, under the published names."""
    text, scaling = target.config.get_text_config().to_dict(), scaling_of(target)
    config = {name: text[name] for name in AS_TARGET if text.get(name) is not None} | {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": plan.depth,
        "num_target_layers": text["num_hidden_layers"],
        "output_multiplier": scaling.factor,
        "final_logit_softcapping": scaling.cap,
    }
    reads = {"mask_token_id": mask, "target_layer_ids": list(layers)}
    if not isinstance(plan, DSparkPlan):
        own = reads | ({"causal_head": True} if isinstance(plan, JetSpecPlan) else {})
        return config | {"architectures": ["DFlashDraftModel"], "block_size": plan.block + 1, "dflash_config": own}
    own = {"architectures": ["Qwen3DSparkModel"], "block_size": plan.block, "markov_rank": plan.rank}
    own |= {"markov_head_type": plan.markov, "enable_confidence_head": True, "confidence_head_with_markov": True}
    return config | reads | own
