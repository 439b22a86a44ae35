"""The commonest mistakes with names: each is one line that says what was meant, what is missing, what to write."""

import json
import lzma
import shutil
from pathlib import Path

import pytest

from experiments.embedded_family.data import read_prompts
from opt_tree import load_drafter, load_pair
from opt_tree.methods.drafters.registry import parse_spec
from opt_tree.models import DEMO, checkpoints
from opt_tree.models.checkpoints import CheckpointError, load_config
from opt_tree.models.named import resolve
from opt_tree.tools import pair


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


@pytest.mark.parametrize("switch", ["bare", "compile", "canonical", "exact"])
def test_a_switch_that_is_no_bool(switch):
    with pytest.raises(TypeError, match=f"{switch} must be True or False, got 'no'"):
        load_pair("demo", **{switch: "no"})


@pytest.mark.parametrize(("spec", "meant"), [("ngrams", "ngram"), ("NGRAM", "ngram"), ("recylcing", "recycling")])
def test_a_drafter_that_is_nearly_right(spec, meant):
    with pytest.raises(CheckpointError, match=f"no drafter is called '{spec}'; did you mean '{meant}'"):
        parse_spec(spec)
    assert parse_spec("gpt2").kind == parse_spec("demo").kind == "lm"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lm:dmeo", "no model is called 'dmeo'; did you mean 'demo'"),
        ("graft:1:copy:eagle:demo+store:smolm2", "no model is called 'smolm2'; did you mean 'smollm2'"),
        ("eagel:demo", "unknown kind of drafter 'eagel' .*; did you mean eagle:demo?"),
        ("eagle:{here}/my_haed", "no model folder at {here}/my_haed; did you mean {here}/my_head?"),
        ("lm:{here}/draft.gguf", "no GGUF file at {here}/draft.gguf"),
        ("store:nobody/nothing", "no model called nobody/nothing: not a local folder"),
    ],
)
def test_a_drafter_that_is_not_there_is_said_before_the_target_is_loaded(spec, says, tmp_path, monkeypatch):
    def load(*_: object) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr(pair, "load_causal_lm", load)
    monkeypatch.setattr(checkpoints.constants, "HF_HUB_OFFLINE", True)
    checkpoints.hub_is_away.cache_clear()
    (tmp_path / "my_head").mkdir()
    with pytest.raises(CheckpointError, match=says.format(here=tmp_path).replace("?", r"\?")):
        load_pair("demo", spec.format(here=tmp_path))
    with pytest.raises(CheckpointError, match=f"no GGUF file at {tmp_path}/absent.gguf"):
        load_pair(str(tmp_path / "absent.gguf"))
    checkpoints.hub_is_away.cache_clear()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "dflash", "exit"])
def test_a_whole_model_as_a_head_is_told_its_name(kind):
    """A head that copied its target's config, tokenizer and all, is told what is wrong with it."""
    with pytest.raises(CheckpointError, match=f"{DEMO / 'draft'} is a whole model, use lm:{DEMO / 'draft'} .*"):
        load_pair("demo", f"{kind}:{DEMO / 'draft'}", dtype="float32")


@pytest.mark.slow
def test_a_head_that_is_wrong_is_not_called_a_whole_model(tmp_path):
    shutil.copytree(DEMO / "eagle", tmp_path / "head")
    shutil.copy(DEMO / "target" / "tokenizer_config.json", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "hidden_size": 2 * config["hidden_size"]}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"^cannot use .*/head: "):
        load_pair("demo", f"eagle:{tmp_path / 'head'}", dtype="float32")


def test_a_drafter_of_another_library_is_answered_with_the_kinds():
    pair_of = load_pair("demo", "ngram", dtype="float32")
    for call in (lambda: load_pair("demo", "prompt_lookup"), lambda: load_drafter("prompt_lookup", pair_of.target)):
        with pytest.raises(CheckpointError, match=r"no kind of drafter: there are .*eagle, .*lm, .*ngram"):
            call()


def test_a_hub_that_is_away_is_asked_once(monkeypatch):
    asked: list[object] = []

    def away(address: object, **_: object) -> None:
        asked.append(address)
        raise OSError("Tunnel connection failed: 503 Service Unavailable")  # a proxy's, or no route

    monkeypatch.setattr(checkpoints.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoints, "urlopen", away)
    checkpoints.hub_is_away.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no model called nobody/nothing: not a local folder"):
                load_config("nobody/nothing")
        assert len(asked) == 1
    finally:
        checkpoints.hub_is_away.cache_clear()


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
