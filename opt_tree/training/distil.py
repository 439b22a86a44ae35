"""Distil a small drafter from a target.

    python -m opt_tree.training.distil --target DIR --own DIR --output DIR [--layers 2 --hidden 128 ...]

The loss mixes the cross-entropy to the target's distribution with that to its most probable token. Greedy decoding
accepts a drafted token only if it is the target's argmax, so the second term makes a draft probability the probability
of acceptance, which is what a tree's expected acceptance sums; the first carries more signal per token.
"""

import argparse
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from opt_tree.training.data import DEFAULT_DATA, corpus_names
from opt_tree.training.lm import Shape, save_model, set_attention
from opt_tree.training.outputs import load_documents
from opt_tree.training.stream import OWN, Mixture
from opt_tree.training.trainer import (
    Loss,
    Run,
    Schedule,
    Source,
    add_fields,
    fit,
    from_fields,
    load_streams,
    parse_epochs,
)


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
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
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


def main() -> None:
    """Distil a drafter from the command line."""
    parser = argparse.ArgumentParser(description="Distil a drafter from a target.")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA), help="corpus folder")
    parser.add_argument("--target", type=Path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--own", type=Path, required=True, help="folder of the target's own outputs")
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints, cache and final model")
    parser.add_argument("--init", type=Path, help="continue from this drafter instead of from scratch")
    parser.add_argument("--epochs", default="", help='corpus=passes,...; "own" is the own outputs (default: all once)')
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the target's argmax in the loss")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    parser.add_argument("--compile", action="store_true", help="torch.compile target, drafter and loss")
    add_fields(parser, Shape(layers=2, hidden=128, heads=2, kv_heads=2, intermediate=320))
    add_fields(parser, Schedule(rows="0.9:512,0.1:2048", warmup=50))
    args = parser.parse_args()
    schedule = from_fields(Schedule, args)
    set_seed(schedule.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        source = Source(args.data, args.output / "cache", load_documents(args.own))
        epochs = parse_epochs(args.epochs, [OWN, *corpus_names(args.data)])
        streams = load_streams(tokenizer, source, Mixture(epochs, 0.5, schedule.seed))
        target = load_teacher(args.target, args.compile)
        if args.init:
            drafter = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        else:
            drafter = from_fields(Shape, args).build(tokenizer)
        set_attention(drafter, args.compile)
        loss = make_loss(target, args.hard, args.compile)
        trainer = fit(drafter, streams.blocks(schedule), schedule, Run(args.output, args.resume, args.compile), loss)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if trainer.is_world_process_zero():
        save_model(drafter, tokenizer, args.output / "final")


if __name__ == "__main__":
    main()
