"""The examples run, and do what they say: the text is plain decoding's, whatever drafts, draws or chooses."""

import contextlib
import functools
import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import numpy as np
import pytest
from asking import begin, root_of
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import opt_tree
from opt_tree.methods.children.iid import IID
from opt_tree.tools import advising, step_costs

NOTEBOOKS = {
    "quickstart": {"[::4]": "[::32]", "max_new_tokens=40": "max_new_tokens=20", "prompt, 40": "prompt, 20"}
    | {"(pair.encode(question), 48": "(pair.encode(question), 24", "most=64": "most=16"}
    | {"budgets = (6, 14, 30, 62)": "budgets = (6, 62)"},
    "your_model": {"NEW_TOKENS = 24": "NEW_TOKENS = 12", "to_fit + to_check": "to_check"},
}
"""What a test reads instead: fewer and shorter texts. `python docs/run_commands.py` runs the notebooks as they are."""
EXAMPLES = Path(__file__).parent.parent / "examples"


@functools.cache
def answered(prompt: tuple[int, ...]) -> list[int]:
    pair = opt_tree.load_pair("demo", dtype="float32")
    decoder = opt_tree.Decoder(pair.target, None, opt_tree.Static.empty())
    return decoder.generate(prompt, max_new_tokens=96, stop=pair.stop).tokens


def plain(prompt: Sequence[int], tokens: int) -> list[int]:
    """Plain decoding's answer, of at most 96 tokens, of the pair that the examples use."""
    return answered((*prompt,))[:tokens]


def example(name: str) -> dict:
    """What a file in examples/ defines."""
    return runpy.run_path(str(EXAMPLES / f"custom_{name}.py"))


def test_every_example_is_tested() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    scripts = {
        "custom_drafter.py",
        "custom_policy.py",
        "custom_verifier.py",
        "custom_controller.py",
        "chat.py",
        "prove.py",
    }
    assert files == scripts | {f"{name}.ipynb" for name in NOTEBOOKS}


@pytest.mark.slow
def test_the_bigram_drafter_drafts_and_changes_nothing() -> None:
    answer = example("drafter")["main"]()
    assert answer.tokens == plain(answer.prompt, 96)
    assert answer.mean_acceptance_length > 1.5
    assert answer.steps[0].tree.nodes <= 8


def test_the_bigram_drafter_says_what_it_counted() -> None:
    drafter = example("drafter")["Bigrams"](most=2)
    begin(drafter, [1, 2], None)
    few = root_of(drafter, [1, 2, 1, 3, 1, 2, 1])  # behind 1 came: 2, 3, 2
    assert few.tokens.tolist() == [[2, 3]]
    np.testing.assert_allclose(few.values.exp().numpy(), [[2 / 4, 1 / 4]])
    unknown = drafter._answer([9])
    assert unknown.values.tolist() == [[-np.inf, -np.inf]]
    begin(drafter, [9], None)
    assert root_of(drafter, [1]).values.isneginf().all(), "a new prompt begins from nothing"


@pytest.mark.slow
def test_the_trunk_is_a_trunk_and_changes_nothing() -> None:
    found = example("policy")
    answers = found["main"]()
    expected = plain(answers["Trunk"].prompt, 64)
    assert all(answer.tokens == expected for answer in answers.values())
    for step in answers["Trunk"].steps:
        inner = set(step.tree.parents[1:].tolist())
        assert len({int(step.tree.depths[row]) for row in inner}) == len(inner), "two nodes of one depth have children"
        assert step.tree.nodes <= found["Trunk"].nodes
    assert answers["Trunk"].mean_acceptance_length > 1.5


@pytest.mark.slow
def test_the_coin_between_two_exact_rules_is_exact() -> None:
    found = example("verifier")
    assert opt_tree.prove(found["coin"], IID(2), 2, depth=1)
    assert not opt_tree.prove(found["coin"], opt_tree.TopK(2), depth=1)
    assert found["main"]().mean_acceptance_length > 1


@pytest.mark.slow
def test_the_published_rule_is_proved_and_the_wrong_one_refuted() -> None:
    published, on_the_best, equality = runpy.run_path(str(EXAMPLES / "prove.py"))["main"]()
    assert published and equality and not on_the_best


@pytest.mark.slow
def test_the_stages_follow_their_plan_and_change_nothing() -> None:
    answer = example("controller")["main"]()
    assert answer.tokens == plain(answer.prompt, 48)
    nodes = [step.tree.nodes for step in answer.steps]
    assert nodes[:2] == [0, 0] and max(nodes[2:6]) <= 4 < max(nodes[6:]) <= 16


class Shown(DisplayHook):
    """Keeps what a cell's last line is shown as."""

    def write_format_data(self, format_dict: dict[str, str], md_dict: dict | None = None) -> None:
        self.shell.user_ns_hidden.setdefault("shown", []).append(format_dict)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that raises fails the test. In IPython in this process: a kernel would import torch anew."""
    cells = [cell for cell in nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert len(str([cell.outputs for cell in cells])) < 150_000, "keep the stored outputs small"
    for long, short in NOTEBOOKS[name].items():
        longer = [cell for cell in cells if long in cell.source]
        assert longer, long
        for cell in longer:
            cell.source = cell.source.replace(long, short)
    # Without the public model, which one machine has, another not. The advice is over fewer trees, each measured once.
    for variable, value in (("OPT_TREE_CACHE", "cache"), ("IPYTHONDIR", "ipython")):
        monkeypatch.setenv(variable, str(tmp_path / value))
    for module, constant, fewer in (
        (advising, "NODES", (2, 8, 64)),
        (advising, "THRESHOLDS", (0.2,)),
        (step_costs, "ROUNDS", 1),
        (step_costs, "CONTEXTS", (32,)),
    ):
        monkeypatch.setattr(module, constant, fewer)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(EXAMPLES)
    shell = InteractiveShell.instance(displayhook_class=Shown, config=Config(HistoryManager={"enabled": False}))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for cell in cells:
                shell.run_cell(cell.source).raise_error()
        shown = [one["text/html"] for one in shell.user_ns_hidden.get("shown", ()) if "text/html" in one]
    finally:
        InteractiveShell.clear_instance()
    assert "tokens a step" in printed.getvalue()
    if name == "quickstart":
        assert len(shown) == 2 and all("␣means" in html and "<svg" in html for html in shown)
        rows = [line.split() for line in printed.getvalue().splitlines() if " a second" in line]
        lengths = {row[0]: [float(value) for value in row[1:3]] for row in rows}
        gains = np.subtract(lengths["OPT-Tree"], lengths["EAGLE-2"])
        assert gains.min() >= 0 and gains[-1] > 0.3, "nobody would come for that"
