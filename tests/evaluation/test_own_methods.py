"""A method of one's own in the commands: from a file outside, and copied into the package as docs/extending.md says."""

import importlib
import json
import multiprocessing
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_pair

import opt_tree
from evaluation import eval_opt_classic, report
from evaluation.compare import __main__ as compare
from opt_tree.methods.controllers.registry import parse_controller
from opt_tree.methods.drafters.registry import parse_spec
from opt_tree.methods.own_files import digests, split_name
from opt_tree.methods.policies.registry import POLICIES, make_policy
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.models.checkpoints import CheckpointError

ROOT = Path(opt_tree.__file__).parent.parent
EXAMPLES = ROOT / "examples"
COPIED = {
    "policy": ("policies/trunk.py", "class Trunk", '@register("trunk", about="one trunk")\n@dataclass'),
    "drafter": ("drafters/bigrams.py", "", ""),
    "verifier": ("verifiers/coin_toss.py", "@valid_for(IID", '@register("coin", about="a coin")\n@valid_for(IID'),
    "controller": ("controllers/stages.py", "def stages", '@register("stages", about="a schedule")\ndef stages'),
}
"""Of an example: where the page says to put it, and what of it to put the decorator above."""
LOADS = """

@register("bigrams", about="a table of bigrams")
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Bigrams:
    return Bigrams()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter, and questions of one's own."""
    root = save_pair(tmp_path_factory.mktemp("pair"))
    lines = [{"question": text} for text in ("aabbcc", "hcgafb", "aaabac")]
    (root / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def arguments(folder: Path, output: Path, names: dict[str, str]) -> list[str]:
    """Every example beside OPT-Tree, greedily and drawn."""
    trees = f"{names['policy']},{names['controller']},opt:0.2,chains:2"
    given = f"--base-model-path {folder}/target --drafter lm:{folder}/draft,{names['drafter']} --dtype float64"
    given += f" --device cpu --question-file {folder}/mine.jsonl --limit 2 --max-new-tokens 8 --policies {trees}"
    return [
        *given.split(),
        *f"--verifiers match,{names['verifier']} --temperatures 0,1 --budgets 6 --expect-every 2".split(),
        *f"--sharpening bare --output {output}".split(),
    ]


def check_table(output: Path, names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each example has its lines, beside OPT-Tree's, up to the table of a paper; greedy texts are plain decoding's."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cells = {tuple(line["cell"][key] for key in ("drafter", "policy", "verifier", "temperature")) for line in lines}
    tables = {cell[0] for cell in cells} - {names["drafter"]}
    for drafter in (*tables, names["drafter"]):
        for policy in (names["policy"], names["controller"], "opt:0.2"):
            assert (drafter, policy, "greedy", 0.0) in cells and (drafter, policy, "match", 1.0) in cells
    assert (*tables, "chains:2", names["verifier"], 1.0) in cells
    for line in lines:
        assert all(max(answer["choices"][0]["tree_nodes"]) <= 6 for answer in line["answers"])
        if not line["cell"]["temperature"]:
            same, of = line["figures"]["same_as_plain"]
            assert same == of > 0, line["question_id"]
    capsys.readouterr()
    assert report.main([str(output), "--format", "latex"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("\\begin{tabular}") and table.rstrip().endswith("\\end{tabular}")
    assert all(name.replace("_", "\\_") in table for name in (*names.values(), "opt:0.2"))


@pytest.mark.slow
def test_every_example_is_compared_from_outside(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    found = {"policy": "Trunk", "drafter": "Bigrams", "verifier": "coin", "controller": "stages"}
    names = {kind: f"examples/custom_{kind}.py:{name}" for kind, name in found.items()}
    assert compare.main(arguments(folder, tmp_path / "a.jsonl", names)) == 0
    check_table(tmp_path / "a.jsonl", names, capsys)
    assert not set(POLICIES) & set(names.values()), "a file's method is in no list"


@pytest.mark.slow
def test_every_example_is_compared_as_a_file_of_the_package(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "opt_tree"
    shutil.copytree(ROOT / "opt_tree", package, ignore=shutil.ignore_patterns("embedded"))  # with what Python compiled
    (package / "models" / "embedded").symlink_to(ROOT / "opt_tree" / "models" / "embedded")
    for kind, (place, mark, decorated) in COPIED.items():
        family = place.partition("/")[0]
        text = (EXAMPLES / f"custom_{kind}.py").read_text()
        found = re.search(r"\n(?=import opt_tree\n)", text)
        assert found is not None
        imports = f"from opt_tree.methods.{family}.registry import register\n"
        if kind == "drafter":
            imports = "from opt_tree.methods.drafters.registry import DrafterOptions, register\n"
            imports += "from opt_tree.models.chain_lm import AnyLM\n"
            text += LOADS
        elif kind == "policy":
            mark, decorated = "@dataclass(frozen=True)\n" + mark, decorated + "(frozen=True)\n" + mark
        assert not mark or text.count(mark) == 1
        text = text.replace(mark, decorated) if mark else text
        (package / "methods" / place).write_text(text[: found.end()] + imports + text[found.end() :])
    names = {"policy": "trunk", "drafter": "bigrams", "verifier": "coin", "controller": "stages"}

    def run() -> None:
        """The copy is imported anew, in a child that has torch already."""
        for module in [name for name in sys.modules if name.partition(".")[0] in ("opt_tree", "evaluation")]:
            del sys.modules[module]
        sys.path.insert(0, str(tmp_path))
        copied = importlib.import_module("evaluation.compare.__main__")
        assert sys.modules["opt_tree"].__file__ == str(package / "__init__.py")
        sys.exit(copied.main(arguments(folder, tmp_path / "b.jsonl", names)))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0, "its error is among what this test printed"
    check_table(tmp_path / "b.jsonl", names, capsys)


def test_a_controller_of_a_file_runs_the_published_command(folder: Path, tmp_path: Path) -> None:
    given = (
        f"--base-model-path {folder}/target --draft-model-path {folder}/draft --dtype float64 --device cpu --limit 1"
    )
    given += f" --question-file {folder}/mine.jsonl --max-new-tokens 8 --answer-file {tmp_path}/a.jsonl --nodes 6"
    assert eval_opt_classic.main([*given.split(), "--controller", f"{EXAMPLES}/custom_controller.py:stages"]) == 0
    (answer,) = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert answer["choices"][0]["tree_nodes"][:2] == [0, 0], "two steps without a tree"


@pytest.mark.slow
def test_a_file_that_changed_is_not_gone_on_with(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from opt_tree.policy import OptTree\ndef tree(nodes): return OptTree(nodes, 0.2)\n")
    given = (
        f"--base-model-path {folder}/target --draft-model-path {folder}/draft --dtype float64 --device cpu --limit 1"
    )
    given += f" --question-file {folder}/mine.jsonl --max-new-tokens 4 --output {tmp_path}/a.jsonl --sharpening bare"
    run = [*given.split(), "--policies", f"{mine}:tree", "--budgets", "6"]
    assert compare.main(run) == 0 and compare.main(run) == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    mine.write_text(mine.read_text().replace("0.2", "0.1"))
    capsys.readouterr()
    assert compare.main(run) == 2
    assert "mine.py changed since" in capsys.readouterr().err and (tmp_path / "a.jsonl").read_bytes() == before


BROKEN = {
    "nothing of that name": ("Trunk = 3", "Other", make_policy, "has no Other"),
    "no policy": ("Trunk = 3", "Trunk", make_policy, "is 3: neither a tree policy nor what makes one"),
    "a function of no policy": ("def make(nodes): return 3", "make", make_policy, "is 3: no tree policy"),
    "more than a budget": ("def make(nodes, width): return 3", "make", make_policy, "cannot be made of nodes"),
    "a file that fails": ("x = 1\ny = x / 0", "make", make_policy, "line 2: ZeroDivisionError"),
    "bad syntax": ("def (", "make", make_policy, "line 1: SyntaxError"),
    "no verifier": ("def judge(tree, logits, random): ...", "judge", VERIFIERS.named, "is no verifier"),
    "no controller": ("pick = 3", "pick", parse_controller, "is 3: no controller"),
    "no drafter": ("draft = 3", "draft", parse_spec, "is 3: neither a class of drafters"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_file_lacks_is_one_line(case: str, tmp_path: Path) -> None:
    text, name, read, message = BROKEN[case]
    file = tmp_path / f"{case.replace(' ', '_')}.py"
    file.write_text(text + "\n")
    call: Callable = (lambda spec: read(spec, 6)) if read is make_policy else read  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as refused:
        call(f"{file}:{name}")
    assert file.name in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_without_a_name_says_what_to_write(tmp_path: Path) -> None:
    for read in (POLICIES.named, parse_spec):
        with pytest.raises(ValueError, match=r"mine.py is a file: .* mine.py:NAME"):
            read("mine.py")
    with pytest.raises(ValueError, match="no file"):
        POLICIES.named("not_there.py:Trunk")


@pytest.mark.slow
def test_a_drafter_of_a_file_is_a_part_of_others(tmp_path: Path) -> None:
    """Made by a function, from what follows its name."""
    text = "from opt_tree.methods.drafters.tables.ngram import NGramDrafter\n"
    text += "def table(path, target, options): return NGramDrafter((0.0,) * int(path))\n"
    (tmp_path / "mine.py").write_text(text)
    spec = f"graft:1:lm:demo+{tmp_path}/mine.py:table:3"
    assert list(digests([spec])) == [f"{tmp_path}/mine.py"]
    pair = opt_tree.load_pair("demo", drafter=spec, dtype="float32")
    assert "n-grams of the text at hand" in pair.drafter.describe()


def test_a_folder_that_was_downloaded_runs_no_file(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    for spec in ("{here}/evil.py:Drafter", "graft:1:{here}/evil.py:Drafter+store:demo"):
        (tmp_path / "drafter.json").write_text(json.dumps({"spec": spec}))
        with pytest.raises(CheckpointError, match=r"drafter.json does not say what drafts"):
            parse_spec(str(tmp_path))


def test_a_name_of_a_file_is_split_from_what_follows() -> None:
    assert split_name("mine.py:Trunk:24:0.3") == ("mine.py:Trunk", "24:0.3")
    assert split_name("a/mine.py:Trunk") == ("a/mine.py:Trunk", "")
    assert (
        split_name("opt:0.2") is split_name("mine.py") is split_name("mine.py:3") is split_name("lm:mine.py:X") is None
    )
