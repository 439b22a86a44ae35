"""The peers' comparison: engines on a tiny model, foreign ones as fakes of their modules, and a process that dies."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from models.test_named import model, write_gguf  # noqa: F401 - a fixture
from tiny_models import prompt, tiny, tiny_tokenizer

from experiments.other_engines import __main__ as command
from experiments.other_engines import measuring
from experiments.other_engines.__main__ import figures
from experiments.other_engines.engines import ENGINES, Clock, Settings, _rewritten, bf16_gguf, readable_gguf
from experiments.other_engines.measuring import Measured, PeerError, Process, Run, measure
from experiments.other_engines.registry import BASE, GROUPS, REFERENCE, Peer, parse_drafter, peers_of
from experiments.other_engines.texts import bodies, repeated
from opt_tree.models import DEMO
from opt_tree.models.checkpoints import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("peers")
    copy.deepcopy(tiny("llama")).float().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def settings(folder: str, **more) -> Settings:
    return Settings(folder, threads=1, context=256, stops=[], dtype="float32", **more)


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("transformers", {"lookup": True}),
        ("opt_tree", {}),
        ("opt_tree", {"drafter": "ngram", "tree": {"nodes": 4, "threshold": 0.1}}),
    ],
)
def test_every_engine_of_one_model_writes_the_same_text(folder, engine, more):
    expected = ENGINES["transformers"](settings(folder))(prompt(12), 20, Clock())
    clock = Clock()
    assert list(ENGINES[engine](settings(folder, **more))(prompt(12), 20, clock)) == list(expected)
    assert len(expected) == 20 and clock.first is not None and clock.first > 0


def module(monkeypatch, name: str, **members) -> None:
    fake = ModuleType(name)
    fake.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, fake)


def test_llama_cpp_is_told_the_same_and_its_text_is_read_back(monkeypatch):
    made = []

    class Server:
        def __init__(self, told):
            made.append(told)

        def handle_completions(self, asked, take):
            told = {"prompt": [1, 2], "n_predict": 3, "temperature": 0.0, "stream": True, "cache_prompt": False}
            assert asked == told
            for text in ("The", " fox", ""):
                end = {} if text else {"timings": {"predicted_n": 3, "draft_n": 2, "draft_n_accepted": 1}}
                assert take({"choices": [{"text": text, "finish_reason": None}], **end}) is False

    names = ("NGRAM_SIMPLE", "DRAFT_SIMPLE")
    kinds = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{name}": name for name in names})
    draft = SimpleNamespace(**{name: SimpleNamespace() for name in ("mparams", "cpuparams", "cpuparams_batch")})
    parts = {name: SimpleNamespace(draft=draft) for name in ("model", "cpuparams", "cpuparams_batch", "speculative")}
    module(
        monkeypatch, "xllamacpp", Server=Server, common_speculative_type=kinds,
        CommonParams=lambda: SimpleNamespace(**parts),
    )  # fmt: skip
    clock = Clock()
    answer = ENGINES["xllamacpp"](Settings(str(DEMO / "target"), 2, 300, [2], gguf="a.gguf", lookup=True))
    tokens = answer([1, 2], 3, clock)
    assert load_tokenizer(str(DEMO / "target")).decode(tokens) == "The fox" and clock.first is not None
    (told,) = made
    assert (told.model.path, told.n_ctx, told.n_parallel, told.n_gpu_layers) == ("a.gguf", 300, 1, 0)
    assert told.cpuparams.n_threads == told.cpuparams_batch.n_threads == 2
    assert told.speculative.types == ["NGRAM_SIMPLE"] and clock.steps == 2
    ENGINES["xllamacpp"](Settings(str(DEMO / "target"), 2, 300, [2], gguf="a.gguf", assistant="b.gguf"))
    assert made[1].speculative.types == ["DRAFT_SIMPLE"] and draft.mparams.path == "b.gguf"
    assert (draft.cpuparams.n_threads, draft.cpuparams_batch.n_threads, draft.n_gpu_layers) == (2, 2, 0)


def test_openvino_is_told_the_same(monkeypatch):
    class Pipeline:
        def __init__(self, path, device, **options):
            assert (path, device, options) == ("a.gguf", "CPU", {"INFERENCE_NUM_THREADS": 1, "prompt_lookup": True})

        def generate(self, ids, config, streamer):
            assert config.max_new_tokens == 3 and not config.do_sample and config.stop_token_ids == {2}
            streamer("a")
            return SimpleNamespace(tokens=[ids[0, :3].tolist()])

    module(monkeypatch, "openvino", Tensor=lambda array: array)
    module(monkeypatch, "openvino_genai", LLMPipeline=Pipeline, GenerationConfig=SimpleNamespace)
    clock = Clock()
    answer = ENGINES["openvino_genai"](Settings("", 1, 300, [2], gguf="a.gguf", lookup=True))
    assert answer([7, 8, 9, 10], 3, clock) == [7, 8, 9] and clock.first is not None


def test_openvino_drafts_by_what_it_saved_of_the_assistant(monkeypatch, tmp_path, model):  # noqa: F811
    folders = []

    def pipeline(path, device, **options):
        if options.pop("enable_save_ov_model", False):
            assert Path(path).is_file() and options == {"INFERENCE_NUM_THREADS": 1}
            folders.append(str(Path(path).parent))
            return None
        assert options == {"INFERENCE_NUM_THREADS": 1, "draft_model": (folders[0], "CPU")} and path == "a.gguf"

        def generate(ids, config, streamer):
            assert config.num_assistant_tokens == 3
            return SimpleNamespace(tokens=[[5]])

        return SimpleNamespace(generate=generate)

    module(monkeypatch, "openvino", Tensor=lambda array: array)
    module(
        monkeypatch, "openvino_genai", LLMPipeline=pipeline, GenerationConfig=SimpleNamespace,
        draft_model=lambda folder, device, **threads: (folder, device),
    )  # fmt: skip
    file = str(write_gguf(tmp_path / "d.gguf", model))
    answer = ENGINES["openvino_genai"](Settings("", 1, 300, [2], gguf="a.gguf", assistant=file))
    assert answer([7, 8], 3, Clock()) == [5] and not Path(folders[0]).exists()


def test_the_bf16_file_has_the_model_s_own_weights(tmp_path, model):  # noqa: F811
    file = bf16_gguf(write_gguf(tmp_path / "a.gguf", model), tmp_path / "b.gguf")
    before, after = gguf.GGUFReader(tmp_path / "a.gguf"), gguf.GGUFReader(file)
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    found = {tensor.name: tensor for tensor in after.tensors}
    weight = found["blk.0.ffn_up.weight"]
    assert weight.tensor_type == gguf.GGMLQuantizationType.BF16
    values = torch.from_numpy(gguf.quants.dequantize(weight.data, weight.tensor_type).copy())
    assert torch.equal(values, model.state_dict()["model.layers.0.mlp.up_proj.weight"].float())
    assert found["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    words = "tokenizer.ggml.tokens"
    assert before.fields[words].contents() == after.fields[words].contents()


started: list[Settings] = []


class Fake:
    """Stands in for a process: the text of its settings' dtype, one engine that crashes at the second prompt."""

    def __init__(self, engine, settings, cores, timeout):
        self.settings, self.load_seconds, self.asked = settings, 0.5, 0
        started.append(settings)
        if settings.folder == "absent":
            raise PeerError("no model folder")

    def ask(self, prompt, limit, settings):
        self.asked += 1
        if self.settings.lookup and self.asked == 3:
            raise PeerError("died of SIGSEGV")
        tokens = prompt + ([3] if self.settings.dtype == "float32" or prompt[0] == 7 else [4])
        steps, seconds = (1, 0.25) if settings.drafter or settings.assistant else (len(tokens), 0.5)
        said = {"seconds": seconds, "first_seconds": 0.1, "peak_mb": 100.0, "steps": steps}
        return {"tokens": [*tokens, 2, 8], **said}

    def close(self):
        return None


def test_the_table_has_who_ran_and_a_line_for_who_did_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measuring, "Process", Fake)
    common = Settings("here", 1, 99, [2])
    found = peers_of(common, "", ["ngram@4/0.1"], GROUPS, {None: {}, "int8": {}})
    peers = [peer for peer in found if not peer.settings.compile]
    assert [peer.name for peer in peers][-2:] == ["opt_tree plain", "opt_tree ngram@4/0.1"]
    assert peers[-1].settings.tree == {"nodes": 4, "threshold": 0.1}
    found = peers_of(common, "", ["ngram"], ["opt_tree"], {"int8": {"nodes": 3, "threshold": 0.3}})
    few = [peer for peer in found if peer.settings.weights]
    assert [peer.name for peer in few] == ["opt_tree plain, int8, compiled", "opt_tree ngram@3/0.3, int8, compiled"]
    peers.append(Peer("lost", "transformers", Settings("absent", 1, 99, [2])))
    peers.append(Peer("foreign", "no_such_module", common))
    run = Run([[7, 7], [9, 9, 9]], 8, frozenset([2]), 9.0, tmp_path / "out.jsonl")
    measured = measure(peers, [0], run)
    found = {line["peer"]: line for line in figures(measured)}
    assert found[REFERENCE]["float32's text"] == "2/2" and found[BASE]["float32's text"] == "1/2"
    assert found[BASE]["tokens/s"] == pytest.approx(7 / 1.0) and found[BASE]["x transformers"] == 1
    assert found[BASE]["95 %"] == "6.00 to 8.00" and found[BASE]["x plain 95 %"] is None
    tree = found["opt_tree ngram@4/0.1"]
    assert (tree["x plain"], tree["x plain 95 %"], tree["tokens a step"]) == (2, "2.00 to 2.00", 3.5)
    assert tree["plain's text"] == "2/2" and found[BASE]["tokens a step"] == 1
    failed = {one.name: one.failed for one in measured if one.failed}
    assert not failed.keys() & found.keys() and failed["transformers, prompt lookup"] == "died of SIGSEGV"
    assert failed["lost"] == "no model folder"
    assert failed["foreign"] == "not installed: pip install no_such_module"
    assert "GGUF" in failed["llama.cpp"] or "not installed" in failed["llama.cpp"]
    assert figures([Measured("a", 1, failed="why")]) == []
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines if line["peer"] == REFERENCE] == [[7, 7, 3], [9, 9, 9, 3]]
    assert "lost is left out" in capsys.readouterr().err


def test_peers_with_the_same_weights_share_a_process_and_every_kind_of_text(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "Process", Fake)
    common = Settings("here", 1, 99, [2], "float32", gguf="a.gguf", assistant="there")
    found = peers_of(common, "", ["lm:there@4/0.1"], GROUPS, {"int4": {}}, "b.gguf", eager=True)
    peers = [peer for peer in found if peer.engine in ("transformers", "opt_tree")]
    assert peers[0].name == REFERENCE and not peers[0].settings.assistant
    assert [peer.name for peer in peers][-2:] == ["opt_tree plain, int4", "opt_tree lm:there@4/0.1, int4"]
    drafted = {peer.name: peer.settings.assistant for peer in found if peer.settings.assistant}
    assert drafted == {
        "transformers, assisted": "there", "llama.cpp, draft model": "b.gguf", "openvino, draft model": "b.gguf"
    }  # fmt: skip
    runs = [Run([[7]], 8, frozenset(), 9.0, tmp_path / "a", kind, share=True) for kind in ("chat", "body")]
    started.clear()
    measured = measure(peers, [0], *runs)
    assert [(one.dtype, one.weights) for one in started] == [("float32", None), ("float32", "int4")]
    assert [one.texts for one in measured] == ["chat"] * len(peers) + ["body"] * len(peers)
    assert all(len(one.answers) == 1 for one in measured)
    started.clear()
    measure(peers, [0], replace(runs[0], share=False))
    assert len(started) == len(peers)


@pytest.mark.slow
def test_a_process_serves_the_peers_that_share_it_and_its_death_is_one_line(folder, tmp_path):
    plain = settings(folder)
    process = Process("opt_tree", plain, [min(os.sched_getaffinity(0))], 300)
    tree = settings(folder, drafter=f"lm:{folder}", tree={"nodes": 4, "threshold": 0.0})
    one, other = process.ask(prompt(12), 12, plain), process.ask(prompt(12), 12, tree)
    assert one["tokens"] == other["tokens"] and one["steps"] == len(one["tokens"]) == 12 and other["steps"] < 6
    assert 0 < one["first_seconds"] <= one["seconds"] and one["peak_mb"] > 50
    process._process.send_signal(signal.SIGSEGV)
    with pytest.raises(PeerError, match="died of SIGSEGV"):
        process.ask(prompt(12), 6, plain)
    process.close()
    assistant = shutil.copytree(folder, tmp_path / "assistant")  # another model: its forwards are not the target's
    clock = Clock()
    ENGINES["transformers"](settings(folder, assistant=str(assistant)))(prompt(12), 12, clock)
    assert clock.steps is not None and clock.steps < 12


def test_named_peers_alone():
    peers = [Peer("a", "x", Settings("", 1, 9, [])), Peer("b, c", "x", Settings("", 1, 9, []))]
    assert command.named(peers, "b, c") == peers[1:] and command.named(peers, "b, c; a") == peers
    with pytest.raises(ValueError, match="--only d: there are a; b, c"):
        command.named(peers, "a; d")


def test_a_drafter_may_bring_its_tree():
    assert parse_drafter("store:demo@8/0.03") == ("store:demo", {"nodes": 8, "threshold": 0.03})
    assert parse_drafter("graft:1:eagle:demo+store:demo") == ("graft:1:eagle:demo+store:demo", {})
    with pytest.raises(ValueError, match="SPEC@NODES"):
        parse_drafter("ngram@eight")


def test_the_command_measures_the_embedded_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measuring, "Process", Fake)
    output = tmp_path / "peers.jsonl"
    arguments = ["--base-model-path", "demo", "--bench-name", "demo", "--limit", "2", "--cores", "1", "--output"]
    monkeypatch.setattr(command, "KNOWN", {"demo": SimpleNamespace(tree=lambda weights: (5, 0.12))})
    assert command.main([*arguments, str(output), "--peers", "opt_tree", "--eager", "--weights", "full", "--json"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])["peers"]
    assert [line["peer"] for line in figures] == ["opt_tree demo@5/0.12", REFERENCE, "opt_tree plain"]
    assert len(output.read_text().splitlines()) == 6
    absent = tmp_path / "absent"
    for wrong, said in (
        ([*arguments, str(output)], "is there already"),
        ([*arguments, str(absent), "--peers", "vllm"], "there are transformers"),
        ([*arguments[:-3], "--cores", "99", "--output", str(absent)], "this machine has"),
        ([*arguments, str(absent), "--weights", "int3"], "there are full, int8, int4"),
        ([*arguments, str(absent), "--texts", "verse"], "there are chat, repeated, body"),
        ([*arguments, str(absent), "--gguf", "absent.gguf"], "no GGUF file"),
    ):
        assert command.main(wrong) == 2
        assert said in capsys.readouterr().err
    assert not absent.exists()


def test_a_file_that_openvino_reads(tmp_path, model):  # noqa: F811
    kinds = gguf.GGMLQuantizationType
    before = _rewritten(
        write_gguf(tmp_path / "a.gguf", model), tmp_path / "b.gguf",
        lambda tensor: kinds.Q5_0 if tensor.name.endswith("ffn_up.weight") else tensor.tensor_type,
    )  # fmt: skip
    assert gguf.GGUFReader(before).tensors
    file = readable_gguf(before, tmp_path / "c.gguf")
    was, now = ({one.name: one for one in gguf.GGUFReader(path).tensors} for path in (before, file))
    for name, tensor in was.items():
        packed = tensor.tensor_type == kinds.Q5_0
        assert packed is name.endswith("ffn_up.weight")
        assert now[name].tensor_type == (kinds.Q8_0 if packed else tensor.tensor_type)
        values = [gguf.quants.dequantize(one.data, one.tensor_type) for one in (tensor, now[name])]
        assert np.allclose(*values, atol=np.abs(values[0]).max() / 100)
        assert packed or (tensor.data == now[name].data).all()


def test_bodies_of_functions(tmp_path):
    turn = "Complete the code I provided.\n\ndef f{}(x):\n    pass\n"
    lines = [{"question_id": n, "category": "code", "turns": [turn.format(n)]} for n in range(20)]
    (tmp_path / "humaneval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = bodies(6, str(tmp_path), fetch=False)
    assert len(found) == 6 and len({one.id for one in found}) == 6 and not any(one.fit for one in found)
    assert all(one.given.startswith("```python\ndef f") for one in found)


def test_prompts_whose_answers_repeat_them(tmp_path):
    passage = {"question_id": 1, "category": "rag", "turns": [" ".join(map(str, range(300)))]}
    chat = {"question_id": 2, "category": "writing", "turns": ["Tell me."]}
    code = {"question_id": 3, "category": "code", "turns": ["Complete the code I provided.\ndef f(x):\n    pass"]}
    for name, lines in (("spec_bench", [chat, passage]), ("humaneval", [code])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = repeated(8, str(tmp_path), fetch=False)
    assert len(found) == 8 and found[0] == found[4] and found[0] != found[1]
    assert all("0 1 2" in one and "119" in one and "120" not in one for one in (*found[:2], found[3]))
    assert "def f(x):" in found[2] and "Complete" not in found[2]


@pytest.mark.slow
def test_peak_memory_is_the_process_s_own_and_stays_when_memory_is_given_back() -> None:
    """`getrusage` says the parent's peak where that is larger, as this process's is; the present size is no peak."""
    code = "from experiments.other_engines.worker import peak_mb; {}; print(peak_mb())"
    root = Path(__file__).parents[2]

    def said(line: str) -> float:
        command = [sys.executable, "-c", code.format(line)]
        return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)

    assert said("pass") < 100 < 200 < said("x = b'x' * (200 << 20); del x")
