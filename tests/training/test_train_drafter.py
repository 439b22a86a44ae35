"""A drafter for a model by one command: its stages run here in this process, but for the verdict's clock."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time

import pytest
from tqdm import tqdm

from opt_tree import Decoder, OptTree, load_pair
from opt_tree.methods.drafters.registry import parse_spec
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.tools.presets import plain
from opt_tree.training import outputs
from opt_tree.training import stages as stage_runner
from opt_tree.training import train_drafter as conductor
from opt_tree.training.answers import load_part
from opt_tree.training.prompts import default_prompts, read_prompts

VERDICT = {
    "setting": {"name": "OptTree(4, 0.3)", "speed_up": 1.5, "low": 1.4, "high": 1.6},
    "prospects": {"here": {"emitted": 2.0}},
    "verdict": "Use it: with OptTree(4, 0.3).",
}


@pytest.fixture
def stages(monkeypatch):
    """The stages that ran, by their modules."""
    ran = []

    def run(work, what, seconds, module, *words):
        ran.append(module)
        if module == "training.advise":
            return f"tables\n{json.dumps(VERDICT)}\n"
        assert importlib.import_module(f"opt_tree.{module}").main([str(word) for word in words]) == 0
        return ""

    monkeypatch.setattr(stage_runner.StagedRun, "run", run)
    return ran


def asked(folder, *more):
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(default_prompts()[:40]))
    few = ["--data", str(prompts), "--disk", "2KB", "--max-new-tokens", "24", "--minutes", "1"]
    return ["demo", "--kind", "store", "--output", str(folder / "made"), *few, *more]


@pytest.mark.slow
def test_what_it_makes_is_a_drafter_and_it_goes_on_where_it_was(tmp_path, stages, capsys):
    assert conductor.main(asked(tmp_path)) == 0
    assert stages == ["training.outputs", "training.fitting.store", "training.advise"]
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"takes store:{tmp_path / 'made'}/store")
    pair = load_pair("demo", drafter=str(tmp_path / "made"), dtype="float32")
    prompt = pair.encode(default_prompts()[0])
    alone = plain(pair.target).generate(prompt, 24, stop=pair.stop)
    drafted = Decoder(pair.target, pair.drafter, OptTree(8, 0.0)).generate(prompt, 24, stop=pair.stop)
    assert drafted.tokens == alone.tokens and len(drafted.steps) < len(alone.steps)
    with stage_runner.alone_in(tmp_path / "made"):
        assert conductor.main(asked(tmp_path)) == 2, "two runs do not share a folder"
    assert "another run is at work" in capsys.readouterr().err
    assert conductor.main(asked(tmp_path)) == 0
    assert len(stages) == 3, "all of it was there"
    assert conductor.main(asked(tmp_path, "--kind", "eagle")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "another kind" in said and len(stages) == 3


RUN = """
import argparse, sys
from pathlib import Path
from tqdm import tqdm
from opt_tree.training.stages import StagedRun, alone_in

folder = Path(sys.argv[1])
sys.executable = str(folder / "stage")
with alone_in(folder) as lock:
    args = argparse.Namespace(output=folder, minutes=1.0)
    StagedRun(args, {"seconds": 0.0}, tqdm(total=60, disable=True), lock).run("a stage", 5.0, "any")
"""
STAGE = """#!/bin/sh
echo begun > "$(dirname "$0")/begun"
read line < "$(dirname "$0")/end"
"""


@pytest.mark.skipif(os.name != "posix", reason="no child inherits a descriptor there")
def test_what_a_killed_run_left_at_work_keeps_others_out(tmp_path):
    """Whoever is ended by -9 ends nobody: its child writes into the folder until it is done."""
    (tmp_path / "stage").write_text(STAGE)
    (tmp_path / "stage").chmod(0o700)
    os.mkfifo(tmp_path / "end")
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)])
    try:
        wait_until((tmp_path / "begun").exists)
    finally:
        run.kill()
        run.wait()
    free = is_free(tmp_path)
    (tmp_path / "end").write_text("end")
    assert not free
    wait_until(lambda: is_free(tmp_path))


def is_free(folder):
    try:
        with stage_runner.alone_in(folder):
            return True
    except ValueError as error:
        assert "another run is at work in" in str(error) and "or a command that it began" in str(error)
        return False


def wait_until(so):
    end = time.monotonic() + 300
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stage_that_fails_is_one_line_and_its_log_is_kept(tmp_path):
    bar = tqdm(total=60, disable=True)
    work = stage_runner.StagedRun(argparse.Namespace(output=tmp_path, minutes=1.0), {"seconds": 0.0}, bar)
    with pytest.raises(ValueError, match=r"^a stage failed: no command 'nosuch' \(all of it is in .*log\.txt\)$"):
        work.run("a stage", 5.0, "__main__", "nosuch")
    assert work.state["seconds"] > 0 and json.loads((tmp_path / stage_runner.STATE).read_text()) == work.state


@pytest.mark.slow
def test_answers_go_on_batch_by_batch(tmp_path, capsys):
    questions = tmp_path / "questions.txt"
    questions.write_text("\n".join(default_prompts()[:5]))
    words = ["--target", "demo", "--questions", str(questions), "--output", str(tmp_path / "out"), "--batch", "2"]
    assert outputs.main([*words, "--max-new-tokens", "4", "--tokens", "1"]) == 0
    (first,) = (tmp_path / "out").iterdir()
    before = first.read_bytes()
    assert outputs.main([*words, "--max-new-tokens", "4"]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 3 and first.read_bytes() == before
    pair = load_pair("demo", dtype="bfloat16", exact=False)
    prompt = pair.encode(default_prompts()[0])
    assert load_part(first)[0].tolist()[: len(prompt)] == prompt


def test_no_heldout_prompt_shares_its_subject_with_one_to_train_on():
    train, held = default_prompts(), default_prompts(heldout=True)
    assert len(train) > 2000 and len(held) > 400 and not set(train) & set(held)
    assert not any("the moon" in prompt for prompt in held) and any("bridges" in prompt for prompt in held)
    assert not any("bridges" in prompt for prompt in train)


def test_mistakes_are_one_line_before_anything_is_written(tmp_path, capsys, stages):
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    output = tmp_path / "new"
    for wrong, message in (
        (["demo", "--data", str(few)], "it takes 24 prompts at least"),
        (["demo", "--disk", "much"], "takes a size such as 5GB"),
        (["nosuch/"], "nosuch"),
        (["demo", "--minutes", "0"], "--minutes must be above 0"),
    ):
        assert conductor.main([*wrong, "--output", str(output)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and message in said, said
    assert conductor.main(["demo", "--output", str(tmp_path / "a+b")]) == 2
    assert conductor.main(["demo", "--output", str(tmp_path)]) == 2
    assert not output.exists() and not stages


def test_rows_of_any_usual_kind_are_prompts(tmp_path):
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"question": "d"}, {"text": "a"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts([path]) == ["a", "b", "d"]
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1"):
        read_prompts([path])


def test_a_damaged_note_is_refused(tmp_path):
    (tmp_path / "drafter.json").write_text('{"spec": "store:{here}/store"}')
    assert str(parse_spec(str(tmp_path))) == f"store:{tmp_path}/store"
    for bad in ("{", "[]", '{"spec": 3}', '{"spec": "nokind:x"}'):
        (tmp_path / "drafter.json").write_text(bad)
        with pytest.raises(CheckpointError, match=r"drafter\.json"):
            parse_spec(str(tmp_path))
