"""What the training commands have in common on their command lines, and how they act on it.

Owns what a mistake looks like: one line, exit status 2, and nothing on disk has changed.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from opt_tree.system import command_line
from opt_tree.system.command_line import work_of
from opt_tree.system.files import check_replaceable, check_writable
from opt_tree.system.interrupted import at_once

_MAY_BE_ZERO = {"drawn", "feature", "frequent", "hard", "noise", "threshold", "warmup"}


def existing(text: str) -> Path:
    """Read the name of a file or folder that must be there when the command runs."""
    return Path(text).expanduser()


def model_path(text: str) -> Path:
    """Read the name of a model: a folder, a Hub id or a known name."""
    return Path(text)


class TrainingParser(command_line.Parser):
    """A parser that also checks what numbers and names mean."""

    def __init__(self, description: str) -> None:
        super().__init__(None, description)

    def check(self, args: argparse.Namespace) -> None:
        """Find models and files; numbers are finite and above 0, or 0 where that means something. Else ValueError."""
        for action in self._actions:
            value, name = getattr(args, action.dest, None), f"--{action.dest.replace('_', '-')}"
            if value is None:
                continue
            if action.type in (int, float):
                least = "at least 0" if action.default == 0 or action.dest in _MAY_BE_ZERO else "above 0"
                if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                    raise ValueError(f"{name} must be {least}, got {value}")
            elif action.type is existing:
                for path in value if isinstance(value, list) else [value]:
                    if not path.exists():
                        raise ValueError(f"{name}: no file or folder at {path}")
            elif action.type is model_path:
                from opt_tree.models.checkpoints import check_is_folder
                from opt_tree.models.named import resolve

                folder = resolve(str(value), "draft" if action.dest == "draft" else "target")
                check_is_folder(folder)
                setattr(args, action.dest, Path(folder))


def pair_parser(description: str, plan: object) -> TrainingParser:
    """Return a command line for what is trained on a target, its drafter and answers; `plan` gives further fields."""
    parser = TrainingParser(description)
    parser.add_argument("--target", default="demo", help="model folder, Hub id or known name (default: %(default)s)")
    parser.add_argument("--drafter", default="eagle:demo", help="spec of what drafts (default: %(default)s)")
    parser.add_argument("--answers", type=existing, nargs="+", required=True, help=".jsonl, .jsonl.xz, .npz, folders")
    parser.add_argument("--dtype", default="auto", help="of target and head, as `load_pair` takes it")
    parser.add_argument("--output", type=Path, required=True, help="folder of what is trained")
    parser.set_defaults(replaces=True)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_fields(plan)
    return parser


def command(new_parser: Callable[[], TrainingParser], work: str) -> Callable[..., int]:
    """Return the `main` of a command: a function of its arguments, by default those of the process.

    `work` is a function of what was asked, "module:function", which is imported when the command line is understood.
    """
    return lambda arguments=None: run_command(new_parser(), work_of(work), arguments)


def run_command(
    parser: TrainingParser, work: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None = None
) -> int:
    """Read the command line, set threads and seed and work; return the exit status.

    `replaces` among the defaults of the parser: the folder --output is replaced as a whole.
    """

    def command() -> None:
        args = parser.parse_args(arguments)
        with at_once():
            import torch
            from transformers import set_seed

        command_line.no_bars_in_logs(wanted=True)
        parser.check(args)
        if getattr(args, "output", None) is not None:
            check_writable(Path(args.output), folder=True)
            if getattr(args, "replaces", False):
                check_replaceable(Path(args.output))
        if "threads" in args:
            torch.set_num_threads(args.threads)
        if "seed" in args:
            set_seed(args.seed)
        work(args)

    return command_line.run_command(command)
