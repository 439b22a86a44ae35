"""Medusa's heads in training (arXiv:2401.10774), which draft every layer in one pass.

Head d learns what the target itself says d + 1 tokens ahead, along its own answers, given its last feature alone. All
read through the target's output layer, which is most of the work. So a step judges them over the most frequent tokens
and some others, in a third of the time that all tokens take (`--frequent 0 --drawn 0`). Heads that see the root, and
each other, are ParallelSpec's and DSpark's (`parallel_spec.py`, `block.py`).

This is Medusa-1 (section 2.2.1), with the weights of its heads, 0.8^k. The paper's heads have output layers of their
own, and learn the tokens that follow and nothing else. Medusa-2, which trains the target as well, is not here.
"""

from pathlib import Path

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from opt_tree.methods.drafters.heads.one_pass import MedusaHeads
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.plans import MedusaPlan


class MedusaLoss(HeadLoss):
    """Medusa's heads with what judges them; pass d is head d."""

    @classmethod
    def new(cls, plan: MedusaPlan, target: PreTrainedModel, documents: Documents) -> "MedusaLoss":
        text = target.config.get_text_config()
        heads = MedusaHeads(text.hidden_size, text.vocab_size, plan.depths, own_output=False)
        _, output, goal = columns_of(target, documents.folder, plan)
        return cls(heads.float(), output, goal)

    def save(self, folder: Path) -> None:
        heads = self.head.heads
        write_checkpoint({"medusa_num_heads": len(heads), "medusa_num_layers": 1}, heads.state_dict(), folder)

    @staticmethod
    def passes(
        head: MedusaHeads, ids: Int[Tensor, "rows pairs"], features: Float[Tensor, "rows pairs hidden"], depths: int
    ) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the estimates by head, each where the token is that it speaks of: from the feature d pairs back."""
        count = ids.shape[1]
        return [F.pad(states, (0, 0, depth, 0))[:, :count] for depth, states in enumerate(head(features))]

    def read(self, estimates: Float[Tensor, "passes rows hidden"]) -> Float[Tensor, "passes rows hidden"]:
        return estimates
