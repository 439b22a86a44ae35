"""How a command reports a mistake and says its figures: to people as a table, to machines as JSON.

Options are dataclass fields made by `option`; how they are read is the library's (`opt_tree.system.command_line`).
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from opt_tree.errors import counted
from opt_tree.system.command_line import (
    Parser,
    check_bound,
    check_bounds,
    numbers,
    option,
    parse,
    run_command,
    whole_numbers,
    work_of,
)
from opt_tree.system.files import check_writable

__all__ = [
    "Parser", "Value", "check_bound", "check_bounds", "check_writable", "counted", "machine_of", "main_of", "numbers",
    "option", "parse", "print_json", "run_command", "table", "whole_numbers", "work_of",
]  # fmt: skip

Options = TypeVar("Options")
Value = float | int | str | None
"""What a cell of a table may hold."""
_NUMBER = re.compile(r"[-+]?[\d.]|-$")


def main_of(
    program: str, options: type[Options], about: str | None, work: str, stopped: str = "stopped"
) -> Callable[..., int]:
    """Return the `main` of `python -m program`: options are read, `work` is done, --json prints what it returned.

    `work` is a function of the options by name, "module:function", which is imported when they are understood. `main`
    returns 0, or 2 for bad input; where `work` returns a number, it printed its figures itself, and that is the exit
    status. Without arguments `main` reads the command line. `stopped` is said after Ctrl-C.
    """

    def main(arguments: list[str] | None = None) -> int:
        def command() -> int:
            given = parse(options, f"python -m {program}", about, arguments)
            found = work_of(work)(given)
            if isinstance(found, int):
                return found
            print_json(getattr(given, "json", False), found)
            return 0

        return run_command(command, stopped)

    return main


def print_json(wanted: bool, figures: Any) -> None:
    """Print the figures as one line, the last one, where --json asks for it."""
    if wanted:
        print(json.dumps(figures, default=dataclasses.asdict))


def machine_of(environment: Mapping[str, Any]) -> str:
    """Where something was measured, in words; of a header that others wrote, as far as it says so."""
    threads = [counted(environment["threads"], "thread")] if "threads" in environment else []
    return ", ".join([environment.get("device", "an unknown machine"), *threads])


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
