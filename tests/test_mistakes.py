"""What users get wrong, and what a machine does to them: one line that names it, and nothing that was there is lost.

Training commands, full disks, signals.
"""

import argparse
import copy
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_disk import full_after
from safetensors.torch import load_file, save_file
from tiny_models import tiny

import opt_tree as o
from evaluation.answers.file import AnswerFile
from evaluation.command_line import run_command
from experiments.embedded_family import distil, lm, outputs, tokenizer
from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    CheckpointError,
    Decoder,
    OptTree,
    Pair,
    UnsupportedModelError,
    compile_forwards,
    generate_batch,
    load_drafter,
    load_pair,
    wrap,
)
from opt_tree.backends import package_cache as packages
from opt_tree.methods.policies.costs import Costs
from opt_tree.models import DEMO
from opt_tree.tools import step_costs
from opt_tree.training import command_line
from opt_tree.training.controllers import draft_length, tree_values
from opt_tree.training.fitting import calibrate, store, trim
from opt_tree.training.heads import features, train

TARGET = DEMO / "target"
PROBED_EVERY_TIME = True


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders as they lie about."""
    root = tmp_path_factory.mktemp("place")
    found = {name: root / name for name in ("new", "none", "file", "full", "own", "data", "cut", "bare")}
    for folder in ("full", "own", "data", "bare"):
        found[folder].mkdir()
    found["file"].write_text("not json\n")
    (found["full"] / "holiday.jpg").touch()
    (found["own"] / "part.npz").write_bytes(b"PK")
    (found["data"] / "chat_x.jsonl.xz").touch()
    shutil.copytree(TARGET, found["cut"])
    weights = found["cut"] / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for file in TARGET.glob("tokenizer*"):
        shutil.copy(file, found["bare"])
    found |= {"target": TARGET, "draft": DEMO / "draft"}
    found["rows"] = root / "rows.jsonl"
    found["rows"].write_text('{"prompt": "hi", "answer": "one two three four five six seven eight nine ten of them"}\n')
    found["half"] = root / "half.jsonl"
    found["half"].write_text('{"prompt": "aa"}\n')
    found["other"] = root / "other.json"
    found["other"].write_text('{"a": 1}\n')
    found["empty"] = root / "empty.jsonl"
    found["empty"].touch()
    return found


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("demo", "ngram", dtype="float32")


def everything(place: dict[str, Path]) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_size) for path in place["rows"].parent.rglob("*"))


CASES: list[tuple[object, str, str]] = [
    (store, "--target {none} --answers {rows} --output {new}", "no model folder at {none}"),
    (store, "--target {bare} --answers {none} --output {new}", "--answers: no file or folder at {none}"),
    (store, "--target {bare} --answers {file} --output {new}", "{file} is no JSONL, line 1: "),
    (store, "--target {bare} --answers {own} --output {new}", "part.npz holds no documents"),
    (store, "--target {bare} --answers {empty} --output {new}", "there is no text to build a store o"),
    (store, "--target {bare} --text {rows} --output {new}", 'rows.jsonl has a row without "text"'),
    (store, "--target {bare} --text {empty} --output {new}", "there is no text to build a store o"),
    (store, "--target {bare} --answers {other} --output {new}", "choices"),
    (store, "--target {bare} --answers {full} --output {new}", "no answers (*.npz, *.jsonl, *.jsonl.xz) in {full}"),
    (store, "--target {bare} --answers {rows} --output {file}", "cannot write to {file}: {file} is a file"),
    (store, "--target {bare} --answers {rows} --output {new} --max-mib nan", "--max-mib must be above 0, got nan"),
    (store, "--target {bare} --answers {rows} --output {new} --beta x", "--beta takes 5 positive numbers"),
    (store, "--target {full} --answers {rows} --output {new}", "{full} has no tokenizer"),
    (trim, "--draft {draft} --answers {rows} --output {full}", "{full} holds other things (holiday.jpg, ...)"),
    (trim, "--draft {draft} --answers {rows} --output {draft}", "is the draft model itsel"),
    (features, f"--target {TARGET} --answers {{rows}} --output {{new}} --layers 99", "has no layer 99"),
    (features, "--target {target} --answers {rows} --output {new} --layers x", "--layers: invalid"),
    (features, "--target {target} --answers {rows} --output {new} --prompt-tokens 0", "--prompt-tokens must be above"),
    (features, "--target {target} --answers {empty} --output {new}", "no answers in {empty}"),
    (features, "--target {target} --answers {half} --output {new}", 'half.jsonl:1 has no "prompt" and "answer"'),
    (features, "--target {cut} --answers {rows} --output {new}", "the weights in {cut} are corrupt"),
    (features, "--target {bare} --answers {rows} --output {new}", "cannot load {bare}: "),
    (train, "--target {target} --features {full} --output {new}", "no features (part-*.safetensors) in {full}"),
    (train, "--target {target} --features {full} --output {new} --minutes 0", "--minutes must be above 0, got 0.0"),
    (train, "--target {target} --features {full} --output {new} --minutes nan", "--minutes must be above 0, got nan"),
    (train, "--target {target} --features {full} --output {new} --unroll x", "'x' is no list of pairs"),
    (draft_length, "--answers {rows} --output {full}", "which would be deleted: name a new folder"),
    (tree_values, "--answers {rows} --output {new} --branches 0", "--branches must be above 0, got 0"),
    (calibrate, "--prompts {file}", "it takes 2 prompts at least"),
    (calibrate, "--prompts {empty} --output {new}", "no prompts in {empty}"),
    (calibrate, "--output {new} --device xpu", "no device 'xpu' here"),
    (outputs, "--data {data} --target {target} --output {new} --part 2/2", "--part: takes a part of how many"),
    (tokenizer, "--data {data} --output {new} --vocab 5", "--vocab must be at least 26"),
    (lm, "--data {data} --tokenizer {target} --output {new} --rows x", "'x' is no list of pairs, such as 1:2,3:4"),
    (lm, "--data {data} --tokenizer {target} --output {new} --epochs chat_x=nan", "must be finite and at least 0"),
    (lm, "--data {full} --tokenizer {target} --output {new}", "no chat_*.jsonl.xz or text_*.jsonl.xz in {full}"),
    (distil, "--data {data} --own {own} --target {target} --output {new}", "part.npz holds no documents"),
]


@pytest.mark.parametrize(("module", "line", "message"), CASES, ids=[f"{c[0].__name__[12:]}-{c[2][:30]}" for c in CASES])
def test_a_mistake_is_one_line_and_changes_nothing(module, line, message, place, capfd):
    before = everything(place)
    capfd.readouterr()
    assert module.main(line.format(**place).split()) == 2
    said = [one for one in capfd.readouterr().err.splitlines() if one.strip() and "Loading weights" not in one]
    assert message.format(**place) in said[-1] and said[-1].startswith("error: ") and len(said) == 1
    assert everything(place) == before


def test_what_cannot_be_written_is_said_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PermissionError, match=f"{tmp_path} is read-only"):
        command_line.check_writable(tmp_path / "new" / "folder")


def test_ctrl_c_in_training_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    assert command_line.run_command(command_line.TrainingParser("x"), interrupted, []) == 130
    assert capsys.readouterr().err == "stopped\n"


# Evaluation and packages.


def test_answers_outlive_a_full_disk(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "a.jsonl")
    file.append({"question_id": 1})
    with full_after(30), pytest.raises(OSError, match=r"File too large: '.*a\.jsonl'"):
        file.append({"question_id": 2, "choices": ["long"] * 20})
    assert file.torn and file.read() == [{"question_id": 1}]
    with full_after(10), pytest.raises(OSError, match=r"File too large: '.*a\.jsonl'"):
        file.join()
    assert file.read() == [{"question_id": 1}] and not list(tmp_path.glob("*.partial"))
    file.join()
    assert not file.torn and file.read() == [{"question_id": 1}]


def test_sigterm_lets_go_of_the_answer_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def command() -> int:
        with AnswerFile(tmp_path / "a.jsonl").lock():
            assert list(tmp_path.glob("a.jsonl.lock"))
            signal.raise_signal(signal.SIGTERM)
        return 0

    assert run_command(command) == 128 + signal.SIGTERM and not list(tmp_path.iterdir())
    assert capsys.readouterr().err == "stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_package_that_does_not_fit_is_no_package(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_bytes(b"x" * 100)
    package = packages.Package(tmp_path / "cache" / "key")
    with full_after(50), pytest.raises(OSError, match="File too large"):
        package.write(made, {})  # its description is the larger one
    assert package.about() is None and not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_leaves_forwards_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    lm = load_pair("demo", dtype="float32").target
    with pytest.warns(UserWarning, match=r"target is not compiled: .*cache"):
        assert not compile_forwards(lm)
    assert lm.backend.name == "eager"


def test_costs_that_cannot_be_kept_are_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    measured = Costs(((1, 0.01),), 0.001, ((1, 0.001),))
    monkeypatch.setattr(step_costs, "measure_costs", lambda *_: measured)
    pair = load_pair("demo", dtype="float32")
    with pytest.warns(UserWarning, match=r"cannot be kept, and is measured again next time: .*cache"):
        assert step_costs.costs_of(pair.target, pair.drafter) == measured


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (lambda: torch.empty(1 << 50), r"4503599.63 GB more were asked for; this process has .* are free"),
        (lambda: np.empty(1 << 50), r"8.00 PiB more were asked for; this process has"),
        (
            lambda: raise_(
                torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                    "1.25 GiB is free. Including non-PyTorch memory, this process has 138 GiB memory in use."
                )
            ),
            r"2.50 GiB more were asked for; GPU 0 has a total capacity of 139.80 GiB of which 1.25 GiB is free\.",
        ),
    ],
    ids=["torch", "numpy", "cuda"],
)
def test_too_little_memory_is_one_line(raised: Any, says: str, capsys: pytest.CaptureFixture) -> None:
    assert run_command(raised) == 2
    told = capsys.readouterr().err
    assert re.match("error: out of memory: " + says, told) and told.count("\n") == 1
    assert "What needs less: a smaller model, bfloat16" in told


def test_an_error_that_is_not_of_memory_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        run_command(lambda: raise_(RuntimeError("no such thing")))


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.skipif("CHECK_SHAPES" in os.environ, reason="calls are checked by their annotations first")
def test_an_argument_of_a_wrong_type_is_named() -> None:
    pair = o.load_pair(Path(o.__file__).parent / "models" / "embedded" / "target", "ngram", dtype="float32")
    target, ids, tree = pair.target, [0, 5], o.OptTree(4)
    decoder = o.Decoder(target, pair.drafter, tree)
    ended = []
    reader = SimpleNamespace(put=lambda tokens: None, end=lambda: ended.append(True))

    def refused(word, call, *given, **named):
        with pytest.raises(TypeError, match=f"^{word} must be .*, got "):
            call(*given, **named)

    refused("target", o.load_pair, None)
    refused("drafter", o.load_pair, "demo", 5)
    refused("dtype", o.load_pair, "demo", dtype=5)
    refused("lossy", o.Decoder, target, pair.drafter, tree, lossy="yes")
    refused("prompt", decoder.generate, 5)
    refused("max_new_tokens", decoder.generate, ids, "3", streamer=reader)
    assert ended
    refused("streamer", decoder.generate, ids, 3, streamer=5)
    refused("seed", decoder.generate, ids, 3, seed="x")
    refused("width", generate_batch, decoder, [ids], width=1.5)
    refused("prompts", generate_batch, decoder, 5)
    for call in (decoder.generate, decoder.steps, lambda prompt, **how: generate_batch(decoder, [prompt], **how)):
        refused("sampling", call, ids, sampling=0.7)
        refused("stop", call, ids, stop="end")
    for word, number in (("top_k", math.inf), ("top_k", math.nan), ("temperature", 10**400)):
        with pytest.raises(ValueError, match=f"^{word} must be .*, got "):
            o.Sampling(**{word: number})
    for kind, fraction in ((o.OptTree, {"nodes": 8.5}), (o.OptTree, {"max_depth": 2.5}), (o.Sampling, {"top_k": 2.5})):
        with pytest.raises(ValueError, match="whole"):
            kind(**fraction)
    with pytest.raises(ValueError, match=r"^max_new_tokens must be at least 1, got inf"):
        decoder.generate(ids, math.inf)
    assert decoder.generate(ids, 10**400, stop=lambda tokens: "stop").finish_reason == "stop"
    assert len(generate_batch(decoder, [ids], width=10**400, max_new_tokens=1)) == 1
    refused("nodes", o.OptTree, "8")
    refused("paths", o.Static, 5)
    refused("per_node", o.TopK, 1.5)
    refused("temperature", o.Sampling, temperature="x")
    refused("processors", o.Sampling, processors=5)
    refused("string", o.Stop, strings=[5], tokenizer=pair.tokenizer)
    refused("rows", o.Buckets, 5)
    refused("spec", o.load_drafter, None, target)
    refused("target", o.load_drafter, "lm:demo", 5)
    refused("lm", o.CausalLMDrafter, 5)
    refused("head", o.EagleDrafter, 5, target)
    refused("policies", o.Scheduled, 5)
    refused("policies", o.generate_beside, decoder, 5, ids)
    refused("path", o.load_tokenizer, None)
    refused("lm", o.compile_forwards, target.model)
    refused("buckets", o.compile_forwards, target, buckets=3)
    refused("tokens", o.Tree, 5, [-1], [0.0], [0])
    refused("generation", o.transcript, 5, pair.tokenizer)
    refused("generation", o.to_html, 5, pair.tokenizer)
    refused("generation", o.explore, 5, pair.tokenizer)
    refused("tree", o.draw_tree, 5, pair.tokenizer)
    for given, named in (
        ((target.model, pair.drafter, tree), "LlamaForCausalLM is no target"),
        ((target, target.model, tree), "LlamaForCausalLM is no drafter"),
        ((target, pair.drafter, 8), "8 is no TreePolicy"),
        ((target, None, o.OptTree), "is no TreePolicy"),
        ((target, pair.drafter, tree, "match"), "is no verifier"),
    ):
        with pytest.raises(TypeError, match=named):
            o.Decoder(*given)
    assert decoder.generate(ids, 3).tokens
    target.model.set_attn_implementation("flex_attention")
    with pytest.raises(o.UnsupportedModelError, match="switched to 'flex_attention' attention since it was wrapped"):
        decoder.generate(ids, 3)


IMPORTS = """
import sys
from opt_tree.system import interrupted
from opt_tree.system.command_line import run_command, work_of
interrupted.COMMAND = True
sys.path.append({folder!r})
sys.exit(run_command(work_of("swallows:work")))
"""
SWALLOWS = """
import signal
try:
    signal.raise_signal({number})
except BaseException:
    pass
def work():
    print("went on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_that_swallows_exceptions_is_stopped(number: int, tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(number=int(number)))
    code = IMPORTS.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "stopped\n")


COMMANDS = [("-m", "opt_tree.models"), ("demo_opt_classic.py", "--help")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_ctrl_c_while_a_command_imports_is_no_traceback(command: tuple[str, str]) -> None:
    """The signal comes as soon as the package is being imported, which takes seconds for torch alone."""
    process = subprocess.Popen(
        [sys.executable, "-v", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"import 'opt_tree.system.interrupted'"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and b"Traceback" not in rest and rest.count(b"stopped\n") == 1


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        ([], ValueError, "there is no message to answer"),
        ([{"role": "alien", "content": "x"}], ValueError, "the chat template refuses .* unknown role: alien"),
        ([{"content": "x"}], ValueError, "the chat template refuses .* no attribute 'role'"),
        ([{"role": "user", "content": None}], ValueError, "the chat template refuses"),
        ("\ud800abc", ValueError, "half of a surrogate pair"),
        ([{"role": "user", "content": "\udfff"}], ValueError, "half of a surrogate pair"),
    ],
)
def test_messages_that_cannot_be_encoded_are_one_line(message: Any, kind: type, said: str, pair: Pair) -> None:
    with pytest.raises(kind, match=said) as refusal:
        pair.encode(message)
    assert "\n" not in str(refusal.value)


def test_one_object_is_not_target_and_drafter() -> None:
    """They would append to one cache."""
    lm = CausalLM(tiny("llama"))
    with pytest.raises(ValueError, match="is the target and drafts, too, and one object has one cache: wrap"):
        Decoder(lm, CausalLMDrafter(lm), OptTree(4))


def test_a_model_that_overflows_in_float16_is_told_so() -> None:
    model = copy.deepcopy(tiny("llama")).half()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(6e4)
    model.model.layers[0].mlp.up_proj.weight.data.fill_(6e4)
    with pytest.raises(UnsupportedModelError, match="float16 ends at 65,504: load it in bfloat16"):
        wrap(model)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, pair: Pair) -> None:
    """A head, and a draft model: with either nothing would ever be accepted, and no word said."""
    cases = [
        ("eagle", "eagle", "down_proj", "eagle.* holds numbers that are not finite, in .*down_proj"),
        ("lm", "draft", "embed_tokens", "lm.* holds numbers that are not finite, in .*embed_tokens"),
        ("lm", "draft", "down_proj", "its logits are not numbers"),
    ]
    for kind, source, part, refusal in cases:
        folder = tmp_path / part / kind
        shutil.copytree(DEMO / source, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        if part == "embed_tokens":  # an output layer of its own, so that few forwards meet the row
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        name = next(name for name in sorted(tensors) if part in name)
        tensors[name].view(-1)[-1] = float("nan")
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ValueError, match=refusal):
            load_drafter(f"{kind}:{folder}", pair.target)


def test_a_folder_that_lacks_a_file_is_a_checkpoint_error(tmp_path: Path, pair: Pair) -> None:
    for kind in ("eagle", "medusa", "parallelspec", "exit", "dflash", "dspark", "lm", "store"):
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(CheckpointError, match=f"{path}"):
                load_drafter(f"{kind}:{path}", pair.target)
