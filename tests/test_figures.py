"""Figures of README.md, RESULTS.md and docs/claims.md: they are cells of the pages of results, and follow them."""

import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_docs import ROOT, cells, name_of, prose

FIGURES = runpy.run_path(str(ROOT / "docs" / "figures.py"))
TEMPLATES = [ROOT / "docs" / "templates" / name for name in FIGURES["PAGES"]]
CITED = FIGURES["CITED"]


@pytest.mark.parametrize("name", FIGURES["PAGES"])
def test_a_page_with_figures_is_what_the_results_say(name: str) -> None:
    written = (ROOT / FIGURES["PAGES"][name] / name).read_text()
    assert written == FIGURES["page"](name), f"edit docs/templates/{name}: python docs/figures.py writes {name} anew"


def test_the_page_of_commands_is_what_the_results_say() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "reproduce.py"))
    assert (ROOT / "docs" / "reproduce.md").read_text() == written["page"](), "python docs/reproduce.py writes it anew"
    claims = [claim for claim, _ in written["claims"]()]
    assert len(claims) > 50 and len(set(claims)) == len(claims)
    for known in ("EESD: ", "README: A real pair", "RESULTS: Drafters", "Trees in a batch", "The best number of nodes"):
        assert any(claim.startswith(known) for claim in claims), known


def test_every_table_that_a_template_cites_is_behind_a_claim() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "reproduce.py"))
    behind = {(page, table["title"]) for _, text in written["claims"]() for page, table in written["tables"](text)}
    cited = {(page, table["title"]) for one in TEMPLATES for page, table in written["tables"](one.read_text())}
    assert cited == behind


NAMES = (
    r"95 % interval",
    r"\b20\d\d-\d\d-\d\d\b",
    r"\b\d{4}\.\d{5}\b",
    r"[A-Za-z_][\w-]*\d[\w.-]*(?:, -\d)*|\b\d+[A-Z]\b",  # float32, EAGLE-3, 7B
    r"\b\d{6}[a-z]\b",  # a commit
    r"^\d+\. ",
)
"""Numbers that name something: a date, a paper, a model, a commit, a conclusion."""
PARTS = r"(?:an?|one|two|three) (?:third|quarter|fifth|sixth|seventh|eighth|tenth|twentieth)s?"
FIGURE = rf"[-+]?\d[\d.,]*|\b(?:half|{PARTS}|twice)\b"


def typed(text: str) -> list[str]:
    """The numbers of a template that stand in no braces: those of papers and settings are marked `{{given: 60}}`."""
    text = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", CITED.sub("", text)))
    for name in NAMES:
        text = re.sub(name, "", text)
    return re.findall(FIGURE, text)


def test_a_typed_figure_is_seen() -> None:
    named = "1. {{given: 12}} nodes (2602.16994), float32, a 7B, 2026-11-23: {{a > 1 > b > c}} of {{given: 9.2}} M"
    assert typed(named) == []
    assert typed("all 1,120 texts, within 3 % and 2.57 times `x1`") == ["1,120", "3", "2.57"]
    assert typed("12 nodes and half as many tokens, a fifth of them") == ["12", "half", "a fifth"]


@pytest.mark.parametrize("template", TEMPLATES, ids=name_of)
def test_a_figure_is_cited_and_not_typed(template: Path) -> None:
    found = []
    for line in prose(template).splitlines():
        # In the page of claims the second cell has the paper's figures.
        said = " ".join(cells(line)[2:]) if template.name == "claims.md" and line.startswith("|") else line
        found += [f"{number} in {line[:60]}" for number in typed(said)]
    assert not found


def statements(template: Path) -> Iterator[str]:
    """What cites figures: a list item, a row that links, or a whole section where its table's rows do not link."""
    for section in re.split(r"^##+ ", prose(template), flags=re.M):
        whole = "\n|---" in section and not re.search(r"^\|.*\]\(", section, flags=re.M)
        yield from [section] if whole else re.split(r"\n\n|^(?=- |\d+\. |\|)", section, flags=re.M)


@pytest.mark.parametrize("template", TEMPLATES, ids=name_of)
def test_a_figure_stands_beside_a_link_to_its_page(template: Path) -> None:
    checked = 0
    for statement in statements(template):
        cited = set(re.findall(r"(?:\{\{(?:\w+: )?|;; )(\w+) > ", statement))
        linked = set(re.findall(r"results/(\w+)\.md", statement))
        assert cited <= linked, f"{name_of(template)}: {sorted(cited - linked)} in {statement[:80]}"
        checked += len(cited)
    assert checked > 2


@pytest.mark.parametrize(
    ("cited", "message"),
    [
        ("demos > 1", "a figure is page > table > row > column"),
        ("dreams > 1 > a > b", "there is no results/dreams.json"),
        ("demos > 9 > a > b", "0 such tables"),
        ("demos > 1 > a > tokens a step", "0 such rows"),
        ("demos > 1 > draft model and store > tokens a step", "2 such rows"),
        ("demos > 1 > draft model and store, eager > tokens", "0 such columns"),
        ("times: demos > 1 > EAGLE head alone, eager > 95 % interval ;; demos > 1 > a > b", "no number"),
        ("above: controllers > 1 > best tree > eager ;; controllers > 1 > best tree > compiled", "no number"),
        ("above: 1 ;; demos > 1 > EAGLE head alone, eager > times plain", "above the next"),
        ("above: less: demos > 1 > A ;; demos > 1 > B || 3", "no number"),
        ("behind: demos > 1 > EAGLE head alone, eager > 95 % interval", "below 0"),
        (
            "apart: demos > 1 > EAGLE head alone, eager > 95 % interval ;; "
            "demos > 1 > EAGLE head and store, eager > 95 % interval",
            "lies above",
        ),
        ("overlap: auto > 1 > demo, draft model > 95 % interval ;; auto > 1 > x > 95 % interval", "such rows"),
    ],
)
def test_a_figure_that_is_not_there_is_refused(cited: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FIGURES["written"](cited)


BRACES = [(name_of(template), cited) for template in TEMPLATES for cited in CITED.findall(template.read_text())]
CHANGES: list[Callable[[float], float]] = [lambda x: 3 * x + 9, lambda x: -x - 9, lambda x: x / 10]


def changed(text: str, change: Callable[[float], float]) -> str:
    """The cell with other numbers; one without numbers has another letter."""
    found = re.sub(r"-?\d[\d,]*(?:\.\d+)?", lambda one: f"{change(float(one[0].replace(',', ''))):g}", text)
    return found if found != text else f"{text}x"


class Edited:
    """Shows cells as the results have them, but for one; `asked` is what it was asked for."""

    def __init__(self, wanted: str = "", change: Callable[[float], float] = float) -> None:
        self.wanted, self.change, self.asked = wanted, change, set[str]()

    def __call__(self, cell: str, value: str | list[str]) -> str:
        self.asked.add(cell)
        text = SHOWN(cell, value)
        return changed(text, self.change) if cell == self.wanted else text

    def written(self, cited: str, patch: pytest.MonkeyPatch) -> str:
        patch.setitem(FIGURES["written"].__globals__, "_shown", self)
        try:
            return FIGURES["written"](cited)
        except ValueError:
            return "refused"


SHOWN = FIGURES["_shown"]


def test_no_cell_that_is_cited_can_change_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number in any cell is another sentence, or a check that fails."""
    seen = 0
    for name, cited in dict.fromkeys(BRACES):
        real = Edited()
        before = real.written(cited, monkeypatch)
        assert real.asked or cited.startswith(("given: ", "dates: ")), f"{name}: {cited}"
        for cell in real.asked:
            texts = {Edited(cell, change).written(cited, monkeypatch) for change in CHANGES}
            assert texts - {before}, f"{name}: {cell} may change unnoticed in {cited}"
            seen += 1
    assert seen > 500


EDITS = {
    "two trees swapped": [
        (
            "thresholds",
            '"OPT-Tree, threshold 0", "fitted", 3.89, 4.58, 5.36',
            '"OPT-Tree, threshold 0", "fitted", 3.89, 4.58, 4.78',
        ),
        (
            "thresholds",
            '"EAGLE-2\'s tree", "fitted", 3.76, 4.33, 4.78',
            '"EAGLE-2\'s tree", "fitted", 3.76, 4.33, 5.36',
        ),
    ],
    "a text that differs": [("exactness", "1120, 1120]", "1120, 1119]")],
    "a tree measured anew": [
        ("thresholds", '"tree of rates (`eagle1`)", "", 3.78, 4.23', '"tree of rates (`eagle1`)", "", 3.78, 4.60')
    ],
}


def edited(root: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of the templates and the results, in which cells have other values."""
    for folder in ("docs/templates", "results"):
        shutil.copytree(ROOT / folder, root / folder)
    for name, old, new in edits:
        file = root / "results" / f"{name}.json"
        text = file.read_text()
        assert text.count(old) == 1, (name, old)
        file.write_text(text.replace(old, new))
    return root


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [("RESULTS.md", "two trees swapped", "above the next"), ("RESULTS.md", "a text that differs", "all are the same")],
)
def test_a_conclusion_that_no_longer_holds_is_refused(name: str, edit: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        FIGURES["page"](name, edited(tmp_path, *EDITS[edit]))


def test_a_verdict_follows_what_is_measured_anew(tmp_path: Path) -> None:
    root = edited(tmp_path, *EDITS["a tree measured anew"])
    before, after = (FIGURES["page"]("claims.md", root).splitlines() for root in (ROOT, root))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 2  # OPT-Tree's row and EAGLE-2's
    for old, new in changed:
        assert cells(old)[2] != cells(new)[2] and cells(old)[3] != cells(new)[3]
    assert "9 and 7 %" in changed[0][0] and "1 and 7 %" in changed[0][1]
