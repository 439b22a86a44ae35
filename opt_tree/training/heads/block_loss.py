"""What judges a block drafter on hidden states from disk: the losses of DSpark, DFlash and JetSpec, place by place.

Owns where anchors are drawn, what each place of a block is asked, and what the answer costs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from opt_tree.methods.drafters.heads.block_network import run_blocks
from opt_tree.methods.drafters.heads.families import JETSPEC
from opt_tree.models.output_scaling import scaling_of
from opt_tree.training.heads.batches import Batch
from opt_tree.training.heads.head_loss import Judge


class BlockLoss(Judge):
    """A block drafter with what judges it; pass k is its place k.

    `head`: a `BlockModel` of `block.py`. `tokens`: the columns. `share`: blocks, as a share of the answers' tokens.
    Embedding and output layer are the target's, and no part of what is trained.
    """

    def __init__(self, head: Any, target: PreTrainedModel, tokens: Int[Tensor, " columns"], share: float) -> None:
        super().__init__()
        self.head: Any = head
        self.share = share
        self.embedding: Tensor = target.get_input_embeddings().weight.detach()
        self.output: Tensor = target.get_output_embeddings().weight.detach()[tokens]
        self.scaling = scaling_of(target)
        self.columns = torch.full((len(self.embedding),), -1)
        self.columns[tokens] = torch.arange(len(tokens))

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
