"""What commands there are, what they are called, what they write where nothing is said, how long they say they take."""

import dataclasses
import json
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from transformers.utils import logging

import opt_tree.__main__ as library
from evaluation import report
from evaluation.answers.metrics import bootstrap
from evaluation.command_line import parse, run_command
from evaluation.compare import options as compare
from evaluation.compare.studies import STUDIES
from evaluation.run import options as run_options
from evaluation.run.options import Options
from examples import chat
from experiments import gpu_first_light as first_light
from experiments.other_engines import __main__ as other_engines
from opt_tree import OptTree
from opt_tree.backends.quantised import BITS
from opt_tree.methods.controllers.registry import CONTROLLERS
from opt_tree.methods.drafters.heads.block_laws import KINDS as MARKOV
from opt_tree.methods.drafters.registry import KINDS
from opt_tree.methods.policies.registry import POLICIES
from opt_tree.methods.registry import listed
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.models import __main__ as models
from opt_tree.tools.display import prove
from opt_tree.training.fitting import trim
from opt_tree.training.plans import MARKOV as TRAINED

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_command_of_the_library_is_listed_and_runs_by_its_short_name(monkeypatch, capsys):
    package = ROOT / "opt_tree"
    scripts = {path for path in package.rglob("*.py") if "\nif __name__ ==" in path.read_text()}
    named = {package / f"{module.replace('.', '/')}.py" for module in library.COMMANDS.values()}
    assert named == scripts - {package / "__main__.py"}
    assert 'opt-tree = "opt_tree.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(sys, "argv", ["opt-tree"])
    assert library.main() == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^opt-tree {name} +\w+", said, flags=re.M) for name in library.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["opt-tree", "models"])
    with pytest.raises(SystemExit, match="0"):
        library.main()
    assert "smollm2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["opt-tree", "calibrat"])
    assert library.main() == 2
    assert capsys.readouterr().err == "error: no command 'calibrat'; did you mean calibrate?\n"


HEAVY = ("torch", "transformers", "scipy", "pandas", "matplotlib")
LIGHT = """
import importlib.abc, io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {heavy}:
            raise ImportError(f"{{name}} is imported")

sys.meta_path.insert(0, Refuse())
for words in {commands}:
    module, *arguments = words.split()
    sys.argv = [module, *arguments]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_module(module, run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException as error:
        status = repr(error)
    print(json.dumps([words, status, out.getvalue(), err.getvalue()]))
"""


def commands() -> list[str]:
    """Every command: the library's, and each module of the evaluation and the experiments; demos and the chat page."""
    found = ["demo_opt_classic", "demo_opt_eagle", "examples.chat"]
    found += [f"opt_tree {name}" for name in library.COMMANDS if name != "lm-eval" or find_spec("lm_eval")]
    for path in sorted(path for top in ("evaluation", "experiments") for path in (ROOT / top).rglob("*.py")):
        if "\nif __name__ ==" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return found


@pytest.mark.slow
def test_help_and_a_mistyped_flag_wait_for_no_torch():
    """One process for all of them: what is heavy cannot be imported there."""
    listing = ["opt_tree", "opt_tree --help", "opt_tree calibrat"]
    asked = [*listing, *(f"{name} {flag}" for name in commands() for flag in ("--help", "--halp"))]
    script = LIGHT.format(heavy=HEAVY, commands=asked)
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {words: tuple(rest) for words, *rest in map(json.loads, run.stdout.splitlines())}
    assert found.keys() == {*asked}, run.stderr
    for words, (status, out, err) in found.items():
        if words == "opt_tree lm-eval --halp":
            assert status == 2 and "unrecognized arguments: --halp" in err, err  # lm-eval's command line is its own
        elif words.endswith("--halp"):
            assert status == 2 and err.startswith("error: ") and err.endswith("; did you mean --help?\n"), (words, err)
            assert err.count("\n") == 1
        else:
            assert status == 2 * words.endswith("calibrat"), (words, status, err)
            assert "usage: " in out if words.endswith(" --help") and words not in listing else out or err


RUNS = (
    "import sys; from opt_tree.system import command_line as own; sys.exit(own.run_command(lambda: print('said') or 0))"
)


@pytest.mark.parametrize("words", [("-m", "opt_tree"), ("-c", RUNS)], ids=" ".join)
def test_a_pipe_that_nobody_reads_ends_a_command_quietly(words):
    """As behind `| head -1`: the listing, and what every other command runs in."""
    child = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait(60)) == ("", 128 + signal.SIGPIPE)


@pytest.mark.slow
def test_the_work_that_a_command_names_is_there():
    """It is imported behind the command line, so that no import says when its name is wrong."""
    tops = ("opt_tree", "evaluation", "experiments", "examples")
    text = "".join(path.read_text() for top in tops for path in sorted((ROOT / top).rglob("*.py")))
    named = {*re.findall(rf'"((?:{"|".join(tops)})[.\w]*:\w+)"', text)}
    assert len(named) > 30 and "opt_tree.training.train_drafter:train" in named
    if not find_spec("lm_eval"):
        named.remove("opt_tree.integrations.lm_eval_model:TreeLM")
    assert all(callable(pkgutil.resolve_name(name)) for name in named)


def test_a_log_has_no_bars_of_loading_weights(capsys):
    logging.enable_progress_bar()
    assert run_command(lambda: 0) == 0
    assert not logging.is_progress_bar_enabled()


def test_help_lists_what_the_library_has():
    """Help is written without the library; nothing in it is out of date."""
    for family, methods in (
        ("policies", POLICIES),
        ("verifiers", VERIFIERS),
        ("controllers", CONTROLLERS),
        ("drafters", KINDS),
    ):
        assert listed(ROOT / "opt_tree" / "methods" / family) == {
            name: method.about for name, method in methods.items()
        }, family
    assert (OptTree.nodes, OptTree.threshold, OptTree.max_depth) == run_options.DEFAULTS
    fields = {field.name: field for field in dataclasses.fields(compare.Options)}
    assert {*run_options.WEIGHTS} == {*BITS}
    assert {*fields["preset"].metadata["choices"]} == {*STUDIES}
    assert {*TRAINED} == {*MARKOV} - {"rnn"}


def test_one_word_for_one_thing_and_the_published_ones_are_taken():
    for length, output in (("--max-new-tokens", "--output"), ("--max_new_token", "--answer-file")):
        given = parse(Options, "command", "", [length, "7", output, "a.jsonl"])
        assert (given.max_new_token, given.answer_file) == (7, "a.jsonl")
    assert parse(other_engines.Options, "command", "", ["--drafter", "ngram", "--cores", "1"]).drafters == "ngram"


def test_a_mistyped_flag_is_told_what_was_meant(capsys):
    with pytest.raises(ValueError, match="unrecognized arguments: --max-new-tokns=5; did you mean --max-new-tokens"):
        parse(Options, "command", "", ["--max-new-tokns=5"])
    with pytest.raises(ValueError, match=r"unrecognized arguments: --zzz$"):
        parse(Options, "command", "", ["--zzz"])
    with pytest.raises(ValueError, match=r"expected one argument$"):
        parse(Options, "command", "", ["--max-new-tokens"])
    for main, wrong, meant in (
        (models.main, "--form", "--from"),
        (prove.main, "--childern", "--children"),  # and its verifier is missing
        (report.main, "--plos", "--plots"),
        (trim.main, "--vocabb", "--vocab"),
        (chat.main, "--prot", "--port"),
    ):
        assert main([wrong, "x"]) == 2
        told = capsys.readouterr().err
        assert told.endswith(f"; did you mean {meant}?\n") and told.count("\n") == 1


def ignored(name: str) -> bool:
    asked = ["git", "check-ignore", "--no-index", "-q", name]
    return subprocess.run(asked, cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_git_ignores_what_commands_write_by_default():
    commands = [compare.Options, first_light.Options, other_engines.Options]
    fields = [field for options in commands for field in dataclasses.fields(options) if field.name == "output"]
    outputs = [field.default if "." in field.default else f"{field.default}.md" for field in fields]
    assert len(outputs) == len(commands) and all(map(ignored, outputs)), outputs
    for name in ("demo-classic-opt.jsonl", "answers.jsonl.run.json", "answers.jsonl.part0", "answer.html"):
        assert ignored(name), name
    assert not ignored("evaluation/questions/more.jsonl") and not ignored("README.md")


def test_an_interval_over_a_few_questions_is_noted():
    with pytest.warns(UserWarning, match="over 3 questions are too narrow: take 10 or more"):
        bootstrap(lambda rows: rows.mean(-1), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(bootstrap(lambda rows: rows.mean(-1), 10)) == 2
    assert bootstrap(lambda rows: rows.mean(-1), 1) is None


def test_an_interval_is_that_of_the_published_figures():
    """Question numbers are drawn, and percentiles taken, as when results/ was measured."""
    spent = np.random.default_rng(3).lognormal(size=(30, 2))

    def ratio(rows):
        return np.divide(*np.moveaxis(spent[rows].sum(-2), -1, 0))

    draws = np.random.default_rng(0).integers(30, size=(2000, 30))
    assert bootstrap(ratio, 30) == pytest.approx(np.percentile(ratio(draws), (2.5, 97.5)), rel=1e-12)


def test_what_the_pages_ask_to_run_is_found_and_each_reason_to_leave_something_out_is_needed():
    """docs/run_commands.py runs them, in minutes."""
    script = runpy.run_path(str(ROOT / "docs" / "run_commands.py"))
    found = [piece for page in script["PAGES"] for piece in script["pieces"](page)]
    texts = [piece.text for piece in found if piece.kind == "command"]
    assert (
        "python demo_opt_classic.py" in texts and "python -m evaluation.report answers.jsonl --plots figures" in texts
    )
    assert {piece.kind for piece in found} == {"command", "python", "notebook", "script"}
    for pattern in script["LEFT_OUT"]:
        assert any(re.search(pattern, text) for text in texts), pattern
    assert sum(piece.reason is None for piece in found) > 15
