"""The exit layer of an early-exit drafter in training, by self-distillation (arXiv:2406.03853).

What the target's first `depth` layers put out goes in; what comes out, behind the target's norm and output layer, is
compared with the target's own law there. A drafted token will have passed the same layers, so that training sees what
drafting does, and no unrolling is needed. The features must hold layers -1 and depth - 1: `--layers=-1,3` for a depth
of 4.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from opt_tree.methods.drafters.heads.early_exit import KIND, ExitLayer
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import Batch, Documents
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.plans import ExitPlan

SAME = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
"""What of a target's config an exit layer is tied to."""


class ExitLoss(HeadLoss):
    """An exit layer with what judges it."""

    @staticmethod
    def layers_of(plan: ExitPlan, target: PreTrainedModel) -> tuple[int, ...]:
        return (-1, plan.depth - 1)

    @classmethod
    def new(cls, plan: ExitPlan, target: PreTrainedModel, documents: Documents) -> "ExitLoss":
        layer = ExitLayer(target, plan.depth).float().requires_grad_(True)
        _, output, goal = columns_of(target, documents.folder, plan)
        del target.base_model.layers[:]  # its norm and rotary positions are read, and a copy of the exit copies them
        loss = cls(layer, output, goal)
        loss.target = target.config
        return loss

    def estimates(self, batch: Batch, unroll: int) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the exit's states where the target's are: pair i is the token at i + 1, whose own state goes in."""
        features = batch.features[self.head.depth - 1].float()
        return [self.head.hidden(features, torch.arange(features.shape[1])[None])[:, 1:]]

    def read(self, estimates: Float[Tensor, "passes rows hidden"]) -> Float[Tensor, "passes rows hidden"]:
        return estimates

    def save(self, folder: Path) -> None:
        save_exit(self.head, self.target, folder)


def save_exit(layer: ExitLayer, target: PreTrainedConfig, folder: Path) -> None:
    """Save an exit layer: its weights in bf16, and a config that says where it belongs. `target`: its config."""
    text = target.get_text_config()
    config = {"kind": KIND, "depth": layer.depth, "target": {name: getattr(text, name) for name in SAME}}
    write_checkpoint(config, layer.layer.state_dict(), folder)
