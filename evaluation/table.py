"""The one table of all commands: rows as aligned columns, for people."""

import re
from collections.abc import Mapping, Sequence

Value = float | int | str | None
_NUMBER = re.compile(r"[-+]?[\d.]|-$")


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
