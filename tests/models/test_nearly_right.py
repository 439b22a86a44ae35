"""The commonest mistakes with names: each is one line that says what was meant, what is missing, what to write."""

import json
import lzma
import shutil
from pathlib import Path

import pytest

from opt_tree import load_pair
from opt_tree.drafters.registry import parse_spec
from opt_tree.models import DEMO, checkpoints
from opt_tree.models.checkpoints import CheckpointError, load_config
from opt_tree.models.named import resolve
from opt_tree.training.embedded_family.data import read_prompts


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("/no/such/folder", "no model folder at /no/such/folder"),
        ("smolm2", "no model is called 'smolm2'; did you mean 'smollm2'"),
        ("Demo", "no model is called 'Demo'; did you mean 'demo'"),
        (str(DEMO / "target"), "none belongs to .*target: name one, drafter='ngram'"),
    ],
)
def test_a_target_that_is_nearly_right(target, says):
    with pytest.raises(CheckpointError, match=says):
        load_pair(target)


@pytest.mark.parametrize(("spec", "meant"), [("ngrams", "ngram"), ("NGRAM", "ngram"), ("recylcing", "recycling")])
def test_a_drafter_that_is_nearly_right(spec, meant):
    with pytest.raises(CheckpointError, match=f"no drafter is called '{spec}'; did you mean '{meant}'"):
        parse_spec(spec)
    assert parse_spec("gpt2").kind == parse_spec("demo").kind == "lm"


def test_a_hub_that_is_away_is_asked_once(monkeypatch):
    asked: list[object] = []

    def away(*address: object, **_: object) -> None:
        if len(address) == 1:  # transformers looks as well, and gives two
            asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr(checkpoints.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoints, "getproxies", dict)
    monkeypatch.setattr(checkpoints.socket, "create_connection", away)
    checkpoints._hub_is_away.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no model called nobody/nothing: not a local folder"):
                load_config("nobody/nothing")
        assert len(asked) == 1
    finally:
        checkpoints._hub_is_away.cache_clear()


def test_the_output_of_training_stands_for_what_was_trained(tmp_path):
    shutil.copytree(DEMO / "eagle", tmp_path / "final")
    for part in ("eagle", "draft", "target"):
        assert resolve(str(tmp_path), part) == str(tmp_path / "final")
    assert resolve(str(tmp_path / "final"), "eagle") == str(tmp_path / "final")


def corpus(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    with lzma.open(folder / f"{name}.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_ones_own_conversations_have_prompts(tmp_path):
    """Whatever their file is called; a folder without any is refused, with the form."""
    corpus(tmp_path, "text_mine", [{"text": "Once upon a time."}])
    with pytest.raises(ValueError, match=r"no prompts to train on: .*chat_\*.jsonl.xz.*it has text_mine"):
        read_prompts(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(20)]
    corpus(tmp_path, "chat_mine", rows)
    assert len(read_prompts(tmp_path)[0]) >= 18
