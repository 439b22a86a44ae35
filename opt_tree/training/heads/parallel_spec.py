"""A ParallelSpec head in training, group by group (arXiv:2410.05589).

Every token of a document is a root once: its group is its own pair, which sees the true pairs before it, and the masks
behind it, which see the same pairs and the masks before them, never those of another group. So one pass trains every
depth of every group. The law that the target has at a token judges all groups that speak of it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.parallel_spec import ParallelHead
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.eagle import LayerPasses, new_head
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.plans import ParallelPlan


class ParallelLoss(HeadLoss):
    """A parallel head with what judges it; pass d is depth d + 1."""

    @classmethod
    def new(cls, plan: ParallelPlan, target: PreTrainedModel, documents: Documents) -> "ParallelLoss":
        tokens, output, goal = columns_of(target, documents.folder, plan)
        loss = cls(new_parallel_head(target, plan.depths, plan.init), output, goal)
        loss.tokens = tokens
        return loss

    def save(self, folder: Path) -> None:
        save_parallel(self.head, folder, self.tokens)

    @staticmethod
    def passes(
        head: ParallelHead,
        ids: Int[Tensor, "rows pairs"],
        features: Float[Tensor, "rows pairs hidden"],
        depths: int,
    ) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the estimates by depth, each where the token is that it speaks of: by the group `depth` pairs back."""
        count = ids.shape[1]
        positions, before = torch.arange(count)[None], torch.ones(count, count, dtype=torch.bool).tril()
        layer, found = LayerPasses(head, backwards=False), list[Tensor]()
        for depth in range(depths):
            embedded = head.embed_tokens(ids) if depth == 0 else head.masks.weight[depth - 1].expand(1, 1, -1)
            read = head.entered(embedded)(features)
            hidden = layer.run(read, head.rotary(read[-1], positions + depth), before)
            found.append(F.pad(hidden, (0, 0, depth, 0))[:, :count])
        return found


def new_parallel_head(target: PreTrainedModel, depths: int, init: Path | None = None) -> ParallelHead:
    """Return an untrained head, its embedding the target's and frozen; or one that begins as an EAGLE-1 head."""
    own = new_head(target)
    head = ParallelHead(own.config, depths)
    tensors = own.state_dict()
    if init is not None:
        given = load_file(init / "model.safetensors")
        if missing := sorted(tensors.keys() - given.keys() - {"embed_tokens.weight"}):
            raise ValueError(f"--init {init} is no EAGLE-1 head: it has no {', '.join(missing)}")
        tensors |= {name: tensor for name, tensor in given.items() if name in tensors}
        tensors["embed_tokens.weight"] = own.embed_tokens.weight
    nn.init.normal_(head.masks.weight, std=own.embed_tokens.weight.std().item())
    head.load_published(tensors | {"masks.weight": head.masks.weight.detach()}, str(init or "a new head"))
    head.embed_tokens.requires_grad_(False)
    return head.float()


def save_parallel(head: ParallelHead, folder: Path, tokens: Int[Tensor, " columns"]) -> None:
    """Save a head in bf16 with its draft vocabulary; its embedding is the target's and stays there."""
    config = {**head.config.to_diff_dict(), "architectures": ["LlamaForCausalLMParallelSpec"], "dtype": "bfloat16"}
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "embed_tokens.weight"}
    write_checkpoint(config, tensors | dict(vocabulary_tensors(tokens, head.config.vocab_size)), folder)
