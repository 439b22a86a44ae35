"""Distil a small drafter from a target.

    python -m experiments.embedded_family.distil --target DIR --own DIR --output DIR [--layers 2 --hidden 128 ...]

The loss mixes the cross-entropy to the target's distribution with that to its most probable token. Greedy decoding
accepts a drafted token only if it is the target's argmax, so the second term makes a draft probability the probability
of acceptance, which is what a tree's expected acceptance sums; the first carries more signal per token.
"""

import sys

from experiments.embedded_family.plans import Schedule, Shape, training_parser
from opt_tree.training.command_line import TrainingParser, command, existing, model_path


def new_parser() -> TrainingParser:
    schedule = Schedule(rows="0.9:512,0.1:2048", warmup=50)
    shape = Shape(layers=2, hidden=128, heads=2, kv_heads=2, intermediate=320)
    parser = training_parser("Distil a drafter from a target.", schedule)
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--own", type=existing, required=True, help="folder of the target's own outputs")
    parser.add_fields(shape)
    parser.add_argument("--init", type=existing, help="continue from this drafter instead of from scratch")
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the target's argmax in the loss")
    return parser


main = command(new_parser, "experiments.embedded_family.distil:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.embedded_family.lm import new_model, save_model, set_attention
from experiments.embedded_family.outputs import load_documents
from experiments.embedded_family.trainer import Loss, fit_as_told, load_examples
from opt_tree.models.checkpoints import load_tokenizer, load_weights


def distillation_loss(
    draft: Float[Tensor, "*rows vocab"], target: Float[Tensor, "*rows vocab"], hard: float
) -> Float[Tensor, ""]:
    """Return `(1 - hard)` x cross-entropy to the target's softmax plus `hard` x cross-entropy to its argmax."""
    log_probs = draft.float().log_softmax(-1)
    soft = -(target.float().softmax(-1) * log_probs).sum(-1)
    sharp = -log_probs.gather(-1, target.argmax(-1, keepdim=True)).squeeze(-1)
    return ((1 - hard) * soft + hard * sharp).mean()


def load_teacher(folder: Path, compiled: bool) -> PreTrainedModel:
    """Load a frozen bf16 target for logits and features."""
    target = load_weights(str(folder), torch.bfloat16).eval().requires_grad_(False)
    set_attention(target, compiled)
    return target.to("cuda" if torch.cuda.is_available() else "cpu")


def make_loss(target: PreTrainedModel, hard: float, compiled: bool) -> Loss:
    """Return the loss of a drafter against `target` on a batch of token rows."""
    teacher = torch.compile(target) if compiled else target
    distance = torch.compile(distillation_loss) if compiled else distillation_loss

    def loss(drafter: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            logits = teacher(input_ids=inputs["input_ids"], use_cache=False).logits
        return distance(drafter(input_ids=inputs["input_ids"], use_cache=False).logits, logits, hard)

    return loss


def train(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(str(args.target))
    examples = load_examples(args, tokenizer, 0.5, load_documents(args.own))
    target = load_teacher(args.target, args.compile)
    drafter = new_model(args, tokenizer)
    if fit_as_told(args, drafter, examples, make_loss(target, args.hard, args.compile)):
        save_model(drafter, tokenizer, args.output / "final")
