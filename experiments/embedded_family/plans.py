"""What the commands of the embedded family are told: how long, how fast, how large, and which folder of corpora.

Owns the defaults and the words of these options. Imports no torch: --help and a mistyped flag wait for nothing.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from opt_tree.training.command_line import TrainingParser
from opt_tree.training.plans import read_pairs

VARIABLE = "OPT_TREE_CORPUS"
OWN = "own"
"""The name under which a mixture counts a model's own outputs."""


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and in which portions a model is trained; `batch` and `micro_batch` count tokens.

    `rows` lists share:row length, in order: short rows are cheap on a CPU, long ones teach the late positions.
    """

    tokens: int = 0  # 0: the whole stream
    batch: int = 8192
    micro_batch: int = 2048  # of one forward pass of one process
    block: int = 2048
    rows: str = "0.62:256,0.34:512,0.04:2048"
    lr: float = 4e-3
    warmup: int = 100
    save_steps: int = 250  # between checkpoints, each with what is held out judged
    eval_blocks: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.row_lengths  # refused before anything is read

    @property
    def row_lengths(self) -> list[tuple[float, int]]:
        """Return `rows` as (share, length) pairs."""
        return read_pairs(self.rows, ":", float, int)


@dataclass(frozen=True)
class Shape:
    """The architecture of a new model; heads are `head_dim` wide whatever `hidden` is."""

    layers: int = 12
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512


def training_parser(description: str, schedule: Schedule) -> TrainingParser:
    """Return a command line with what every training command takes; `schedule` gives the defaults of its fields."""
    parser = TrainingParser(description)
    add_data(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints and, in final/, the result")
    parser.add_argument("--cache", type=Path, help="folder of tokenised corpora (default: OUTPUT/cache)")
    parser.add_argument(
        "--epochs", default="", help=f'corpus=passes,...; "{OWN}" is the own outputs, if any (default: all once)'
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    parser.add_argument("--compile", action="store_true", help="torch.compile models and loss")
    parser.add_fields(schedule)
    return parser


def read_part(text: str) -> tuple[int, int]:
    """Read `which/of how many`, from 0."""
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"takes a part of how many, from 0, such as 0/2, got {text}")
    return part, parts


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add --data, which must name a corpus folder; $OPT_TREE_CORPUS does as well."""
    parser.add_argument(
        "--data", type=_folder, default=os.environ.get(VARIABLE, ""), help=f"corpus folder (default: ${VARIABLE})"
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(
            f'name a folder of corpora, here or in ${VARIABLE}: chat_*.jsonl.xz with {{"messages": [...]}} and '
            'text_*.jsonl.xz with {"text": ...} a line; '
            "opt_tree/models/embedded/README.md says where to get those used here"
        )
    try:
        corpus_names(Path(text))
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def corpus_names(folder: Path) -> list[str]:
    """Return the corpora of a folder, sorted; raise FileNotFoundError if there is none."""
    names = sorted(path.name.removesuffix(".jsonl.xz") for path in folder.glob("*_*.jsonl.xz"))
    if not names:
        raise FileNotFoundError(f"no chat_*.jsonl.xz or text_*.jsonl.xz in {folder}")
    return names
