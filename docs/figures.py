"""Writes README.md, RESULTS.md and docs/claims.md from docs/templates and the figures of results/*.json.

`python docs/figures.py` writes them. In a template the figures stand in double braces:

    {{page > table > row > column}}      a cell: a file of results/, one of its tables by its title or its number
                                         from 1, the row whose first cells are these, joined by commas, the column
    {{row: page > table > row > column ;; column}}    several cells of a row, as cells of a table
    {{least: page > table > column}}, {{most: ...}}   of all rows
    {{lowest: page > table > column}}    the least lower edge of a column of intervals
    {{more: A ;; B}}, {{less: A ;; B}}   by how many per cent A is more, or less, than B
    {{minus: A ;; B}}, {{times: A ;; B}} A - B and A / B
    {{share: A ;; B}}                    A in per cent of B
    {{kept: A ;; B}}                     per cent of B's accepted tokens that A has; A and B are tokens a step
    {{dates: all}}                       from the first to the last day of any measurement
    {{given: 17}}                        a figure that is measured on none of these pages: a paper's, or a setting
    {{above: A ;; B ;; C}}               nothing; refused unless A > B > C, which the sentence says; one may be a number
    {{above: minus: A ;; B || C}}        the same of what is computed, one behind the other
    {{same: A ;; B}}                     nothing; refused unless A = B, which the sentence says
    {{chance: A}}, {{beyond: A}}         nothing; refused unless the interval A contains 0, or lies above 0
    {{behind: A}}                        nothing; refused unless the interval A lies below 0
    {{chance: A ;; 1}}                   the same beside another number, of all three
    {{overlap: A ;; B}}, {{apart: A ;; B}}    nothing; refused unless A and B overlap, or A lies above B

A cell is written as it stands in the JSON file; an interval as "1.90 to 2.21".
"""

import argparse
import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": ".", "RESULTS.md": ".", "claims.md": "docs"}
"""The pages, and the folders that they are written to."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
CITED = re.compile(r"\{\{([^{}]+)\}\}")


@functools.cache
def _tables(text: str) -> list[dict[str, Any]]:
    return json.loads(text, parse_float=str, parse_int=str)["tables"]


def table_of(cited: str, page: str, wanted: str, results: Path) -> dict[str, Any]:
    """A table of a page of results, its numbers as they are written: 2.50 stays 2.50."""
    file = results / f"{page}.json"
    if not file.is_file():
        raise ValueError(f"{cited}: there is no results/{file.name}")
    tables = _tables(file.read_text())
    titles = {str(number): table for number, table in enumerate(tables, start=1)}
    return _one(cited, "table", [table for number, table in titles.items() if wanted in (number, table["title"])])


def figure(cited: str, results: Path = ROOT / "results") -> str:
    """The figure that `page > table > row > column` names; ValueError where it names none, or several."""
    try:
        page, wanted, label, column = (part.strip() for part in cited.split(">"))
    except ValueError:
        raise ValueError(f"a figure is page > table > row > column, got {cited!r}") from None
    table = table_of(cited, page, wanted, results)
    rows = [row for row in table["rows"] if any(", ".join(map(str, row[:n])) == label for n in range(1, len(row)))]
    return _shown(cited, _one(cited, "row", rows)[_one(cited, "column", _places(table["columns"], column))])


def _shown(cited: str, value: str | list[str]) -> str:
    text = " to ".join(value) if isinstance(value, list) else value
    if not text:
        raise ValueError(f"{cited}: the cell is empty")
    return f"{int(text):,}" if text.isdigit() else text


def _places(columns: list[str], column: str) -> list[int]:
    return [place for place, name in enumerate(columns) if name == column]


def _one(cited: str, what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        raise ValueError(f"{cited}: {len(found)} such {what}s")
    return found[0]


def row(cited: str, results: Path) -> str:
    first, *columns = _parts(cited)
    where = first.rpartition(">")[0]
    return " | ".join(figure(one, results) for one in [first, *(f"{where}> {column}" for column in columns)])


def column(cited: str, results: Path) -> list[str]:
    """All figures of a column that has them."""
    page, wanted, name = (part.strip() for part in cited.split(">"))
    table = table_of(cited, page, wanted, results)
    place = _one(cited, "column", _places(table["columns"], name))
    return [_shown(cited, cells[place]) for cells in table["rows"] if cells[place]]


def _parts(cited: str) -> list[str]:
    return [part.strip() for part in cited.split(";;")]


def numbers(cited: str, results: Path) -> list[float]:
    """The figures as numbers; ValueError where one is none."""
    found = []
    for one in [part.strip() for part in cited.split("||")] if "||" in cited else _parts(cited):
        try:
            found.append(float(one if NUMBER.fullmatch(one) else written(one, results).replace(",", "")))
        except ValueError as error:
            raise ValueError(f"{one} is no number that can be computed with: {error}") from None
    return found


def edges(cited: str, results: Path) -> list[str]:
    """The lower edges of a column of intervals."""
    return [cell.partition(" to ")[0] for cell in column(cited, results)]


def above(cited: str, results: Path) -> str:
    known = numbers(cited, results)
    if not all(larger > smaller for larger, smaller in pairwise(known)):
        raise ValueError(f"a sentence says that each is above the next, and they are {known}: {cited}")
    return ""


def same(cited: str, results: Path) -> str:
    if len(known := {figure(one, results) for one in _parts(cited)}) != 1:
        raise ValueError(f"a sentence says that all are the same, and they are {sorted(known)}: {cited}")
    return ""


def interval(cited: str, results: Path) -> tuple[float, float]:
    try:
        low, high = map(float, figure(cited, results).split(" to "))
    except ValueError as error:
        raise ValueError(f"{cited} is no interval: {error}") from None
    return low, high


def beside(cited: str, results: Path, holds: Callable[[float, float, float], bool], what: str) -> str:
    """Nothing; ValueError where an interval does not stand to a number, by default 0, as a sentence says."""
    where, *told = _parts(cited)
    (low, high), number = interval(where, results), float(*told)
    if not holds(low, number, high):
        raise ValueError(f"a sentence says that an interval {what} {number:g}, and it is {low} to {high}: {cited}")
    return ""


def overlap(cited: str, results: Path) -> str:
    (low, high), (lower, higher) = (interval(one, results) for one in _parts(cited))
    if high < lower or higher < low:
        raise ValueError(f"a sentence says that {low} to {high} and {lower} to {higher} overlap: {cited}")
    return ""


def apart(cited: str, results: Path) -> str:
    (low, _), (_, high) = (interval(one, results) for one in _parts(cited))
    if low <= high:
        raise ValueError(f"a sentence says that one interval lies above another, which ends at {high}: {cited}")
    return ""


def dates(cited: str, results: Path) -> str:
    found = sorted(table["date"] for file in results.glob("*.json") for table in _tables(file.read_text()))
    return f"{found[0]} to {found[-1]}"


def computed(formula: Callable[[float, float], float], shape: str) -> Callable[[str, Path], str]:
    return lambda cited, results: format(formula(*numbers(cited, results)), shape)


WAYS: dict[str, Callable[[str, Path], str]] = {
    "row": row,
    "least": lambda cited, results: min(column(cited, results), key=float),
    "most": lambda cited, results: max(column(cited, results), key=float),
    "lowest": lambda cited, results: min(edges(cited, results), key=float),
    "more": computed(lambda a, b: 100 * (a / b - 1), ".0f"),
    "less": computed(lambda a, b: 100 * (1 - a / b), ".0f"),
    "minus": computed(lambda a, b: a - b, ".2f"),
    "times": computed(lambda a, b: a / b, ".2f"),
    "share": computed(lambda a, b: 100 * a / b, ".0f"),
    "kept": computed(lambda a, b: 100 * (a - 1) / (b - 1), ".0f"),
    "dates": dates,
    "given": lambda cited, results: cited,
    "above": above,
    "same": same,
    "chance": functools.partial(beside, holds=lambda low, number, high: low <= number <= high, what="contains"),
    "beyond": functools.partial(beside, holds=lambda low, number, high: number < low, what="lies above"),
    "behind": functools.partial(beside, holds=lambda low, number, high: high < number, what="lies below"),
    "overlap": overlap,
    "apart": apart,
}


def written(cited: str, results: Path = ROOT / "results") -> str:
    """What stands in the page for what stands in double braces."""
    way, colon, rest = cited.partition(": ")
    return WAYS[way](rest.strip(), results) if colon and way in WAYS else figure(cited, results)


def page(name: str, root: Path = ROOT) -> str:
    """The whole page. ValueError where a figure is not there, or a sentence no longer holds."""
    template = root / "docs" / "templates" / name
    return CITED.sub(lambda found: written(found[1], root / "results"), template.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, folder in PAGES.items():
        (ROOT / folder / name).write_text(page(name))
