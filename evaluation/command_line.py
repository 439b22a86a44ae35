"""How a command reads its options, reports a mistake, and says its figures to a machine.

Options are the fields of a dataclass: a default is written once, and commands share options by sharing a base class.
Knows nothing of what the options mean.
"""

import argparse
import dataclasses
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

Options = TypeVar("Options")


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Make a field that `add_options` can turn into an option; `metadata` goes to argparse.

    `aliases` maps other flags to the text that is put before what they are given: {"--draft-model-path": "lm:"}.
    """
    return field(default=default, metadata={"help": help, **metadata})


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add an option for each field of a dataclass made of `option`s."""
    hints = get_type_hints(options)
    for known in fields(options):
        given: dict[str, Any] = {**known.metadata, "default": known.default}
        aliases: Mapping[str, str] = given.pop("aliases", {})
        if hints[known.name] is bool:
            given["action"] = "store_true"
        else:
            given.setdefault("type", _scalar(hints[known.name]))
            given["metavar"] = None if "choices" in given else known.name.rpartition("_")[2].upper()
            if known.default is not None and known.default != ():
                given["help"] += " (default: %(default)s)"
        group = parser.add_mutually_exclusive_group() if aliases else parser
        group.add_argument(*_spellings(f"--{known.name}"), **given)
        for flag, before in aliases.items():
            group.add_argument(
                *_spellings(flag),
                dest=known.name,
                type=before.__add__,
                default=argparse.SUPPRESS,
                metavar="PATH",
                help=f"--{known.name} {before}PATH",
            )


def _spellings(flag: str) -> list[str]:
    """Published: --max_depth but --bench-name. Both spellings of every name are taken."""
    name = flag.removeprefix("--")
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}")))


def _scalar(hint: Any) -> type:
    """int from `int | None`, str from `str`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return hint


def numbers(text: str) -> tuple[float, ...]:
    """Read a comma list of numbers."""
    try:
        return tuple(float(part) if "." in part or "e" in part else int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"not a comma list of numbers: {text!r}") from error


def at_least(options: Any, **least: int) -> None:
    """Raise ValueError for a field that is given and below its least value."""
    for name, value in least.items():
        if (given := getattr(options, name)) is not None and given < value:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}, got {given}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # one line, like every other mistake, instead of the usage and then the line


def make_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser whose mistakes are ValueErrors; the first line of `about` is the help's description."""
    return _Parser(program, description=(about or "").partition("\n")[0], allow_abbrev=False)


def parse(options: type[Options], program: str, about: str | None, arguments: list[str] | None) -> Options:
    """Read a command line that is made of a dataclass's fields alone."""
    parser = make_parser(program, about)
    add_options(parser, options)
    return options(**vars(parser.parse_args(arguments)))


def run_command(command: Callable[[], int]) -> int:
    """Return a command's exit status; what the caller got wrong is one line on stderr and status 2."""
    try:
        return command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def print_json(wanted: bool, figures: Any) -> None:
    """Print the figures as one line, the last one, where --json asks for it."""
    if wanted:
        print(json.dumps(figures, default=dataclasses.asdict))
