"""Writes docs/claims.md from docs/claims.template and the figures of results/*.json: `python docs/claims.py`.

A figure stands in the template as {{page > table > row > column}}: a file of results/, one of its tables by the title
or by its number from 1, the row whose first cells are these, joined by commas, and the column. It is written as it
stands in the JSON file; an interval as "1.90 to 2.21".
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, TEMPLATE = (Path(__file__).with_name(name) for name in ("claims.md", "claims.template"))
CITED = re.compile(r"\{\{([^{}]+)\}\}")


def figure(cited: str) -> str:
    """The figure that `page > table > row > column` names; ValueError where it names none, or several."""
    try:
        page, wanted, label, column = (part.strip() for part in cited.split(">"))
    except ValueError:
        raise ValueError(f"a figure is page > table > row > column, got {cited!r}") from None
    file = ROOT / "results" / f"{page}.json"
    if not file.is_file():
        raise ValueError(f"{cited}: there is no {file.relative_to(ROOT)}")
    # Numbers as they are written: 2.50 stays 2.50.
    tables = json.loads(file.read_text(), parse_float=str, parse_int=str)["tables"]
    titles = {str(number): table for number, table in enumerate(tables, start=1)}
    table = _one(cited, "table", [table for number, table in titles.items() if wanted in (number, table["title"])])
    rows = [row for row in table["rows"] if any(", ".join(map(str, row[:n])) == label for n in range(1, len(row)))]
    value = _one(cited, "row", rows)[_one(cited, "column", _places(table["columns"], column))]
    text = " to ".join(value) if isinstance(value, list) else value
    if not text:
        raise ValueError(f"{cited}: the cell is empty")
    return text


def _places(columns: list[str], column: str) -> list[int]:
    return [place for place, name in enumerate(columns) if name == column]


def _one(cited: str, what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        raise ValueError(f"{cited}: {len(found)} such {what}s")
    return found[0]


def page() -> str:
    """The whole page."""
    return CITED.sub(lambda found: figure(found[1]), TEMPLATE.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
