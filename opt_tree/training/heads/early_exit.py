"""Train the exit layer of an early-exit drafter by self-distillation, from hidden states on disk (arXiv:2406.03853).

    python -m opt_tree.training.heads.early_exit --target DIR --features DIR --output DIR --minutes 12 [--depth 4]

What the target's first `depth` layers put out goes in; what comes out, behind the target's norm and output layer, is
compared with the target's own law there. A drafted token will have passed the same layers, so that training sees what
drafting does, and no unrolling is needed. The features must hold layers -1 and depth - 1: `--layers=-1,3` for a depth
of 4. Stream, clock and files are those of `opt_tree.training.heads.train`.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import TrainingParser, command, stream_parser
from opt_tree.training.plans import Judging


@dataclass(frozen=True)
class ExitPlan(Judging):
    """Where the exit is, and judged by what."""

    depth: int = 4  # layers of the target below the exit
    hard: float = 0.5  # share that the target's best token alone gets of what is wanted

    def passes(self, progress: float) -> int:
        return 1


def new_parser() -> TrainingParser:
    description = "Train the exit layer of an early-exit drafter from hidden states on disk."
    return stream_parser(description, ExitPlan(), reduced=False)


main = command(new_parser, "opt_tree.training.heads.early_exit:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from opt_tree.methods.drafters.heads.early_exit import KIND, ExitLayer
from opt_tree.models.checkpoints import load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype, write_checkpoint
from opt_tree.training.heads.batches import Batch, Documents
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.heads.run import Training, train_as_told

SAME = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
"""What of a target's config an exit layer is tied to."""


class ExitLoss(HeadLoss):
    """An exit layer with what judges it."""

    def estimates(self, batch: Batch, unroll: int) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the exit's states where the target's are: pair i is the token at i + 1, whose own state goes in."""
        features = batch.features[self.head.depth - 1].float()
        return [self.head.hidden(features, torch.arange(features.shape[1])[None])[:, 1:]]

    def read(self, estimates: Float[Tensor, "passes rows hidden"]) -> Float[Tensor, "passes rows hidden"]:
        return estimates


def save_exit(layer: ExitLayer, target: PreTrainedModel, folder: Path) -> None:
    """Save an exit layer: its weights in bf16, and a config that says where it belongs."""
    text = target.config.get_text_config()
    config = {"kind": KIND, "depth": layer.depth, "target": {name: getattr(text, name) for name in SAME}}
    write_checkpoint(config, layer.layer.state_dict(), folder)


def train(args: argparse.Namespace) -> None:
    plan, target = from_fields(ExitPlan, args), load_weights(str(args.target), working_dtype())
    text = target.config.get_text_config()
    plan.check(text.vocab_size)
    layers = text.num_hidden_layers
    if not 0 < plan.depth < layers:
        raise ValueError(f"--depth must be between 1 and {layers - 1}, the target has {layers} layers")
    layer = ExitLayer(target, plan.depth).float().requires_grad_(True)
    _, output, goal = columns_of(target, args.features, plan)
    del target.base_model.layers[:]  # its norm and rotary positions are read, and a copy of the exit copies them
    documents = Documents(args.features, plan.tokens, (-1, plan.depth - 1))
    training = Training(ExitLoss(layer, output, goal), documents, plan, args.output)
    train_as_told(training, args, "exit", lambda kept, folder: save_exit(kept.head, target, folder))
