"""How a command reads its options, reports a mistake, and says its figures: to people as a table, to machines as JSON.

Options are the fields of a dataclass, read by transformers' `HfArgumentParser`: a default is written once, and commands
share options by sharing a base class. Knows nothing of what the options mean.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from transformers import HfArgumentParser

Options = TypeVar("Options")
Value = float | int | str | None
"""What a cell of a table may hold."""
_NUMBER = re.compile(r"[-+]?[\d.]|-$")


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field that is an option of a command; `metadata` goes to argparse.

    The option is spelled with hyphens or underscores: --max-depth, --max_depth. Several values are a list, whose
    default is a tuple.
    """
    made = {"default_factory": lambda: list(default)} if isinstance(default, tuple) else {"default": default}
    return dataclasses.field(metadata={"help": help, **metadata}, **made)


def numbers(text: str) -> tuple[float, ...]:
    """Read a comma list of numbers."""
    try:
        return tuple(float(part) if "." in part or "e" in part else int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"not a comma list of numbers: {text!r}") from error


def whole_numbers(text: str, most: int | None = None) -> tuple[int, ...]:
    """Read a comma list of whole numbers, none above `most`."""
    found = numbers(text)
    for number in found:
        if number != int(number):
            raise ValueError(f"not a whole number: {number:g} in {text!r}")
        if most is not None and number > most:
            raise ValueError(f"at most {most}, got {int(number)} in {text!r}")
    return tuple(map(int, found))


def at_least(options: Any, **least: int) -> None:
    """Raise ValueError for a field that is given and below its least value."""
    for name, value in least.items():
        if (given := getattr(options, name)) is not None and given < value:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}, got {given}")


def at_most(options: Any, **most: int) -> None:
    """Raise ValueError for a field that is given and above its greatest value."""
    for name, value in most.items():
        if (given := getattr(options, name)) is not None and given > value:
            raise ValueError(f"--{name.replace('_', '-')} must be at most {value}, got {given}")


def check_writable(path: Path) -> None:
    """Raise ValueError unless `path` can be written."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, "", []) and action.default is not False
        return super()._get_help_string(action) if shown else action.help


class Parser(HfArgumentParser):
    """A command line of dataclasses; its mistakes are ValueErrors of one line.

    Args:
        program: How the command is called, for its help.
        about: Its documentation; the first line is the help's description.
        options: Dataclasses whose fields are made by `option`.
    """

    def __init__(self, program: str, about: str | None, *options: type) -> None:
        description = (about or "").partition("\n")[0]
        super().__init__(options, prog=program, description=description, allow_abbrev=False, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # one line, like every other mistake, instead of the usage and then the line


def parse(options: type[Options], program: str, about: str | None, arguments: list[str] | None) -> Options:
    """Read a command line that is made of a dataclass's fields alone."""
    return options(**vars(Parser(program, about, options).parse_args(arguments)))


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


@contextmanager
def as_command() -> Iterator[None]:
    """Let SIGTERM end what runs as Ctrl-C does (locks and temporary files go), and make each warning one line."""
    formatting = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    # Of several processes the launcher ends all, and none waits for the others then. Threads get no signals.
    alone = "WORLD_SIZE" not in os.environ and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if alone else None
    try:
        yield
    finally:
        warnings.formatwarning = formatting
        if alone:
            signal.signal(signal.SIGTERM, before)


def run_command(command: Callable[[], int], stopped: str = "stopped") -> int:
    """Return a command's exit status; what the caller got wrong is one line on stderr and status 2."""
    try:
        with as_command():
            return command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130


def main_of(
    program: str, options: type[Options], about: str | None, run: Callable[[Options], Any]
) -> Callable[..., int]:
    """Return the `main` of `python -m program`: options are read, `run` does the work, --json prints what it returned.

    `main` returns 0, or 2 for bad input; without arguments it reads the command line.
    """

    def main(arguments: list[str] | None = None) -> int:
        def command() -> int:
            given = parse(options, f"python -m {program}", about, arguments)
            print_json(getattr(given, "json", False), run(given))
            return 0

        return run_command(command)

    return main


def print_json(wanted: bool, figures: Any) -> None:
    """Print the figures as one line, the last one, where --json asks for it."""
    if wanted:
        print(json.dumps(figures, default=dataclasses.asdict))


def table(rows: Sequence[Mapping[str, Value]], floats: str = ".2f") -> str:
    """Lay out rows of one shape or several; the keys are the heads, in order of first appearance.

    Floats are shown as `floats` says, None as nothing. Numbers stand at the right of their column, texts at the left;
    a column that no row fills is left out.

        nodes  tokens/step  tree
            8         3.11  opt:0.2
           60         4.50  binary
    """
    heads = list(dict.fromkeys(key for row in rows for key in row))
    columns = [[_text(row.get(head), floats) for row in rows] for head in heads]
    lines: list[list[str]] = [[] for _ in range(len(rows) + 1)]
    for head, column in zip(heads, columns, strict=True):
        filled = [text for text in column if text]
        if not any(text != "-" for text in filled):
            continue
        width = max(len(head), *map(len, column))
        right = all(_NUMBER.match(text) for text in filled)
        for line, text in zip(lines, (head, *column), strict=True):
            line.append(text.rjust(width) if right else text.ljust(width))
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _text(value: Value, floats: str) -> str:
    if value is None:
        return ""
    return f"{value:{floats}}" if isinstance(value, float) else str(value)
