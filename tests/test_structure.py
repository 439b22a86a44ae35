"""The architecture, read from the source: who may import whom, and what the package must not contain."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import opt_tree

PACKAGE = Path(opt_tree.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((PACKAGE.parent / "evaluation").rglob("*.py"))

# docs/design.md, "The parts": imports go down.
# A module imports modules of lower tiers only; a family (a folder) also itself, and never another family.
TIERS: tuple[set[str], ...] = (
    {"arguments", "interrupted"},
    {"tree"},
    {
        "attention",
        "grammar",
        "longrope",
        "nucleus",
        "padding",
        "probabilities",
        "random",
        "state",
        "step",
        "stopping",
        "target",
    },
    {"children", "sampling", "cache", "support", "native"},
    {"pool", "engines", "lanes", "led"},
    {"staging"},
    {"lm", "packing"},
    {"split", "chain_lm"},
    {"compiling", "batch"},
    {"hub"},
    {"checkpoints"},
    {"models"},
    {"policies", "drafters", "verifiers"},
    {"controllers", "node_by_node"},
    {"decode"},
    {"beside", "pricing"},
    {"presets", "hf", "pairs", "display"},
    {"compat", "harness", "inflate"},
    {"training", "__init__"},
)
TIER = {name: tier for tier, names in enumerate(TIERS) for name in names}


def part(path: Path) -> str:
    """The module or family a file belongs to: opt_tree/policies/opt.py is part of policies."""
    inside = path.relative_to(PACKAGE).with_suffix("")
    return inside.parts[0]


def imported(path: Path) -> Iterator[str]:
    """What a file imports at its top level, as parts of the package; imports inside functions are not counted."""
    for node in ast.walk(ast.Module([s for s in ast.parse(path.read_text()).body if not _defines(s)], [])):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module or ""]
            if node.module == "opt_tree":
                names = [f"opt_tree.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top in ("evaluation", "tests"):
                yield top
            if top == "opt_tree":
                yield rest.partition(".")[0] or "__init__"


def _defines(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    own = part(path)
    assert own in TIER, f"say in TIERS where {own} stands"
    for other in imported(path):
        assert other in TIER, f"{name_of(path)} imports {other}, which has no place in TIERS"
        assert other == own or TIER[other] < TIER[own], f"{name_of(path)} imports {other}, which is not below {own}"


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=name_of)
def test_no_device_is_written_down(path: Path) -> None:
    """A tensor's device decides (docs/design.md, what always holds, 6)."""
    found = re.findall(r"\.cuda\(|[\"']cuda:\d+[\"']", path.read_text())
    assert not found, f"{name_of(path)}: {found}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_library_prints_nothing(path: Path) -> None:
    """Training scripts and commands talk, `print_time` of the published interface asks for it; nothing else does."""
    if part(path) == "training" or name_of(path) == "opt_tree/models/__main__.py":
        return
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"}
    if name_of(path) == "opt_tree/compat.py":
        asked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "print_time"]
        lines -= {node.lineno for branch in asked for node in ast.walk(branch) if isinstance(node, ast.Call)}
    assert not lines, f"{name_of(path)} prints in lines {sorted(lines)}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_say_what_they_own(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert not {"utils", "helpers", "common", "misc"} & {*path.relative_to(PACKAGE).with_suffix("").parts}
    # jaxtyping needs real annotations, not strings.
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def test_the_public_names_are_those_imported_for_it() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    names = [alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(opt_tree.__all__)


@pytest.mark.parametrize("name", opt_tree.__all__)
def test_public_names_have_a_docstring(name: str) -> None:
    doc = getattr(opt_tree, name).__doc__ or ""
    assert len(doc.split()) > 3
    assert not doc.startswith(f"{name}("), "the signature that dataclass fills in is not a docstring"


def test_the_rules_above_see_something() -> None:
    """A parser that found nothing would pass everything."""
    assert {"decode", "policies", "drafters", "verifiers", "training"} <= {part(path) for path in SOURCES}
    assert {"arguments", "children", "pool"} == set(imported(PACKAGE / "policies" / "opt.py"))
    assert "hf" not in set(imported(PACKAGE / "decode.py"))  # only where `__call__` runs
    assert SCRIPTS


# The evaluation: commands, and behind each a room (a folder, or a module beside them).

EVALUATION = PACKAGE.parent / "evaluation"
FLOORS, ARROWS = 5, 40


def place(path: Path) -> str:
    """The room of a file: evaluation/compare/plots.py is in compare."""
    return path.relative_to(EVALUATION).with_suffix("").parts[0]


def arrows(name: Callable[[Path], str]) -> dict[str, set[str]]:
    """Who imports whom in the evaluation, wherever in a file it does; `name` says what is taken for one."""
    modules = {f"evaluation.{'.'.join(path.relative_to(EVALUATION).with_suffix('').parts)}": path for path in SCRIPTS}
    found: dict[str, set[str]] = {name(path): set() for path in SCRIPTS}
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                taken = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found[name(path)] |= {name(modules[module]) for module in taken if module in modules}
    return {one: others - {one} for one, others in found.items()}


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Each stands above all that it imports; ValueError for a circle."""

    def floor(one: str, above: tuple[str, ...] = ()) -> int:
        if one in above:
            raise ValueError(f"a circle: {' -> '.join((*above, one))}")
        return 1 + max((floor(other, (*above, one)) for other in graph[one]), default=0)

    return {one: floor(one) for one in graph}


def test_no_module_of_the_evaluation_is_in_a_circle() -> None:
    assert max(floors(arrows(name_of)).values()) > 3


def test_the_rooms_stand_on_few_floors_and_know_few_others() -> None:
    rooms = arrows(place)
    assert max(floors(rooms).values()) <= FLOORS
    assert sum(map(len, rooms.values())) <= ARROWS
    assert {"run", "questions", "answers", "report", "compare", "exactness", "latency", "demo"} <= rooms.keys()
    with pytest.raises(ValueError, match="a circle: a -> b -> a"):
        floors({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=name_of)
def test_nothing_outside_the_repository_is_named(path: Path) -> None:
    assert "../" not in path.read_text()


# What is longer than the aim (modules of 250 lines, functions of 45 lines, five parameters), each with its reason.
# Nothing joins these lists without one.

PUBLISHED = "the signature is that of another library or of the published code"
LONG_MODULES = {
    "evaluation/answers/file.py": "all that keeps an answer file whole: lock, parts, set aside, resume",
    "opt_tree/chain_lm.py": "a model path by path, and the probe that refuses it; the probe needs its inside",
    "opt_tree/decode.py": "the one loop, its decoder and what it returns",
    "opt_tree/engines/aot.py": "what is exported and how it is called must change together",
    "opt_tree/hf.py": "every option of `generate` is either honoured or refused here",
    "opt_tree/inflate.py": "one construction, with the proof that it computes the same function",
    "opt_tree/lm.py": "every forward passes through one function, with the probe that refuses a model",
    "opt_tree/training/tree_values.py": "one training: what is drafted, what it was worth, what it costs",
    "opt_tree/verifiers/base.py": "the two ways to judge, downwards and upwards, and what they share",
}
LONG_FUNCTIONS = {
    "opt_tree/hf.py: custom_generate": f"{PUBLISHED}, and its documentation with it",
    "opt_tree/hf.py: _start": "each kind of input that `generate` takes is told apart here",
}
WIDE_FUNCTIONS = {
    "evaluation/run/baselines.py: transformers_assisted": "a decoding method with an assistant, for functools.partial",
    "evaluation/run/runner.py: answer_all": "what a run has put together by then",
    "opt_tree/compat.py: _generate": PUBLISHED,
    "opt_tree/decode.py: draft": "everything that a draft depends on, so that it is a function",
    "opt_tree/decode.py: generate": "what a user of the loop may choose",
    "opt_tree/decode.py: generate_batch": "the same for several prompts",
    "opt_tree/engines/grouped.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/harness.py: __init__": PUBLISHED,
    "opt_tree/hf.py: custom_generate": PUBLISHED,
    "opt_tree/pairs.py: load_pair": "the front door: all by name, all with a default",
    "opt_tree/policies/costs.py: straight": "the numbers of two straight lines, by name",
    "opt_tree/training/eagle3.py: save_eagle3": "two layouts, with and without an output layer, in any dtype",
    "opt_tree/training/head_loss.py: forward": "an autograd function: its context and five inputs",
    "opt_tree/training/stream.py: build_stream": "its cache's key is made of all of them",
}


def too_long() -> tuple[set[str], set[str], set[str]]:
    """Modules, functions by their lines, and functions by their parameters that are beyond the aim."""
    modules, functions, wide = set(), set(), set()
    for path in SOURCES + SCRIPTS:
        text = path.read_text()
        if len(text.splitlines()) > 250:
            modules.add(name_of(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if (node.end_lineno or 0) - node.lineno >= 45:
                    functions.add(f"{name_of(path)}: {node.name}")
                if len([one for one in given if one.arg not in ("self", "cls")]) > 5:
                    wide.add(f"{name_of(path)}: {node.name}")
    return modules, functions, wide


def test_what_is_long_is_known_and_has_a_reason() -> None:
    for found, known in zip(too_long(), (LONG_MODULES, LONG_FUNCTIONS, WIDE_FUNCTIONS), strict=True):
        assert found - known.keys() == set(), "too long: make it shorter, or say here why not"
        assert known.keys() - found == set(), "no longer too long: take it off the list"
        assert all(known.values())
