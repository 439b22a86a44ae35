"""The architecture, read from the source: who may import whom, and what the package must not contain."""

import ast
import functools
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import opt_tree

PACKAGE = Path(opt_tree.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for top in ("evaluation", "experiments") for path in (PACKAGE.parent / top).rglob("*.py"))

# docs/design.md, "The folders": what each folder may import, in functions too, besides itself.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "policies": {"core"},
    "verifiers": {"core"},
    "engines": {"core"},
    "models": {"core", "engines"},
    "drafters": {"core", "models"},
    "controllers": {"core", "policies", "verifiers", "models"},
    "batch": {"core", "engines", "models"},
    "decoding": {"core", "policies", "verifiers", "engines", "models", "drafters", "controllers", "batch"},
    "display": {"core", "policies", "verifiers", "decoding"},
    "integrations": {"core", "policies", "models", "decoding"},
    "training": {
        "core",
        "policies",
        "verifiers",
        "engines",
        "models",
        "drafters",
        "controllers",
        "decoding",
        "display",
    },
}
FLOORS = 9


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part(path: Path) -> str:
    """The folder of a file: opt_tree/policies/opt.py is part of policies."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in the file it does."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            if node.module == "opt_tree":
                yield from (f"opt_tree.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def rooms_of(path: Path) -> set[str]:
    """The folders that a file imports, other than its own; "__init__" is the package itself."""
    names = [name.split(".") for name in imported(path)]
    found = {parts[1] if len(parts) > 1 else "__init__" for parts in names if parts[0] == "opt_tree"}
    return (found | {parts[0] for parts in names if parts[0] in ("evaluation", "experiments", "tests")}) - {part(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def test_the_package_has_twelve_folders() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == {*ROOMS, "__init__.py", "__main__.py", "public.py", "py.typed"}


def test_a_folder_imports_what_it_may() -> None:
    inside = [path for path in SOURCES if path.parent != PACKAGE]
    found = {name_of(path): more for path in inside if (more := rooms_of(path) - ROOMS[part(path)])}
    assert not found, "see ROOMS"


def test_no_folder_is_in_a_circle() -> None:
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in SOURCES:
        if path.parent != PACKAGE:
            graph[part(path)] |= rooms_of(path)
    assert max(floors(graph).values()) <= FLOORS


def test_no_device_is_written_down_and_nothing_outside_the_repository() -> None:
    """A tensor's device decides (docs/design.md, what always holds, 6)."""
    pattern = re.compile(r"\.cuda\(|[\"']cuda:\d+[\"']|\.\./")
    assert pattern.search('x.cuda("cuda:0")') and pattern.search("../x")
    assert not {name_of(path): found for path in SOURCES + SCRIPTS if (found := pattern.findall(path.read_text()))}


def prints(path: Path) -> set[int]:
    """The lines in which a file prints, unless `print_time` of the published interface asks for it."""
    tree = parsed(path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"}
    if name_of(path) == "opt_tree/integrations/published_api.py":
        asked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "print_time"]
        lines -= {node.lineno for branch in asked for node in ast.walk(branch) if isinstance(node, ast.Call)}
    return lines


def test_training_scripts_and_commands_print_and_nothing_else_does() -> None:
    found = {name_of(path): lines for path in SOURCES if part(path) != "training" and (lines := prints(path))}
    commands = ("__main__", "core/command_line", "core/interrupted", "models/__main__", "display/prove")
    assert found.keys() == {f"opt_tree/{name}.py" for name in commands}, found


def test_modules_say_what_they_own() -> None:
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)), name_of(path)
        assert not {"utils", "helpers", "common", "misc"} & {*path.relative_to(PACKAGE).with_suffix("").parts}
        future = [
            node for node in parsed(path).body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        assert not future, f"{name_of(path)}: jaxtyping needs real annotations, not strings"


def test_the_public_names_are_those_imported_for_it() -> None:
    body = ast.parse((PACKAGE / "public.py").read_text()).body
    names = [alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(opt_tree.__all__)


LAZY = """
import pickle, sys
before = sys.excepthook
import opt_tree
for name in ("__version__", "__wrapped__", "__signature__"):
    getattr(opt_tree, name, None)
assert "torch" not in sys.modules
sys.modules |= imported
policy = opt_tree.OptTree(3)
assert pickle.loads(pickle.dumps(policy)) == policy and opt_tree.policies.OptTree is opt_tree.OptTree
assert {*opt_tree.__all__, "policies", "__version__"} <= {*dir(opt_tree)}
assert "Opttree" not in dir(opt_tree) and not hasattr(opt_tree, "Opttree")
from opt_tree import *
from opt_tree import training, verifiers
assert not {*opt_tree.__all__} - {*globals()}
assert sys.excepthook is before, "a process that is not ours keeps its hook"
"""


def test_a_public_name_is_imported_when_it_is_asked_for() -> None:
    """In a child that forgets the package, and for a while torch: to import torch anew takes seconds."""

    def work() -> None:
        forgotten = [name for name in sys.modules if name.partition(".")[0] in ("opt_tree", "torch")]
        modules = {name: sys.modules.pop(name) for name in forgotten}
        imported = {name: module for name, module in modules.items() if name.partition(".")[0] == "torch"}
        exec(compile(LAZY, "LAZY", "exec"), {"imported": imported})

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(120)
    assert child.exitcode == 0


def test_public_names_have_a_docstring() -> None:
    for name in opt_tree.__all__:
        doc = getattr(opt_tree, name).__doc__ or ""
        assert len(doc.split()) > 3, name
        assert not doc.startswith(f"{name}("), "the signature that dataclass fills in is not a docstring"


def test_the_rules_above_see_something() -> None:
    """A parser that found nothing would pass everything."""
    assert {part(path) for path in SOURCES} == {
        *ROOMS,
        "__init__",
        "__main__",
        "public",
    }
    assert rooms_of(PACKAGE / "policies" / "opt.py") == {"core"}
    assert "batch" in rooms_of(PACKAGE / "decoding" / "side_by_side.py")
    assert SCRIPTS


# The evaluation: commands, and behind each a room (a folder, or a module beside them). The experiments stand on it.

ROOT = PACKAGE.parent
EVALUATION_FLOORS, ARROWS = 5, 39


def place(path: Path) -> str:
    """The room of a file: evaluation/compare/plots.py is in compare, all experiments are in one."""
    top, room, *_ = path.relative_to(ROOT).with_suffix("").parts
    return room if top == "evaluation" else top


def arrows(name: Callable[[Path], str]) -> dict[str, set[str]]:
    """Who imports whom among the scripts, wherever in a file it does; `name` says what is taken for one."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SCRIPTS}
    found: dict[str, set[str]] = {name(path): set() for path in SCRIPTS}
    for path in SCRIPTS:
        for node in ast.walk(parsed(path)):
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
    assert not any("experiments" in others for others in rooms.values()), "the evaluation knows no experiment"
    del rooms["experiments"]
    assert max(floors(rooms).values()) <= EVALUATION_FLOORS
    assert sum(map(len, rooms.values())) <= ARROWS
    assert {"run", "questions", "answers", "report", "compare", "exactness", "latency", "demo"} <= rooms.keys()
    with pytest.raises(ValueError, match="a circle: a -> b -> a"):
        floors({"a": {"b"}, "b": {"a"}})


# What is longer than the aim (modules of 250 lines, functions of 45 lines, five parameters), each with its reason.
# Nothing joins these lists without one.

PUBLISHED = "the signature is that of another library or of the published code"
LONG_MODULES = {
    "experiments/gpu_first_light.py": "all that a first GPU is asked, one function a part",
    "evaluation/run/options.py": "every option that the evaluation's commands share, one field each",
    "evaluation/compare/measure.py": "one combination: what is loaded, what decodes in which order, what is expected",
    "evaluation/report.py": "one command: the figures of answer files in tables and words",
    "opt_tree/models/checkpoints.py": "whatever is read from files, and one line for everything that is wrong with one",
    "opt_tree/models/chain_lm.py": "a model path by path, and the probe that refuses it; the probe needs its inside",
    "opt_tree/decoding/decoder.py": "the one loop and its decoder",
    "opt_tree/engines/prepacked.py": "packed copies, and what stands in for a layer in one thread alone",
    "opt_tree/engines/compiled.py": "what is exported and how it is called must change together",
    "opt_tree/integrations/hf_generate.py": "every option of `generate` is either honoured or refused here",
    "evaluation/run/inflate.py": "one construction, with the proof that it computes the same function",
    "opt_tree/models/causal_lm.py": "the doors of a model, and the spellings of callers that are not converted yet",
    "opt_tree/training/controllers/tree_values.py": "one training: what is drafted, what it was worth, what it costs",
    "opt_tree/verifiers/base.py": "the two ways to judge, downwards and upwards, and what they share",
}
LONG_FUNCTIONS = {
    "opt_tree/integrations/hf_generate.py: custom_generate": f"{PUBLISHED}, and its documentation with it",
}
WIDE_FUNCTIONS = {
    "opt_tree/verifiers/base.py: valid_for": "what a verifier says of itself, all by name",
    "evaluation/timing.py: interleave": "what a measurement may choose",
    "opt_tree/integrations/published_api.py: _generate": PUBLISHED,
    "opt_tree/decoding/draft.py: draft": "everything that a draft depends on, so that it is a function",
    "opt_tree/decoding/draft.py: grow": "the same, and what was asked already",
    "opt_tree/decoding/decoder.py: generate": "what a user of the loop may choose",
    "opt_tree/decoding/decoder.py: answer": "the same, as a generator",
    "opt_tree/decoding/decoder.py: steps": "the same, a step at a time",
    "opt_tree/decoding/side_by_side.py: generate_batch": "the same for several prompts",
    "opt_tree/engines/canonical_cuda.py: _score": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/engines/canonical_cuda.py: _weigh": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/engines/canonical_cuda.py: _sum": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/engines/split_attention.py: _attend_part": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/engines/split_attention.py: _combine_parts": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/engines/split_attention.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/engines/canonical.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/engines/delta_net.py: follow": "the delta rule of a model's module, as transformers calls it",
    "opt_tree/engines/grouped_attention.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/integrations/tree_lm.py: __init__": PUBLISHED,
    "opt_tree/integrations/hf_generate.py: custom_generate": PUBLISHED,
    "opt_tree/decoding/advising.py: advise": "a front door: two that are needed, all else with a default",
    "opt_tree/decoding/pair.py: load_pair": "the front door: all by name, all with a default",
    "opt_tree/policies/costs.py: straight": "the numbers of two straight lines, by name",
    "opt_tree/training/heads/eagle3.py: save_eagle3": "two layouts, with and without an output layer, in any dtype",
    "experiments/embedded_family/stream.py: build_stream": "its cache's key is made of all of them",
}


def too_long() -> tuple[set[str], set[str], set[str]]:
    """Modules, functions by their lines, and functions by their parameters that are beyond the aim."""
    modules, functions, wide = set(), set(), set()
    for path in SOURCES + SCRIPTS:
        text = path.read_text()
        if len(text.splitlines()) > 250:
            modules.add(name_of(path))
        for node in ast.walk(parsed(path)):
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
