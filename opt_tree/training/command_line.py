"""What the training commands have in common on their command lines, and how they act on it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed

from opt_tree.training.data import add_data, corpus_names
from opt_tree.training.stream import OWN, Mixture, TokenDocuments
from opt_tree.training.trainer import Examples, Loss, Run, Schedule, Source, fit, load_streams

T = TypeVar("T")


def parse_epochs(text: str, names: list[str]) -> dict[str, float]:
    """Read `corpus=passes,...`; the empty text means every corpus once. Raise ValueError for an unknown corpus."""
    if not text:
        return dict.fromkeys(names, 1.0)
    epochs = {name: float(passes) for name, passes in (part.split("=") for part in text.split(","))}
    if unknown := sorted(set(epochs) - set(names)):
        raise ValueError(f"no such corpus: {', '.join(unknown)}; there are {', '.join(names)}")
    return epochs


def add_fields(parser: argparse.ArgumentParser, options: object) -> None:
    """Add one argument per field of a dataclass instance, whose values are the defaults."""
    for field in fields(options):  # type: ignore[arg-type]
        default = getattr(options, field.name)
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(default), default=default, help=str(default))


def from_fields(options: type[T], args: argparse.Namespace) -> T:
    """Build a dataclass from the arguments that `add_fields` made."""
    return options(**{field.name: getattr(args, field.name) for field in fields(options)})  # type: ignore[arg-type]


def training_parser(description: str, schedule: Schedule) -> argparse.ArgumentParser:
    """Return a command line with what every training command takes; `schedule` gives the defaults of its fields."""
    parser = argparse.ArgumentParser(description=description)
    add_data(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints and, in final/, the result")
    parser.add_argument("--cache", type=Path, help="folder of tokenised corpora (default: OUTPUT/cache)")
    parser.add_argument(
        "--epochs", default="", help=f'corpus=passes,...; "{OWN}" is the own outputs, if any (default: all once)'
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    parser.add_argument("--compile", action="store_true", help="torch.compile models and loss")
    add_fields(parser, schedule)
    return parser


def pair_parser(description: str, plan: object) -> argparse.ArgumentParser:
    """Return a command line for what is trained on a target, its drafter and answers; `plan` gives further fields."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", default="demo", help="model folder, Hub id or known name (default: %(default)s)")
    parser.add_argument("--drafter", default="eagle:demo", help="spec of what drafts (default: %(default)s)")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help=".jsonl, .jsonl.xz, .npz, folders")
    parser.add_argument("--dtype", default="auto", help="of target and head, as `load_pair` takes it")
    parser.add_argument("--output", type=Path, required=True, help="folder of what is trained")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    add_fields(parser, plan)
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """Read the command line, set threads and seed and train; what the caller got wrong becomes the parser's error."""
    args = parser.parse_args(arguments)
    if "threads" in args:
        torch.set_num_threads(args.threads)
    if "seed" in args:
        set_seed(args.seed)
    try:
        train(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def load_examples(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, slope: float, own: TokenDocuments | None = None
) -> Examples:
    """Return what a command line asks to train on; `own` is what its mixture calls "own"."""
    names = corpus_names(args.data) if own is None else [OWN, *corpus_names(args.data)]
    source = Source(args.data, args.cache or args.output / "cache", own)
    streams = load_streams(tokenizer, source, Mixture(parse_epochs(args.epochs, names), slope, args.seed))
    return streams.blocks(from_fields(Schedule, args))


def fit_as_told(args: argparse.Namespace, model: nn.Module, examples: Examples, loss: Loss | None = None) -> bool:
    """Train `model` as a command line says; return whether this process is the one that saves it."""
    run = Run(args.output, args.resume, args.compile)
    return fit(model, examples, from_fields(Schedule, args), run, loss).is_world_process_zero()
