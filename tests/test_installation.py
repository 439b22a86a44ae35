"""Two commands do all the set-up, and every page, file and script that names a package says the same."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import opt_tree

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = (
    "pip install -r requirements.txt && python demo_opt_classic.py",
    "pip install -r requirements/tests.txt && python -m pytest",
)
EXTRAS = {
    "chat": {"chat"},
    "extras": {"templates", "plots", "tables"},
    "integrations": {"integrations", "chat"},
    "peers": {"peers"},
    "serve": {"serve"},
    "site": {"site"},
    "tests": {"tests", "templates", "plots", "tables", "serve"},
}
"""The extras whose packages a file of requirements/ pins, besides the library's own."""


def pinned(file: Path) -> dict[str, str]:
    """The packages and versions of a requirements file, those of the files that it includes too."""
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        if included := re.fullmatch(r"-r (\S+)", line):
            found |= pinned(file.parent / included[1])
        elif line and not line.startswith("#"):
            name, exactly, version = line.partition("==")
            assert exactly and re.fullmatch(r"[\w.]+", version), f"{file.name} pins no version of {line}"
            found[canonicalize_name(name)] = version
    return found


def admitted(*extras: str) -> dict[str, Requirement]:
    """The packages of some extras with their ranges, as pyproject.toml has them; without any, the library's."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    found = [Requirement(line) for line in (lines if extras else PROJECT["dependencies"])]
    return {canonicalize_name(one.name): one for one in found if one.name != PROJECT["name"]}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_the_two_commands_stand_on_every_page_and_are_what_ci_runs(page: str) -> None:
    lines = [re.split(r"  +#| \|\| ", line)[0] for line in (ROOT / page).read_text().splitlines()]
    assert [line for line in lines if line in COMMANDS] == [*COMMANDS]


def test_an_install_that_fails_ends_ci() -> None:
    """`set -e` does not see what fails before the last `&&`."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith(COMMANDS)] == [f"{command} || exit" for command in COMMANDS]


@pytest.mark.parametrize("name", ["library", *EXTRAS])
def test_a_file_pins_what_pyproject_admits(name: str) -> None:
    found, library = pinned(ROOT / "requirements" / f"{name}.txt"), admitted()
    ranges = library if name == "library" else admitted(*EXTRAS[name]) | (library if name == "tests" else {})
    assert found.keys() == ranges.keys()
    for package, version in found.items():
        assert version in ranges[package].specifier, f"{package} {version} is not {ranges[package]}"


def test_every_extra_and_every_file_is_one_of_these() -> None:
    assert {extra for extras in EXTRAS.values() for extra in extras} == PROJECT["optional-dependencies"].keys()
    assert {file.stem for file in (ROOT / "requirements").glob("*.txt")} == {"library", *EXTRAS}


def test_the_demos_need_the_library_and_no_more() -> None:
    assert pinned(ROOT / "requirements.txt") == pinned(ROOT / "requirements" / "library.txt")


def test_what_the_library_imports_at_once_is_in_its_requirements() -> None:
    """Modules imported at the top of a file of the package; those inside a function are asked for by need."""
    asked: dict[str, Path] = {}
    for file in (ROOT / "opt_tree").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                asked |= {alias.name.partition(".")[0]: file for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                asked[node.module.partition(".")[0]] = file
    known = {*pinned(ROOT / "requirements" / "library.txt"), *sys.stdlib_module_names, "opt_tree"}
    foreign = {module: str(file.relative_to(ROOT)) for module, file in asked.items() if module not in known}
    # huggingface_hub comes with transformers, and tokenizers too; triton with a torch for CUDA.
    # The last ones are the server's, in files that nobody imports without them.
    came = {"huggingface_hub", "tokenizers", "triton", "lm_eval", "fastapi", "starlette", "pydantic"}
    assert foreign.keys() <= came, foreign


def test_a_release_has_one_version_everywhere() -> None:
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {opt_tree.__version__}\n" in cited
    assert re.search(rf"^## {re.escape(opt_tree.__version__)} \(", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)


def test_every_embedded_model_has_a_card_with_its_size_and_licence() -> None:
    """A folder that somebody copies says what it is."""
    embedded = ROOT / "opt_tree" / "models" / "embedded"
    folders = {file.parent for file in embedded.rglob("*.safetensors")}
    assert len(folders) > 8
    for folder in folders:
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlicense: apache-2.0\n"), folder
        files = [*folder.glob("model*.safetensors"), *folder.glob("store.safetensors")] or folder.glob("*.safetensors")
        assert f"| bytes | {sum(file.stat().st_size for file in files):,} |" in card, folder
