"""Takeaways of results/*.md: each figure is in a table of its page or computed from it, and orders of figures hold."""

import json
import re
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from test_docs import MEASURED, name_of, prose
from test_figures import FIGURES, NAMES

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
PERCENTAGES = re.compile(rf"((?:{NUMBER}(?:, | to | and ))*{NUMBER}) %")


SHARES = {"half": 1 / 2, "two thirds": 2 / 3, "a third": 1 / 3, "a quarter": 1 / 4, "a fifth": 1 / 5, "a sixth": 1 / 6}
SHARES |= {"a seventh": 1 / 7, "an eighth": 1 / 8, "a tenth": 1 / 10, "a twentieth": 1 / 20, "twice": 2}
"""What words say; a figure is one of them where it is a fifth off at most."""


def shares(text: str) -> list[str]:
    return re.findall(rf"\b({'|'.join(SHARES)})\b(?! an hour)", " ".join(text.split()))


def figures(text: str) -> list[str]:
    """The numbers of a text, without commas; those in per cent with their sign, which in "5 to 7 %" are two."""
    text = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))
    for name in (r"[\d.]+B\b", *NAMES):
        text = re.sub(name, "", text)
    text = PERCENTAGES.sub(lambda found: re.sub(NUMBER, r"\g<0>%", found[1]), text)
    return [one.replace(",", "").replace("%", " %") for one in re.findall(rf"{NUMBER}%?", text)]


def tabled(record: dict) -> set[str]:
    """What stands in the tables of a page, with their titles and settings; in per cent where a cell or a column is."""
    found = set()
    for table in record["tables"]:
        found |= {*figures(" ; ".join([table["title"], table["machine"], *table["command"], *table["columns"]]))}
        for row in table["rows"]:
            for cell, column in zip(row, table["columns"], strict=True):
                shown = figures(" ; ".join(cell) if isinstance(cell, list) else str(cell))
                share = re.search(r"%(?! interval)", column)
                found |= {f"{one.removesuffix(' %')} %" if share else one for one in shown}
    return found


def is_one(figure: str, known: set[str]) -> bool:
    """Whether a figure is one of those that are known, or one of them rounded; a word never is."""
    if figure in SHARES:
        return False
    value = Decimal(figure.removesuffix(" %"))
    alike = [Decimal(one.removesuffix(" %")) for one in known if one.endswith("%") == figure.endswith("%")]
    return any(one.quantize(value) == value for one in alike if one < 10**9)


def computed(record: dict, known: set[str]) -> set[str]:
    """What a page's file says how to compute, as in "6.28 - 5.58 = 0.70". The numbers on the left are in its tables."""
    results = set()
    for line in record.get("computed", ()):
        formula, _, result = line.partition(" = ")
        parts = [one for one in re.findall(NUMBER, formula) if one not in ("1", "100")]
        assert all(is_one(one, known) for one in parts), f"{line}: not all of {parts} are in the tables"
        value = eval(formula)
        near = result in SHARES and abs(value / SHARES[result] - 1) <= 0.2
        assert near or is_one(result, {f"{value} %" if result.endswith("%") else str(value)}), f"{line}: it is {value}"
        results.add(result)
    return results


@pytest.mark.parametrize("page", MEASURED, ids=name_of)
def test_a_figure_of_a_takeaway_is_in_a_table_or_follows_from_one(page: Path) -> None:
    """Figures of other pages and of papers are named in the page's file, under "elsewhere", with where they are."""
    record = json.loads(page.with_suffix(".json").read_text(), parse_float=str, parse_int=str)
    known = tabled(record)
    takeaway = re.split(r"^## (?:Takeaway|Caveats)\n", prose(page), flags=re.M)[1]
    said = figures(takeaway) + shares(takeaway)
    follows = {*computed(record, known), *record.get("elsewhere", ())}
    assert follows <= {*said}, f"{page.name} no longer says {follows - {*said}}"
    typed = [one for one in said if one not in follows and not is_one(one, known)]
    assert not typed, f"the takeaway of {page.name} says {typed}, which are in none of its tables"


def outside(table: dict) -> list[list]:
    """The rows with a figure beside an interval that it is not in; of a difference, the two figures before it."""
    found = []
    for row in table["rows"]:
        for place, (value, interval) in enumerate(pairwise(row)):
            if isinstance(interval, list) and isinstance(value, int | float):
                apart = re.search("second less the first|of the difference", table["columns"][place + 1])
                shown = value - row[place - 1] if apart else value
                rounded = 0.006 if apart else 0.0
                found += [] if interval[0] - rounded <= shown <= interval[1] + rounded else [row]
    return found


@pytest.mark.parametrize("page", MEASURED, ids=name_of)
def test_a_figure_lies_in_the_interval_beside_it(page: Path) -> None:
    for table in json.loads(page.with_suffix(".json").read_text())["tables"]:
        assert not outside(table), table["title"]


HOLDS = {page: json.loads(page.with_suffix(".json").read_text()).get("holds", []) for page in MEASURED}
ORDERED = [(page, stated) for page, all_of_it in HOLDS.items() for stated in all_of_it]


@pytest.mark.parametrize(("page", "stated"), ORDERED, ids=name_of)
def test_figures_stand_to_each_other_as_a_takeaway_says(page: Path, stated: str) -> None:
    """More, fewer, as many, told apart or not: checks of docs/figures.py, under "holds" in the page's file."""
    assert FIGURES["written"](stated) == "", "not a check"


def test_a_stale_figure_is_seen() -> None:
    assert figures("2, 8 and 18 % of 1,120 `x7` in [x](a3.md) with a 0.5B") == ["2 %", "8 %", "18 %", "1120"]
    table = {"title": "", "machine": "", "command": [], "columns": ["a", "share in %"], "rows": [["3.66 to 4", 12.4]]}
    known = tabled({"tables": [table]})
    assert is_one("3.7", known) and is_one("12 %", known)
    swapped = [["a", 1.2, [1.1, 1.3]], ["b", 1.4, [1.1, 1.3]]]
    assert outside({"columns": ["x", "y", "95 %"], "rows": swapped}) == swapped[1:]
    assert shares("half an hour, a half; a third fewer, nearly twice") == ["half", "a third", "twice"]
    assert computed({"computed": ["4 / 3.66 - 1 = a tenth"]}, known) == {"a tenth"}
    assert not is_one("3.65", known) and not is_one("12", known) and not is_one("13 %", known)
    with pytest.raises(AssertionError, match=r"3\.7"):
        computed({"computed": ["3.66 + 4 = 3.7"]}, known)
    with pytest.raises(AssertionError, match="= half: it is"):
        computed({"computed": ["3.66 / 4 = half"]}, known)
