"""Train Medusa's heads for a frozen target (arXiv:2401.10774), which draft every layer in one pass.

    python -m opt_tree.training.heads.medusa --target DIR --own DIR --output DIR

Head d learns what the target itself says d + 1 tokens ahead, along its own answers, given its last feature alone. All
read through the target's output layer; a share of the positions, drawn anew for every batch, is judged. Heads that see
the root, and each other, are ParallelSpec's and DSpark's (`parallel_spec.py`, `dspark.py`).
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import Parser, command, teacher_parser
from opt_tree.training.plans import Schedule


@dataclass(frozen=True)
class Objective:
    """What is trained, and what the loss weighs."""

    depths: int = 5  # heads: layers of a draft
    hard: float = 0.5  # share of the target's argmax in the cross-entropy
    judged: float = 0.06  # share of the positions that are judged
    decay: float = 0.8  # weight of each depth relative to the one before


def new_parser() -> Parser:
    return teacher_parser("Train Medusa's heads.", Schedule(rows="0.9:512,0.1:2048"), Objective())


main = command(new_parser, "opt_tree.training.heads.medusa:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.core.command_line import from_fields
from opt_tree.drafters.heads.one_pass import MedusaHeads
from opt_tree.training.embedded_family.distil import body_loss, distillation_loss, load_lesson
from opt_tree.training.files import write_checkpoint
from opt_tree.training.trainer import fit_as_told


class Heads(nn.Module):
    """Heads together with their objective: `forward` is the loss of a batch."""

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective
        self._target = [target]  # in a list, so that its weights are not saved with the heads

    def forward(self, ids: Int[Tensor, "rows length"], states: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the mean distance over depths; position i of the features belongs to the root at token i + 1.

        `goals` are the states that the target's output layer reads: at i + d - 1 it says what depth d should.
        """
        features, goals = states[-1][:, :-1], states[-1][:, 1:]
        last = goals.shape[1] - self.objective.depths + 1
        count = max(1, round(self.objective.judged * last * len(goals)))
        rows = torch.randint(len(goals), (count,), device=goals.device)
        places = torch.randint(last, (count,), device=goals.device)
        output: Any = self._target[0].get_output_embeddings()
        total, weights = torch.zeros((), device=goals.device), 0.0
        for depth, ours in enumerate(self.heads(features[rows, places].float())):
            theirs = goals[rows, places + depth]
            drafted, wanted = (x.to(output.weight.dtype) @ output.weight.T for x in (ours, theirs))
            weight = self.objective.decay**depth
            total = total + weight * distillation_loss(drafted, wanted, self.objective.hard)
            weights += weight
        return total / weights


def train(args: argparse.Namespace) -> None:
    objective = from_fields(Objective, args)
    target, _, examples = load_lesson(args)
    text = target.config.get_text_config()
    heads = MedusaHeads(text.hidden_size, text.vocab_size, objective.depths, own_output=False)
    if fit_as_told(args, Heads(heads.float(), target, objective), examples, body_loss(target, args.compile)):
        config = {"medusa_num_heads": objective.depths, "medusa_num_layers": 1}
        write_checkpoint(config, heads.heads.state_dict(), args.output / "final")
