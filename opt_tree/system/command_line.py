"""Options of a command as the fields of dataclasses, read by argparse.

A default is written once, and commands share options by sharing a base class. Every mistake is one line. Knows nothing
of what the options mean, and needs the standard library alone: --help and a mistyped flag wait for nothing.

A command's file is therefore in two parts. First comes what can be asked, and `main`; below it what the work needs is
imported. Run as a command, the file ends at `main`, which names the work as "module:function" and imports it once the
command line is understood.
"""

import argparse
import dataclasses
import difflib
import io
import math
import pkgutil
import signal
import socket
import sys
from collections.abc import Callable
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from opt_tree.system.interrupted import Terminated, as_command, at_once

Options = TypeVar("Options")
_BOUNDS = ("least", "most")


def option(default: Any, help: str | Callable[[], str], **metadata: Any) -> Any:
    """Return a dataclass field that is an option of a command; `metadata` goes to argparse, `aliases` are more names.

    The option is spelled with hyphens or underscores: --max-depth, --max_depth. Several values are a list, whose
    default is a tuple. `help` is a function where a list must be looked up for it. `least` and `most` are what
    `check_bounds` checks. A subclass that sets another default keeps the rest.
    """
    made = {"default_factory": lambda: list(default)} if isinstance(default, tuple) else {"default": default}
    return dataclasses.field(metadata={"help": help, **metadata}, **made)


def _metadata(kind: type, field: str) -> list[Any]:
    """Return what a field is told in a dataclass and in those that it extends, the nearest first."""
    kinds = [vars(one).get("__dataclass_fields__", {}) for one in kind.__mro__]
    return [fields[field].metadata for fields in kinds if field in fields]


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, "", []) and action.default is not False
        return super()._get_help_string(action) if shown else action.help


class Parser(argparse.ArgumentParser):
    """A command line of dataclasses; its mistakes are ValueErrors of one line.

    Args:
        program: How the command is called, for its help; None: as it was.
        about: Its documentation; the first line is the help's description.
        options: Dataclasses whose fields are made by `option`.
    """

    def __init__(self, program: str | None, about: str | None, *options: type) -> None:
        description = (about or "").partition("\n")[0]
        self._given: list[str] = []
        self._looked_up: dict[argparse.Action, Callable[[], str]] = {}
        super().__init__(prog=program, description=description, allow_abbrev=False, formatter_class=_Help)
        for kind in options:
            self._add_options(kind)

    def add_fields(self, defaults: object) -> None:
        """Add an option for each field of a dataclass instance, whose values are the defaults."""
        self._add_options(type(defaults))
        self.set_defaults(**vars(defaults))
        for action in self._actions:
            action.help = action.help or "%(default)s"

    def _add_options(self, kind: Any) -> None:
        """Add an option for each field: a switch for a bool, else what its type says, None aside."""
        types = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            given = dict(next(filter(None, _metadata(kind, field.name)), {}))
            names = [f"--{field.name.replace('_', '-')}", f"--{field.name}", *given.pop("aliases", ())]
            given = {key: value for key, value in given.items() if key not in _BOUNDS}
            of = types[field.name]
            found = [one for one in get_args(of) if one is not NoneType]
            if of is bool:
                given |= {"action": "store_true"}
            elif get_origin(of) is list:
                given |= {"type": found[0], "nargs": "+"}
            else:  # int | str is read as text: the field's class makes a number of it
                given = {"type": str if str in found else found[0] if found else of} | given
            given["default"] = field.default
            if field.default_factory is not dataclasses.MISSING:
                given["default"] = field.default_factory()
            self.add_argument(*dict.fromkeys(names), **given)

    def add_argument(self, *names: Any, **given: Any) -> argparse.Action:
        """As argparse does; `help` may be a function, which is called where help is asked for."""
        looked_up = given.pop("help") if callable(given.get("help")) else None
        action = super().add_argument(*names, **given)
        if looked_up:
            self._looked_up[action] = looked_up
        return action

    def format_help(self) -> str:
        """As argparse does, and look up what is listed in it."""
        for action, listed in self._looked_up.items():
            action.help = listed()
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, and remember what was given."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._given, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(self.hinted(message))  # one line, like every other mistake, without the usage

    def hinted(self, message: str) -> str:
        """Return a message, with the option that was meant where a word that was given is nearly one."""
        given = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        wrong = [word for word in given if word not in self._option_string_actions]
        known = [option for option in self._option_string_actions if "_" not in option]
        near = difflib.get_close_matches(wrong[0], known, 1) if wrong else []
        return f"{message}; did you mean {near[0]}?" if near else message


def parse(options: type[Options], program: str, about: str | None, arguments: list[str] | None) -> Options:
    """Read a command line that is made of a dataclass's fields alone."""
    given = Parser(program, about, options).parse_args(arguments)
    with at_once():  # what options are checked against is imported
        return options(**vars(given))


def from_fields(options: type[Options], given: argparse.Namespace) -> Options:
    """Build a dataclass from the options that its fields made."""
    return options(**{field.name: getattr(given, field.name) for field in dataclasses.fields(options)})  # type: ignore[arg-type]


def work_of(name: str) -> Callable[..., Any]:
    """Return what a command does, "module:function". It is imported when it is called, behind the command line."""

    def work(*given: Any) -> Any:
        with at_once():
            found = pkgutil.resolve_name(name)
        if "transformers" in sys.modules:
            no_bars_in_logs(wanted=True)
        return found(*given)

    return work


def run_command(command: Callable[[], int | None], stopped: str = "stopped") -> int:
    """Return a command's exit status, where it is not 0 after one line on stderr.

    2: the caller got something wrong, or there is no memory for it. 130 and 143: Ctrl-C and SIGTERM; they leave no lock
    and no half-written file.
    """
    try:
        with as_command():
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # what an ASCII terminal or a Windows file cannot show
            if "transformers" in sys.modules:
                no_bars_in_logs(wanted=True)
            return command() or 0
    except (ValueError, OSError) as error:
        status, told = 2, f"error: {' '.join(str(error).split())}"
    except (RuntimeError, MemoryError) as error:
        from opt_tree.system.memory import out_of_memory

        if (said := out_of_memory(error)) is None:
            raise
        status, told = 2, f"error: {said}"
    except KeyboardInterrupt:
        status, told = 128 + signal.SIGINT, stopped
    except Terminated:
        status, told = 128 + signal.SIGTERM, stopped
    print(told, file=sys.stderr)  # here, where what was at work is gone, and its bar with it
    return status


def no_bars_in_logs(wanted: bool = False) -> None:
    """Leave out transformers' bars of loading weights where stderr is no terminal, and where they are not `wanted`."""
    from transformers.utils import logging  # here: a command line alone needs no transformers

    if not (wanted and sys.stderr.isatty()):
        logging.disable_progress_bar()


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


def check_bounds(options: Any) -> None:
    """Raise ValueError for an option that is given and is not between its `least` and its `most`."""
    for field in dataclasses.fields(options):
        if bounds := {bound: field.metadata[bound] for bound in _BOUNDS if bound in field.metadata}:
            check_bound(field.name, getattr(options, field.name), **bounds)


def check_bound(name: str, given: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise ValueError for what is given, not None, and not between two numbers."""
    if given is not None and not least <= given <= most:
        bound = f"most {most}" if given > most else f"least {least}"
        raise ValueError(f"--{name.replace('_', '-')} must be at {bound}, got {given}")


def check_port(host: str, port: int) -> None:
    """Raise ValueError where nothing can be served: before minutes of loading."""
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:  # the second: no port has this number
        why = getattr(error, "strerror", error)
        raise ValueError(f"cannot serve at {host}:{port}: {why}; --port names another") from None
