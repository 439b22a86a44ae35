"""Train Medusa's heads from hidden states on disk (arXiv:2401.10774), which draft every layer in one pass.

    python -m opt_tree.training.heads.medusa --target DIR --features DIR --output DIR --minutes 12

Head d learns what the target itself says d + 1 tokens ahead, along its own answers, given its last feature alone. All
read through the target's output layer, which is most of the work. So a step judges them over the most frequent tokens
and some others, in a third of the time that all tokens take (`--frequent 0 --drawn 0`). Heads that see the root, and
each other, are ParallelSpec's and DSpark's (`parallel_spec.py`, `dspark.py`). Stream, clock and files are those of
`opt_tree.training.heads.train`.

This is Medusa-1 (section 2.2.1), with the weights of its heads, 0.8^k. The paper's heads have output layers of their
own, and learn the tokens that follow and nothing else. Medusa-2, which trains the target as well, is not here.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import TrainingParser, command, stream_parser
from opt_tree.training.plans import Judging


@dataclass(frozen=True)
class MedusaPlan(Judging):
    """How many heads, and judged by what."""

    depths: int = 5  # heads: layers of a draft
    hard: float = 0.5  # share that the target's best token alone gets of what is wanted
    frequent: int = 1024  # most frequent tokens over which each step is judged; 0: all
    drawn: int = 256  # others, drawn anew for each step

    def passes(self, progress: float) -> int:
        return self.depths


def new_parser() -> TrainingParser:
    return stream_parser("Train Medusa's heads from hidden states on disk.", MedusaPlan(), reduced=False)


main = command(new_parser, "opt_tree.training.heads.medusa:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from pathlib import Path

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.methods.drafters.heads.one_pass import MedusaHeads
from opt_tree.models.checkpoints import load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.training.files import working_dtype, write_checkpoint
from opt_tree.training.heads.batches import Documents
from opt_tree.training.heads.head_loss import HeadLoss, columns_of
from opt_tree.training.heads.run import Training, train_as_told


class MedusaLoss(HeadLoss):
    """Medusa's heads with what judges them; pass d is head d."""

    @staticmethod
    def passes(
        head: MedusaHeads, ids: Int[Tensor, "rows pairs"], features: Float[Tensor, "rows pairs hidden"], depths: int
    ) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the estimates by head, each where the token is that it speaks of: from the feature d pairs back."""
        count = ids.shape[1]
        return [F.pad(states, (0, 0, depth, 0))[:, :count] for depth, states in enumerate(head(features))]

    def read(self, estimates: Float[Tensor, "passes rows hidden"]) -> Float[Tensor, "passes rows hidden"]:
        return estimates


def train(args: argparse.Namespace) -> None:
    plan, target = from_fields(MedusaPlan, args), load_weights(str(args.target), working_dtype())
    text = target.config.get_text_config()
    plan.check(text.vocab_size)
    heads = MedusaHeads(text.hidden_size, text.vocab_size, plan.depths, own_output=False)
    _, output, goal = columns_of(target, args.features, plan)
    loss = MedusaLoss(heads.float(), output, goal)
    training = Training(loss, Documents(args.features, plan.tokens, (-1,)), plan, args.output)
    config = {"medusa_num_heads": plan.depths, "medusa_num_layers": 1}

    def save(kept: MedusaLoss, folder: Path) -> None:
        write_checkpoint(config, kept.head.heads.state_dict(), folder)

    train_as_told(training, args, "medusa", save)
