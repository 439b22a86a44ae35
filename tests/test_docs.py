"""What is written for readers, checked against the repository: links, commands, public names, figures, code."""

import ast
import functools
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import opt_tree
from opt_tree.__main__ import COMMANDS as INSTALLED
from opt_tree.methods.controllers.registry import CONTROLLERS
from opt_tree.methods.drafters.registry import KINDS
from opt_tree.methods.policies.registry import POLICIES
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.tools.presets import PRESETS
from opt_tree.training.plans import KINDS as HEADS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "RESULTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
    *sorted((ROOT / "opt_tree" / "models" / "embedded").rglob("*.md")),
    ROOT / "evaluation" / "questions" / "README.md",
]


def name_of(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as Git hosts make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if ":" not in link]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=name_of)
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.is_relative_to(ROOT) and target.exists(), f"{name_of(page)} links to {path}, which is not there"
    if anchor:
        assert anchor in slugs(target), f"{name_of(page)} links to #{anchor}; there are {sorted(slugs(target))}"


def test_the_readme_says_how_to_begin() -> None:
    text = (ROOT / "README.md").read_bytes()
    for needed in (b"pip install", b"python demo_opt_classic.py", b"python -m pytest", b"transcript.png"):
        assert needed in text


@pytest.mark.parametrize(("name", "size"), [("README.md", 8000), ("RESULTS.md", 9000), ("docs/design.md", 10240)])
def test_a_page_that_is_read_first_stays_short(name: str, size: int) -> None:
    assert len((ROOT / name).read_bytes()) <= size


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_has_a_cell_for_every_column(page: Path) -> None:
    columns = 0
    for number, line in enumerate(prose(page).splitlines(), start=1):
        cells = line.count("|") - line.count("\\|") - 1 if line.startswith("|") else 0
        assert not (columns and cells) or cells == columns, f"{name_of(page)}, line {number}: {line}"
        columns = cells


NAMED = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w./]+\.py)\)", (ROOT / "docs" / "algorithm.md").read_text())


@pytest.mark.parametrize(("name", "file"), sorted(set(NAMED)))
def test_a_function_of_the_page_of_the_algorithm_is_in_its_file(name: str, file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        defined = [one for one in ast.iter_child_nodes(tree) if getattr(one, "name", None) == part]
        assert defined, f"docs/algorithm.md links `{name}` to {file}, which has no {part}"
        tree = defined[0]


def test_the_picture_of_the_algorithm_can_be_drawn(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "algorithm.py"))["draw"]
    assert draw(tmp_path / "algorithm.png").stat().st_size > 20_000


SOURCES = {str(path.relative_to(ROOT)) for kind in ("*.py", "*.md") for path in ROOT.rglob(kind)}
ELSEWHERE = {"prepare_data.py", "custom_generate/generate.py"}
"""Files of other repositories, which pages name."""


def is_there(name: str) -> bool:
    """Whether a file, or the end of its path, is the repository's; a name with capitals is a placeholder."""
    return name in ELSEWHERE or "NAME" in name or any(f"/{source}".endswith(f"/{name}") for source in SOURCES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_file_in_code_font_is_there(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|md))`", prose(page)))
    assert not (missing := {name for name in named if not is_there(name)}), f"{name_of(page)} names {missing}"


def test_a_file_that_is_not_there_is_noticed() -> None:
    assert is_there("docs/design.md") and is_there("cache.py") and not is_there("thompson.py")


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every command of this repository that a page names: the module or script, and the options given to it."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)
    blocks = [line for language, block in found if not language for line in block.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page).replace("\\\n", " "))]
    for line in [*blocks, *spans]:
        for part in line.partition("  #")[0].split("&&"):
            found = re.search(r"python (?:-m ([\w.]+)|([\w/]+\.py))(.*)", part)
            launched = re.search(r"accelerate launch .*? -m ([\w.]+)(.*)", part)
            installed = re.match(r"opt-tree ([a-z-]+)(.*)", part)
            if found:
                yield of_kind(found[1] or found[2], found[3]), options(found[3])
            elif installed:
                yield of_kind(f"opt_tree.{INSTALLED[installed[1]]}", installed[2]), options(installed[2])
            elif launched:
                yield launched[1], options(launched[2])


def of_kind(name: str, arguments: str) -> str:
    """A command with the kind that is asked for, where it has options by kind."""
    kind = re.search(r"--kind (\w+)", arguments)
    return f"{name} {kind[0]}" if name == "opt_tree.training.heads.train" and kind and kind[1] in HEADS else name


def options(arguments: str) -> list[str]:
    return [word.partition("=")[0] for word in shlex.split(arguments) if word.startswith("--")]


COMMANDS = sorted({(page, name, *given) for page in PAGES for name, given in commands(page)})


@functools.cache
def help_of(name: str) -> str:
    """What a module or script prints for --help, or for a kind and --help."""
    name, *kind = name.split()
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        # runpy would keep what it compiles, shape checks and all, where everybody else looks for the plain module.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(sys, "argv", [name, *kind, "--help"])
        patch.setattr(sys.stdout, "write", lambda text: printed.append(text) or len(text))
        with pytest.raises(SystemExit) as exited:
            if name.endswith(".py"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert not exited.value.code
    return "".join(printed)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(name_of, command)))
def test_a_command_and_its_options_exist(command: tuple) -> None:
    page, name, *given = command
    if name in (
        "pytest",
        "tests/methods/verifiers/test_verifiers_field.py",
        "opt_tree.integrations.lm_eval_model",
        "tests/pretend/waits.py",  # it would have this process believe in a device
    ) or name.startswith("examples."):
        return  # not ours (the harness is lm-eval's command line), or run by a test of its own
    known = set(re.findall(r"--[\w-]+", help_of(name)))
    known |= {option.replace("-", "_").replace("__", "--", 1) for option in known}
    assert set(given) <= known, f"{name_of(page)}: {name} has no {', '.join(sorted(set(given) - known))}"


def test_the_checks_above_see_something() -> None:
    named = {name for _, name, *_ in COMMANDS}
    assert {"demo_opt_classic.py", "evaluation.report", "evaluation.compare", "opt_tree.training.advise"} <= named
    assert any("--baseline" in command for command in COMMANDS)
    assert len(LINKS) > 30
    assert "the-loop" in slugs(ROOT / "docs" / "design.md")


@pytest.mark.parametrize("name", opt_tree.__all__)
def test_a_public_name_is_in_the_pages(name: str) -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert re.search(rf"\b{name}\b", pages), f"{name} is public, and no page says what it is for"


@pytest.mark.parametrize("name", [*KINDS, *POLICIES, *VERIFIERS, *CONTROLLERS])
def test_what_a_command_can_be_told_by_name_is_in_the_pages(name: str) -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"`{name}(:[^`]*)?`", pages), (
        f"--drafter, --policies, --verifiers or --controller take {name}; no page says what it is"
    )


METHODS = runpy.run_path(str(ROOT / "docs" / "methods.py"))


def test_what_was_read_is_said_of_every_paper_and_of_no_other() -> None:
    methods = [one for family in (KINDS, POLICIES, VERIFIERS, CONTROLLERS, PRESETS) for one in family.values()]
    assert METHODS["READ"].keys() == {one.paper for one in methods if one.paper}
    assert METHODS["DIFFERS"].keys() <= {name for one in methods for name in (one.name, METHODS["called"](one))}


@pytest.mark.parametrize("name", METHODS["pages"]())
def test_a_page_of_methods_is_what_the_registries_say(name: str) -> None:
    written = METHODS["pages"]()[name]
    assert not re.search(r"\| *\|", written) and "not recorded" not in written, "an empty cell"
    assert (ROOT / "docs" / name).read_text() == written, "python docs/methods.py writes it anew"


TREES = runpy.run_path(str(ROOT / "docs" / "trees.py"))


def test_a_picture_of_trees_is_what_the_methods_grow() -> None:
    written = TREES["picture"]("policies")  # the others take a minute
    assert (ROOT / "docs" / "policies.svg").read_text() == written, "python docs/trees.py draws it anew"


MEASURED = sorted((ROOT / "results").glob("*.md"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: each its columns, then its rows."""
    blocks = re.findall(r"(?:^\|.*\n?)+", prose(page), flags=re.M)
    return [[cells(line) for line in block.splitlines() if not line.startswith("|---")] for block in blocks]


def shown(value: str | float | list[float] | None) -> list[str | float]:
    """A value of a results file, and a cell of a page, as one can be compared with the other."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        found = re.fullmatch(r"(-?[\d.]+) to (-?[\d.]+)", value)
        numbers = found.groups() if found else (value.replace(",", ""),)
        return [float(n) for n in numbers] if all(re.fullmatch(r"-?\d*\.?\d+", n) for n in numbers) else [value]
    return [float(number) for number in value] if isinstance(value, list) else [float(value)]


def test_a_cell_is_read_as_what_it_says() -> None:
    assert shown(".753") == shown(0.753) == [0.753]
    assert shown("1,200") == shown(1200) == [1200]
    assert shown("1.90 to 2.21") == shown([1.9, 2.21]) == [1.9, 2.21]
    assert shown("12 nodes, 0.45") == ["12 nodes, 0.45"] and shown("") == shown(None) == []


@pytest.mark.parametrize("page", MEASURED, ids=name_of)
def test_a_page_of_results_shows_the_figures_beside_it(page: Path) -> None:
    record = json.loads(page.with_suffix(".json").read_text())
    text = page.read_text()
    assert text.startswith(f"# {record['heading']}\n") and record["question"] in text and "\n## Takeaway\n" in text
    assert len(tables(page)) == len(record["tables"]) > 0
    for (columns, *rows), table in zip(tables(page), record["tables"], strict=True):
        # Minutes to expect of the command, where somebody knows them.
        assert set(table) - {"minutes"} == {"title", "commit", "date", "machine", "command", "columns", "rows"}
        assert columns == table["columns"]
        assert [[shown(cell) for cell in row] for row in rows] == [
            [shown(cell) for cell in row] for row in table["rows"]
        ]
        assert f"- Setup: {table['machine']}.\n- Commit {table['commit']}, {table['date']}.\n" in text
        assert all(line in text for line in table["command"])


def test_every_page_of_results_is_in_the_summary() -> None:
    linked = set(re.findall(r"\]\(results/(\w+\.md)\)", (ROOT / "RESULTS.md").read_text()))
    assert linked == {page.name for page in MEASURED}


BLOCKS = [
    (page, number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number", "code"), BLOCKS, ids=lambda value: name_of(value)[:30].splitlines()[0])
def test_the_code_in_the_pages_runs(page, number, code, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    for word, needed in (("canonical", "kernel"), ("weights=", "quantised_kernel")):
        if word in code:
            request.getfixturevalue(needed)
    exec(compile(code, f"{name_of(page)}, block {number}", "exec"), {"__name__": "__main__"})
    if page.name == "README.md":
        assert len([line for line in code.splitlines() if line.strip()]) == 8
        assert "drafted and accepted" in (tmp_path / "answer.html").read_text()
