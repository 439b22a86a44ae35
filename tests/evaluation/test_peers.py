"""The peers' comparison: engines on a tiny model, foreign ones as fakes of their modules, and a process that dies."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import pytest
import torch
from models.test_named import model, write_gguf  # noqa: F401 - a fixture
from tiny_models import prompt, tiny, tiny_tokenizer

from experiments.other_engines import __main__ as command
from experiments.other_engines import measuring
from experiments.other_engines.__main__ import figures
from experiments.other_engines.engines import ENGINES, Clock, Settings, bf16_gguf
from experiments.other_engines.measuring import Measured, PeerError, Process, Run, measure
from experiments.other_engines.registry import BASE, GROUPS, REFERENCE, Peer, parse_drafter, peers_of
from experiments.other_engines.texts import repeated
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
                assert take({"choices": [{"text": text, "finish_reason": None}]}) is False

    kinds = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE="simple")
    parts = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch", "speculative")}
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
    assert told.speculative.types == ["simple"]


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


def test_a_process_answers_and_its_death_is_one_line(folder):
    process = Process("transformers", settings(folder), [min(os.sched_getaffinity(0))], 300)
    answer = process.ask(prompt(12), 6)
    assert len(answer["tokens"]) == 6 and 0 < answer["first_seconds"] <= answer["seconds"] and answer["peak_mb"] > 50
    process._process.send_signal(signal.SIGSEGV)
    with pytest.raises(PeerError, match="died of SIGSEGV"):
        process.ask(prompt(12), 6)
    process.close()


class Fake:
    """Stands in for a process: the text of its settings' dtype, one engine that crashes at the second prompt."""

    def __init__(self, engine, settings, cores, timeout):
        self.settings, self.load_seconds, self.asked = settings, 0.5, 0
        if settings.folder == "absent":
            raise PeerError("no model folder")

    def ask(self, prompt, limit):
        self.asked += 1
        if self.settings.lookup and self.asked == 3:
            raise PeerError("died of SIGSEGV")
        tokens = prompt + ([3] if self.settings.dtype == "float32" or prompt[0] == 7 else [4])
        return {"tokens": [*tokens, 2, 8], "seconds": 0.5, "first_seconds": 0.1, "peak_mb": 100.0}

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
    failed = {one.name: one.failed for one in measured if one.failed}
    assert not failed.keys() & found.keys() and failed["transformers, prompt lookup"] == "died of SIGSEGV"
    assert failed["lost"] == "no model folder"
    assert failed["foreign"] == "not installed: pip install no_such_module"
    assert "GGUF" in failed["llama.cpp"] or "not installed" in failed["llama.cpp"]
    assert figures([Measured("a", 1, failed="why")]) == []
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines if line["peer"] == REFERENCE] == [[7, 7, 3], [9, 9, 9, 3]]
    assert "lost is left out" in capsys.readouterr().err


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
    assert command.main([*arguments, str(output), "--peers", "opt_tree", "--eager", "--json"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])["peers"]
    assert [line["peer"] for line in figures] == [REFERENCE, "opt_tree plain", "opt_tree demo@5/0.12"]
    assert len(output.read_text().splitlines()) == 6
    absent = tmp_path / "absent"
    for wrong, said in (
        ([*arguments, str(output)], "is there already"),
        ([*arguments, str(absent), "--peers", "vllm"], "there are transformers"),
        ([*arguments[:-3], "--cores", "99", "--output", str(absent)], "this machine has"),
        ([*arguments, str(absent), "--weights", "int3"], "there are full, int8, int4"),
        ([*arguments, str(absent), "--texts", "verse"], "there are chat, repeated"),
        ([*arguments, str(absent), "--gguf", "absent.gguf"], "no GGUF file"),
    ):
        assert command.main(wrong) == 2
        assert said in capsys.readouterr().err
    assert not absent.exists()


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


def test_peak_memory_is_the_process_s_own_and_stays_when_memory_is_given_back() -> None:
    """`getrusage` says the parent's peak where that is larger, as this process's is; the present size is no peak."""
    code = "from experiments.other_engines.worker import peak_mb; {}; print(peak_mb())"
    root = Path(__file__).parents[2]

    def said(line: str) -> float:
        command = [sys.executable, "-c", code.format(line)]
        return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)

    assert said("pass") < 100 < 200 < said("x = b'x' * (200 << 20); del x")
