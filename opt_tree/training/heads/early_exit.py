"""Train the exit layer of an early-exit drafter by self-distillation (EESD, arXiv:2406.03853).

    python -m opt_tree.training.heads.early_exit --target DIR --own DIR --output DIR [--depth 4]

The target is frozen. Its first `depth` layers' hidden states go in; what comes out, behind the target's norm and output
layer, is compared with the target's own logits. A drafted token will have passed the same layers, so that training sees
what drafting does, and no unrolling is needed. The output layer is most of the work: a share of the positions, drawn
anew for every batch, is judged.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import Parser, command, teacher_parser
from opt_tree.training.plans import Schedule


@dataclass(frozen=True)
class Objective:
    """What the loss weighs."""

    hard: float = 0.5  # share of the target's argmax in the cross-entropy
    judged: float = 0.25  # share of the positions that are judged


def new_parser() -> Parser:
    schedule = Schedule(rows="0.9:512,0.1:2048")
    parser = teacher_parser("Train the exit layer of an early-exit drafter.", schedule, Objective())
    parser.add_argument("--depth", type=int, default=4, help="layers of the target below the exit")
    return parser


main = command(new_parser, "opt_tree.training.heads.early_exit:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.core.command_line import from_fields
from opt_tree.drafters.heads.early_exit import KIND, ExitLayer
from opt_tree.training.embedded_family.distil import body_loss, distillation_loss, load_lesson
from opt_tree.training.files import write_checkpoint
from opt_tree.training.trainer import fit_as_told

SAME = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
"""What of a target's config an exit layer is tied to."""


class Distilled(nn.Module):
    """An exit layer together with its objective: `forward` is the loss of a batch."""

    def __init__(self, layer: ExitLayer, objective: Objective) -> None:
        super().__init__()
        self.layer, self.objective = layer, objective

    def forward(self, ids: Int[Tensor, "rows length"], states: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the distance to the target's logits at some positions; `states` are the target's, by layer."""
        features, goals = states[self.layer.depth], states[-1]  # behind the lower half, and what the output layer reads
        positions = torch.arange(features.shape[1], device=features.device)[None]
        hidden = self.layer.hidden(features.float(), positions)
        count = max(1, round(self.objective.judged * positions.numel() * len(features)))
        judged = torch.randperm(positions.numel() * len(features), device=features.device)[:count]
        output = self.layer.get_output_embeddings().weight
        ours, theirs = (states.flatten(0, 1)[judged].to(output.dtype) @ output.T for states in (hidden, goals))
        return distillation_loss(ours, theirs, self.objective.hard)


def save_exit(layer: ExitLayer, target: PreTrainedModel, folder: Path) -> None:
    """Save an exit layer: its weights in bf16, and a config that says where it belongs."""
    text = target.config.get_text_config()
    config = {"kind": KIND, "depth": layer.depth, "target": {name: getattr(text, name) for name in SAME}}
    write_checkpoint(config, layer.layer.state_dict(), folder)


def train(args: argparse.Namespace) -> None:
    target, _, examples = load_lesson(args)
    layers = target.config.get_text_config().num_hidden_layers
    if not 0 < args.depth < layers:
        raise ValueError(f"--depth must be between 1 and {layers - 1}, the target has {layers} layers")
    layer = ExitLayer(target, args.depth).float().requires_grad_(True)
    model = Distilled(layer, from_fields(Objective, args))
    if fit_as_told(args, model, examples, body_loss(target, args.compile)):
        save_exit(layer, target, args.output / "final")
