"""The architecture, read from the source: who may import whom, and what the package must not contain."""

import ast
import functools
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import opt_tree

PACKAGE = Path(opt_tree.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for top in ("evaluation", "experiments") for path in (PACKAGE.parent / top).rglob("*.py"))

DOORS = ("__init__", "__main__", "public")
"""Files beside the folders that are not the core: they put together what people import and call."""
FAMILIES = {"children", "controllers", "drafters", "policies", "verifiers"}
# docs/design.md, "The folders": what each folder may import, in functions too, besides itself. The core is the files
# beside the folders.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "system": {"core"},
    "backends": {"core", "system"},
    "models": {"core", "system", "backends"},
    "methods": {"core", "system"},
    "methods/children": {"core"},
    "methods/policies": {"core", "methods", "methods/children"},
    "methods/verifiers": {"core", "methods", "methods/children"},
    "methods/drafters": {"core", "system", "models", "methods"},
    "methods/controllers": {"core", "models", "methods", *(f"methods/{name}" for name in FAMILIES - {"controllers"})},
    "tools": {"core", "system", "backends", "models", *{"methods", *(f"methods/{name}" for name in FAMILIES)}},
    "integrations": {"core", "system", "backends", "models", "methods", "methods/policies", "methods/drafters"}
    | {"tools"},
    "training": {"core", "system", "models", *(f"methods/{name}" for name in FAMILIES), "tools"},
}
FLOORS = 8


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part(path: Path) -> str:
    """The room of a file: opt_tree/pool.py is part of the core, opt_tree/methods/policies/talon.py of its family."""
    *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
    if not folders:
        return name if name in DOORS else "core"
    return "/".join(folders[:2]) if folders[0] == "methods" else folders[0]


def is_module(name: str) -> bool:
    """Whether a name of the package is one of its files or folders."""
    place = PACKAGE.joinpath(*name.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """The modules that a file imports, wherever in the file it does."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inside if name.startswith("opt_tree.") and is_module(name)]
            yield from modules if len(modules) == len(inside) else [*modules, node.module or ""]


def room_of(module: str) -> str:
    """The room of a module of the package, or the name of another one."""
    top, *below = module.split(".")
    if top != "opt_tree":
        return top
    folder = PACKAGE.joinpath(*below)
    return part(folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py"))


def rooms_of(path: Path) -> set[str]:
    """The rooms that a file imports, other than its own; "__init__" is the package itself."""
    ours = {"opt_tree", "evaluation", "experiments", "tests"}
    return {room_of(name) for name in imported(path) if name.partition(".")[0] in ours} - {part(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def test_the_package_is_the_core_its_doors_and_folders() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert entries == {room.partition("/")[0] for room in ROOMS} - {"core"}
    inside = {path.name for path in (PACKAGE / "methods").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert inside == FAMILIES


CORE = [path for path in SOURCES if part(path) == "core"]
MOST_FILES, MOST_LINES = 18, 2596


def test_the_core_names_nothing_outside_itself() -> None:
    """Neither by an import, in a function or for type checking alone, nor in a string or a comment."""
    own = {f"opt_tree.{path.stem}" for path in CORE}
    for path in CORE:
        assert {name for name in imported(path) if name.partition(".")[0] == "opt_tree"} <= own, name_of(path)
        told = {found for found in re.findall(r"\bopt_tree(?:\.\w+)+", path.read_text())}
        outside = {name for name in told if not any(name == one or name.startswith(f"{one}.") for one in own)}
        assert not outside, f"{name_of(path)} names {outside}"


def test_the_core_stays_small() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in CORE}
    assert len(lines) <= MOST_FILES and sum(lines.values()) <= MOST_LINES, "these numbers only shrink"
    assert max(lines.values()) <= 250, max(lines, key=lambda name: lines[name])


LOADED = """
import sys
import opt_tree.policy
policy = {name for name in sys.modules if name.split(".")[0] == "opt_tree"}
assert "transformers" not in sys.modules, "a policy needs no transformers"
import opt_tree.decoder, opt_tree.draft_model, opt_tree.model
loop = {name for name in sys.modules if name.split(".")[0] == "opt_tree"}
print(len(policy), len(loop))
"""


@pytest.mark.slow
def test_a_policy_loads_few_files_and_the_loop_the_core_alone() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=ROOT)
    policy, loop = map(int, run.stdout.split())
    assert policy <= 13, policy
    assert loop <= MOST_FILES + 4, "the core, the package, and what its __init__ loads"


def test_a_folder_imports_what_it_may() -> None:
    inside = [path for path in SOURCES if part(path) in ROOMS]
    found = {name_of(path): more for path in inside if (more := rooms_of(path) - ROOMS[part(path)])}
    assert not found, "see ROOMS"


def test_no_folder_is_in_a_circle() -> None:
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in SOURCES:
        if part(path) in ROOMS:
            graph[part(path)] |= rooms_of(path)
    assert max(floors(graph).values()) <= FLOORS


def test_a_folder_is_imported_without_its_files() -> None:
    """Names are found by registries when they are asked."""
    for path in SOURCES:
        if path.name == "__init__.py" and path.parent not in (PACKAGE, PACKAGE / "models" / "named"):
            assert not [name for name in imported(path) if name.startswith("opt_tree")], name_of(path)


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
    commands = ("__main__", "system/command_line", "system/interrupted", "models/__main__")
    commands += "tools/display/demo", "tools/display/prove"
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
assert pickle.loads(pickle.dumps(policy)) == policy and opt_tree.policy.OptTree is opt_tree.OptTree
assert {*opt_tree.__all__, "tools", "__version__"} <= {*dir(opt_tree)}
assert "Opttree" not in dir(opt_tree) and not hasattr(opt_tree, "Opttree")
from opt_tree import *
from opt_tree import training, verify
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
    assert rooms_of(PACKAGE / "methods" / "policies" / "eagle2.py") == {"core"}
    assert "backends" in rooms_of(PACKAGE / "tools" / "step_costs.py")
    assert len(CORE) > 15
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
    "experiments/other_engines/__main__.py": "every option of the comparison, and which peers share a run",
    "experiments/other_engines/engines.py": "an engine a function: how each is loaded, told to draft, and asked",
    "experiments/gpu_first_light.py": "all that a first GPU is asked, one function a part",
    "evaluation/run/options.py": "every option that the evaluation's commands share, one field each",
    "evaluation/report.py": "one command: the figures of answer files in tables and words",
    "opt_tree/models/checkpoints.py": "whatever is read from files, and one line for everything that is wrong with one",
    "opt_tree/models/chain_lm.py": "a model path by path, and the probe that refuses it; the probe needs its inside",
    "opt_tree/backends/prepacked.py": "packed copies, and what stands in for a layer in one thread alone",
    "opt_tree/backends/compiled.py": "what is exported and how it is called must change together",
    "opt_tree/integrations/hf_generate.py": "every option of `generate` is either honoured or refused here",
    "experiments/inflate.py": "one construction, with the proof that it computes the same function",
    "opt_tree/models/causal_lm.py": "the doors of a model, and the spellings of callers that are not converted yet",
    "opt_tree/training/controllers/tree_values.py": "one training: what is drafted, what it was worth, what it costs",
}
LONG_FUNCTIONS = {
    "opt_tree/integrations/hf_generate.py: _generate": f"{PUBLISHED}, and its documentation with it",
}
WIDE_FUNCTIONS = {
    "experiments/other_engines/registry.py: peers_of": "what a comparison of engines may choose",
    "experiments/other_engines/measuring.py: _try": "a peer, where it runs, and the processes that it may share",
    "evaluation/timing.py: interleave": "what a measurement may choose",
    "opt_tree/integrations/published_api.py: _generate": PUBLISHED,
    "opt_tree/decode.py: grow": "everything that a tree depends on, so that it is a function",
    "opt_tree/decoder.py: generate": "what a user of the loop may choose",
    "opt_tree/decoder.py: answer": "the same, as a generator",
    "opt_tree/decoder.py: steps": "the same, a step at a time",
    "opt_tree/backends/batch/side_by_side.py: generate_batch": "the same for several prompts",
    "opt_tree/backends/canonical_cuda.py: _score": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/backends/canonical_cuda.py: _weigh": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/backends/canonical_cuda.py: _sum": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/backends/split_attention.py: _attend_part": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/backends/split_attention.py: _combine_parts": "a kernel takes pointers, strides and sizes, each a number",
    "opt_tree/backends/split_attention.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/backends/canonical.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/backends/delta_net.py: follow": "the delta rule of a model's module, as transformers calls it",
    "opt_tree/backends/state_space.py: scan": "the scan of a model's module, as transformers calls it",
    "opt_tree/backends/grouped_attention.py: __call__": "an attention function, as transformers calls it",
    "opt_tree/integrations/lm_eval_model.py: __init__": PUBLISHED,
    "opt_tree/integrations/hf_generate.py: _generate": PUBLISHED,
    "opt_tree/tools/advising.py: advise": "a front door: two that are needed, all else with a default",
    "opt_tree/tools/pair.py: load_pair": "the front door: all by name, all with a default",
    "opt_tree/methods/policies/costs.py: straight": "the numbers of two straight lines, by name",
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


def test_a_class_has_its_name_alone() -> None:
    """In the library, private ones too: a reader who looks for a name finds one class."""
    owners: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in owners.items() if len(paths) > 1}


def test_what_is_long_is_known_and_has_a_reason() -> None:
    for found, known in zip(too_long(), (LONG_MODULES, LONG_FUNCTIONS, WIDE_FUNCTIONS), strict=True):
        assert found - known.keys() == set(), "too long: make it shorter, or say here why not"
        assert known.keys() - found == set(), "no longer too long: take it off the list"
        assert all(known.values())
