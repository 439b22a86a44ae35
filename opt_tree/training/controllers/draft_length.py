"""Train AdaEAGLE's predictor of draft lengths (arXiv:2412.18910) for a target and its EAGLE head.

    python -m opt_tree.training.controllers.draft_length --target demo --drafter eagle:demo \\
        --answers FILE_OR_FOLDER... --output DIR

The labels are the target's own answers unrolled: behind every token of an answer, how many tokens of the head's best
chain the answer goes on with. Every position of a document is unrolled in one batch, as deep as `--longest`
(`opt_tree.training.heads.eagle.passes`), and counts as far as the answer goes. Use answers to prompts that the head was
not trained on: to others its chains are longer. A prediction that is too short costs `--penalty` times as much as one
that is too long (equation 4; the paper does not say the number). Target and head are frozen; one document in ten is
held out.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import TrainingParser, command, pair_parser


@dataclass(frozen=True)
class LengthPlan:
    """How a predictor is trained."""

    longest: int = 8  # tokens of the longest chain
    penalty: float = 2.0  # of a prediction that is too short, over one that is too long
    width: int = 64  # of the perceptron
    epochs: int = 8
    batch: int = 512  # labels of a step
    lr: float = 2e-3  # highest learning rate; it falls to nothing by a cosine
    seed: int = 0


def new_parser() -> TrainingParser:
    return pair_parser("Train a predictor of draft lengths for a target and its EAGLE head.", LengthPlan())


main = command(new_parser, "opt_tree.training.controllers.draft_length:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from opt_tree.methods.controllers.predicted import KIND, LAST, LengthPredictor
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.models.text_states import text_states
from opt_tree.system.command_line import from_fields
from opt_tree.tools.pair import Pair, load_pair
from opt_tree.training.answers import Example, read_examples
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.eagle import passes
from opt_tree.training.optimizer import epochs
from opt_tree.training.plans import Cut

HELD_OUT = 10
"""One document in so many."""
DROPOUT = 0.5
"""Of what goes in: with less, the predictor learns the tokens by heart."""


class Labels(NamedTuple):
    """What a chain drafted at each root would have come to, and what is known there."""

    features: Float[Tensor, "roots hidden"]
    """Of the token before the root."""
    tokens: Int[Tensor, " roots"]
    """That token."""
    lengths: Int[Tensor, " roots"]
    """Accepted tokens."""


@torch.no_grad()
def chain_lengths(
    drafter: EagleDrafter, features: dict[int, Tensor], tokens: Int[Tensor, " tokens"], first: int, longest: int
) -> Int[Tensor, " roots"]:
    """Return how far the chain behind each token from place `first` (1 or more) on agrees with the tokens that follow.

    `features`: the target's, [1, tokens, hidden] each, of the layers that the head reads.
    """
    head: Any = drafter.lm.model.base_model
    inputs = drafter.inputs({layer: states[0, :-1] for layer, states in features.items()})
    lengths = torch.zeros(len(tokens) - 1, dtype=torch.long, device=tokens.device)
    alive = torch.arange(first - 1, len(tokens) - 2, device=tokens.device)  # chains of which all agreed so far
    for depth, estimates in enumerate(passes(head, tokens[None, 1:], inputs[None], longest)):
        # Pair i is the root at token i + 1; so many passes below it pair i + depth says token i + depth + 2.
        alive = alive[alive + depth + 2 < len(tokens)]
        alive = alive[drafter.best(estimates[0, alive + depth]) == tokens[alive + depth + 2]]
        lengths[alive] += 1
    return lengths[first - 1 : -1]


def label(pair: Pair, examples: Iterable[Example], longest: int) -> Labels:
    """Unroll the head along answers: a label for each token from the last of the prompt to the last but one."""
    drafter = pair.drafter.bare
    if not isinstance(drafter, EagleDrafter):
        raise ValueError(f"{drafter.describe()} is no EAGLE head: only such a one is unrolled in one batch")
    found: list[Labels] = []
    layers = tuple(dict.fromkeys((LAST, *drafter.features)))
    for example in tqdm(list(examples), desc="labels", unit="answer", disable=None):
        tokens, first = torch.tensor(example.tokens, device=pair.target.device), max(example.answer - 1, 1)
        features = text_states(pair.target.model, tokens[None], layers)
        lengths = chain_lengths(drafter, features, tokens, first, longest)
        found.append(Labels(features[LAST][0, first - 1 : -2], tokens[first - 1 : -2], lengths))
    if not found:
        raise ValueError("there are no answers to make labels of")
    return Labels(*(torch.cat(parts).clone() for parts in zip(*found, strict=True)))


def loss_of(
    predicted: Float[Tensor, " #roots"], lengths: Int[Tensor, " roots"], penalty: float
) -> Float[Tensor, " roots"]:
    """The distance from what is right, times `penalty` where it is too short (equation 4)."""
    off = predicted - lengths
    return off.abs() * torch.where(off < 0, penalty, 1.0)


def constant(lengths: Int[Tensor, " roots"], penalty: float) -> float:
    """The one number of least loss: a quantile."""
    return float(lengths.float().quantile(penalty / (1 + penalty)))


def fit(labels: Labels, embed: nn.Module, plan: LengthPlan) -> LengthPredictor:
    torch.manual_seed(plan.seed)
    predictor = LengthPredictor(labels.features.shape[1], plan.longest, plan.width)
    with torch.no_grad():
        predictor.leave.bias.fill_(constant(labels.lengths, plan.penalty))

    def loss_of_rows(rows: Tensor) -> Tensor:
        batch = Labels(*(part[rows] for part in labels))
        known = (F.dropout(part.float(), DROPOUT) for part in (embed(batch.tokens), batch.features))
        return loss_of(predictor(*known), batch.lengths, plan.penalty).mean()

    optimizer = torch.optim.AdamW(predictor.parameters(), plan.lr, weight_decay=0.05)
    for _ in epochs(optimizer, loss_of_rows, len(labels.lengths), plan.batch, plan.epochs):
        pass
    return predictor.eval()


@torch.no_grad()
def judge(predictor: LengthPredictor, embed: nn.Module, labels: Labels, penalty: float) -> float:
    """Return the mean loss of a predictor."""
    found = []
    for rows in torch.arange(len(labels.lengths)).split(4096):  # embedded in float32, all at once may be gigabytes
        tokens, features, lengths = (part[rows] for part in (labels.tokens, labels.features, labels.lengths))
        found.append(loss_of(predictor(embed(tokens).float(), features.float()), lengths, penalty))
    return float(torch.cat(found).mean())


def save(predictor: LengthPredictor, facts: dict[str, Any], folder: Path) -> None:
    """Write a predictor in bf16, with what is known of it."""
    config = {"kind": KIND, "hidden": predictor.hidden, "longest": predictor.longest, "width": predictor.width}
    write_checkpoint(config | facts, predictor.state_dict(), folder)


def train(args: argparse.Namespace) -> None:
    """Make labels, train, say what came of it, and write."""
    plan = from_fields(LengthPlan, args)
    pair = load_pair(args.target, args.drafter, dtype=args.dtype)
    examples = list(read_examples(args.answers, pair.tokenizer, Cut(shortest=2)))
    kept = [example for place, example in enumerate(examples) if place % HELD_OUT]
    labels, heldout = (label(pair, some, plan.longest) for some in (kept, examples[::HELD_OUT]))
    embed = pair.target.model.get_input_embeddings()
    predictor = fit(labels, embed, plan)
    simplest = torch.tensor([constant(labels.lengths, plan.penalty)])
    facts = {
        "drafter": args.drafter,
        "labels": len(labels.lengths),
        "heldout": len(heldout.lengths),
        "mean_length": round(float(heldout.lengths.float().mean()), 3),
        "penalty": plan.penalty,
        "loss": round(judge(predictor, embed, heldout, plan.penalty), 4),
        "loss_of_a_constant": round(float(loss_of(simplest, heldout.lengths, plan.penalty).mean()), 4),
    }
    save(predictor, facts, args.output)
    print(json.dumps(facts))
