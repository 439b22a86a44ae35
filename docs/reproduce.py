"""Writes docs/reproduce.md: every conclusion and every claim with the commands behind it. `python docs/reproduce.py`.

What a claim rests on are the tables that its figures are cited from, in docs/templates; their commands are in results/.
"""

import argparse
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, TEMPLATES = Path(__file__).with_name("reproduce.md"), Path(__file__).with_name("templates")
FIGURES = runpy.run_path(str(Path(__file__).with_name("figures.py")))
HEAD = """# Every claim, and what to run

A row for each conclusion, table and failure of [RESULTS.md](../RESULTS.md), each table of the
[README](../README.md) and each claim of [claims.md](claims.md), with the tables that its figures come from.
`python docs/reproduce.py` writes this page from the same templates and JSON files as those.

*Minutes* are what to expect of the commands together on the machine of the table, one core or one GPU. They are
estimated from tokens and rates, and good to a factor of two: most runs were not timed. Names in capitals are yours to
fill in; the table's page says with what. What is compared by the clock needs a machine that does nothing else.

| claim | table | command | minutes | GPU |
|---|---|---|---|---|
"""
CITED = re.compile(r"(?:\{\{(?:\w+: )*|;; |\|\| (?:\w+: )?)(\w+) > ([^>{};]+?) > ")


def tables(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The pages and tables that a text of a template cites, each once."""
    found = {}
    for page, wanted in CITED.findall(text):
        table = FIGURES["table_of"](f"{page} > {wanted}", page, wanted, ROOT / "results")
        found[page, table["title"]] = table
    return [(page, table) for (page, _), table in found.items()]


def claims() -> list[tuple[str, str]]:
    """Each claim as it is called, and all that the template says of it: conclusions, tables, what did not work, papers.

    A paragraph of the page of claims that cites figures is one, called by how it begins.
    """
    readme, results, papers = ((TEMPLATES / name).read_text() for name in FIGURES["PAGES"])
    conclusions = re.findall(r"^\d+\. .*?(?=^\d+\. |^$)", results, flags=re.M | re.S)
    found = [(FIGURES["CITED"].sub(filled, re.findall(r"\*\*(.*?)\*\*", text)[0]), text) for text in conclusions]
    found += [claim for page, text in (("README", readme), ("RESULTS", results)) for claim in sections(page, text)]
    items = [line for text in (results, papers) for line in re.findall(r"^- .*?(?=^- |^$|\Z)", text, flags=re.M | re.S)]
    found += [(beginning(text), text) for text in items if tables(text)]
    rows = [line for line in papers.splitlines() if line.startswith("| ")]
    return found + [(line.strip("| ").split(" | ")[0], line) for line in rows if "paper and claim" not in line]


def sections(page: str, text: str) -> list[tuple[str, str]]:
    """The sections of a page that have a table of figures, or a paragraph of them outside of lists."""
    parts = [part.partition("\n") for part in re.split(r"^## ", text, flags=re.M)[1:]]
    plain = [(title, re.sub(r"^(?:- |\d+\. ).*?(?=^$|\Z)", "", body, flags=re.M | re.S)) for title, _, body in parts]
    return [(f"{page}: {title}", body) for title, body in plain if tables(body)]


def beginning(text: str) -> str:
    """What stands before the first figure, or the first colon, without marks."""
    said = FIGURES["CITED"].sub(filled, text.removeprefix("- "))
    return re.sub(r"\]\([^)]*\)|\[|\s*\n\s*", " ", re.split(r"[:.](?: |$)", said)[0]).strip()


def filled(cited: re.Match[str]) -> str:
    return FIGURES["written"](cited[1])


def commands(table: dict[str, Any]) -> list[str]:
    """The commands of a table, a line each."""
    return [line for line in "\n".join(table["command"]).replace("\\\n", " ").splitlines() if line]


def row(claim: str, behind: list[tuple[str, dict[str, Any]]]) -> str:
    links = dict.fromkeys(
        f"[{page}](../results/{page}.md)" + (f": {t['title']}" if t["title"] else "") for page, t in behind
    )
    if not behind:
        return f"| {claim} | none | nothing was measured | 0 | no |"
    run = {tuple(commands(table)): table for _, table in behind}
    minutes = [table.get("minutes") for table in run.values()]
    known = sum(int(one) for one in minutes if one)
    total = f"{known}" if all(minutes) else f"{known} and what is not known" if known else "not known"
    lines = dict.fromkeys(" ".join(line.split()) for one in run for line in one)
    gpu = {True: "yes", False: "no"}
    needs = {gpu["NVIDIA" in table["machine"]] for table in run.values()}
    said = "<br>".join(
        f"`{line}`" if line.startswith(("python", "opt-tree", "for", "PYTHONPATH")) else line for line in lines
    )
    return f"| {claim} | {'; '.join(links)} | {said} | {total} | {' and '.join(sorted(needs))} |"


def page() -> str:
    """The whole page."""
    behind = [(claim, tables(text)) for claim, text in claims()]
    return HEAD + "\n".join(row(claim, known) for claim, known in behind) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
