"""Loading from files: what works without a network, and one line with the name in it for everything that does not."""

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asking import refusal
from tiny_models import VOCAB, build, prompt, publish, tiny, tiny_drafter, tiny_head, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.registry import load_drafter
from opt_tree.models import checkpoints
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm
from opt_tree.policy import OptTree
from opt_tree.tools.pair import load_pair

FP64 = {"dtype": "float64", "draft_dtype": "float64", "device": "cpu"}


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    """No network: the Hub's client is told so, and any look-up of a host's address fails the test."""

    def unreachable(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a network access: {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("socket.getaddrinfo", unreachable)
        yield


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter, a head and a tokenizer beside each model."""
    folder = tmp_path_factory.mktemp("pair")
    for name, model in (("target", tiny("llama")), ("draft", tiny_drafter("llama"))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    write_head(folder / "eagle")
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(originals, tmp_path / "pair"))


def write_head(folder: Path, file: str = "pytorch_model.bin") -> None:
    folder.mkdir(exist_ok=True)
    publish(folder, tiny_head(tiny("llama")), file)


def failure(*names: str | Path, **arguments: Any) -> str:
    """Load the pair, expect a CheckpointError, and return its message: one line with every name in it."""
    message = refusal(CheckpointError, load_pair, **{key: str(value) for key, value in arguments.items()}, **FP64)
    assert len(message) < 700
    for name in names:
        assert str(name) in message
    return message


class TestPairs:
    @pytest.mark.quick("draft-CausalLMDrafter")
    @pytest.mark.parametrize(("part", "kind"), [("draft", CausalLMDrafter), ("eagle", EagleDrafter)])
    def test_a_pair_decodes_the_target_s_own_text(self, originals, part, kind):
        """A head needs no tokenizer."""
        drafter = {"eagle" if part == "eagle" else "drafter": str(originals / part)}
        pair = load_pair(str(originals / "target"), **drafter, **FP64)
        assert isinstance(pair.drafter, kind)
        result = Decoder(pair.target, pair.drafter, OptTree(10, 0.1, 5)).generate(prompt(12), 20, stop=None)
        expected = tiny("llama").generate(torch.tensor([prompt(12)]), max_new_tokens=20, do_sample=False)
        assert result.tokens == expected[0, 12:].tolist()
        assert part == "eagle" or result.mean_acceptance_length > 1

    @pytest.mark.slow
    def test_which_dtypes_they_get(self, originals, monkeypatch):
        for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
            monkeypatch.setattr(checkpoints, "fast_bfloat16", lambda fast=fast: fast)
            pair = load_pair(str(originals / "target"), str(originals / "draft"), device="cpu")
            assert (pair.target.dtype, pair.drafter.lm.dtype) == (expected, expected)
            named = load_pair(str(originals / "target"), str(originals / "draft"), draft_dtype="float64", device="cpu")
            assert (named.target.dtype, named.drafter.lm.dtype) == (expected, torch.float64)
            head = load_pair(str(originals / "target"), eagle=str(originals / "eagle"), device="cpu").drafter
            assert head.lm.dtype == expected

    def test_messages_are_encoded_by_the_template_where_there_is_one(self, folder):
        bare = load_pair(str(folder / "target"), str(folder / "draft"), **FP64)
        assert bare.encode("abhc") == [1, 58]
        for name in ("target", "draft"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / name)
            tokenizer.chat_template = (
                "{% for m in messages %}ac{{ m['content'] }}ad{% endfor %}{% if add_generation_prompt %}ae{% endif %}"
            )
            tokenizer.save_pretrained(folder / name)
        assert load_pair(str(folder / "target"), str(folder / "draft"), **FP64).encode("abhc") == [2, 1, 58, 3, 4]

    def test_stop_tokens_are_the_generation_config_s_and_the_tokenizer_s(self, folder):
        (folder / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
        assert load_pair(str(folder / "target"), str(folder / "draft"), **FP64).stop.tokens == {3, 7, VOCAB - 1}

    def test_options_reach_transformers(self, originals, monkeypatch):
        """`quantization_config` and the like pass through for the target; a device map replaces the device."""
        seen = []
        load = transformers.AutoModelForCausalLM.from_pretrained

        def watched(path, **options):
            seen.append((Path(path).name, dict(options)))
            options.pop("max_memory", None)
            return load(path, **options)

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
        load_pair(
            str(originals / "target"), str(originals / "draft"), **FP64, device_map="auto", max_memory={"cpu": "4GiB"}
        )
        (target, options), (draft, drafter_options) = seen
        assert (target, draft) == ("target", "draft")
        assert options["device_map"] == "auto" and options["max_memory"] == {"cpu": "4GiB"}
        assert drafter_options["device_map"] == "cpu" and "max_memory" not in drafter_options

    def test_exactly_one_drafter_must_be_named(self, originals):
        target = originals / "target"
        assert "not both" in failure(target=target, drafter=originals / "draft", eagle=originals / "eagle")
        assert "no drafter" in failure(target, target=target)


class TestWrongPaths:
    @pytest.mark.parametrize("part", ["target", "drafter", "eagle"])
    @pytest.mark.parametrize("kind", ["absolute", "relative", "hub", "word", "file"])
    def test_a_model_that_is_not_there(self, originals, tmp_path, part, kind):
        (tmp_path / "note.txt").write_text("no model")
        wrong = {
            "absolute": tmp_path / "nowhere",
            "relative": "./nowhere",
            "hub": "nobody/no-such-model",
            "word": "nosuchmodel",
            "file": tmp_path / "note.txt",
        }[kind]
        good = {"target": originals / "target", "drafter": originals / "draft"}
        if part == "eagle":
            del good["drafter"]
        failure(wrong, **(good | {part: wrong}))

    def test_an_empty_folder(self, originals, tmp_path):
        """As a target; as what drafts: tests/test_mistakes.py."""
        failure(tmp_path, target=tmp_path, drafter=originals / "draft")

    def test_a_folder_without_a_tokenizer(self, folder):
        for file in (folder / "target").glob("*token*"):
            file.unlink()
        failure(folder / "target", target=folder / "target", drafter=folder / "draft")


class TestCorruptFiles:
    @pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
    @pytest.mark.parametrize("part", ["target", "draft", "eagle"])
    def test_safetensors(self, folder, part, damage):
        if part == "eagle":
            (folder / "eagle" / "pytorch_model.bin").unlink()
            write_head(folder / "eagle", "model.safetensors")
        file = folder / part / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\xff" * 500, "empty": b""}[damage])
        drafter = {"eagle": folder / "eagle"} if part == "eagle" else {"drafter": folder / "draft"}
        assert "corrupt" in failure(folder / part, target=folder / "target", **drafter)

    @pytest.mark.parametrize("part", ["target", "eagle"])
    @pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": "wide"}'])
    def test_config(self, folder, part, text):
        (folder / part / "config.json").write_text(text)
        failure(folder / part, target=folder / "target", eagle=folder / "eagle")

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"hidden_size": "big"}, "Field 'hidden_size' expected int"),
            ({"num_hidden_layers": None}, "Field 'num_hidden_layers' expected int"),
            ({"rope_parameters": 3}, "Field 'rope_parameters' with value 3"),
            ({"vocab_size": -1}, "RuntimeError: Trying to create tensor with negative dimension"),
            ({"num_key_value_heads": 0}, "ZeroDivisionError: "),
            ({"dtype": "float12"}, "'torch' has no attribute 'float12'"),
        ],
        ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
    )
    @pytest.mark.parametrize("part", ["target", "draft"])
    def test_a_config_with_a_wrong_value(self, folder, part, wrong, says):
        file = folder / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
        with pytest.raises(CheckpointError, match=f"^cannot load .*{part}: .*{re.escape(says)}") as raised:
            load_pair(str(folder / "target"), drafter=f"lm:{folder / 'draft'}")
        assert "\n" not in str(raised.value)

    def test_a_config_that_is_not_a_head_s(self, folder):
        (folder / "eagle" / "config.json").write_text('{"kind": "something else"}')
        with pytest.raises(CheckpointError, match=r"not the config of an EAGLE head: .*num_hidden_layers"):
            load_pair(str(folder / "target"), f"eagle:{folder / 'eagle'}", **FP64)

    def test_a_pickle_with_more_than_tensors_is_refused_and_not_run(self, folder):
        """A checkpoint is data; what a pickle wants to call is never called."""
        witness = folder / "was-here"

        class Trap:
            def __reduce__(self) -> tuple:
                return (Path.touch, (witness,))

        file = folder / "eagle" / "pytorch_model.bin"
        torch.save({"fc.weight": Trap()}, file)
        assert "more than tensors" in failure(file, target=folder / "target", eagle=folder / "eagle")
        with file.open("wb") as raw:
            pickle.dump({"fc.weight": Trap()}, raw, protocol=2)
        failure(file, target=folder / "target", eagle=folder / "eagle")
        assert not witness.exists()

    @pytest.mark.parametrize("content", [[1, 2], {"fc.weight": 3}, torch.zeros(2)], ids=["list", "number", "tensor"])
    def test_a_pickle_of_something_else_and_a_cut_one_are_refused(self, folder, content):
        file = folder / "eagle" / "pytorch_model.bin"
        whole = file.read_bytes()
        torch.save(content, file)
        failure(folder / "eagle", target=folder / "target", eagle=folder / "eagle")
        file.write_bytes(whole[:1000])
        assert "corrupt" in failure(file, target=folder / "target", eagle=folder / "eagle")
        file.unlink()
        with pytest.raises((CheckpointError, OSError), match=r"no model.safetensors or pytorch_model.bin"):
            load_pair(str(folder / "target"), eagle=str(folder / "eagle"), **FP64)


class TestTokenizers:
    def other(self, folder: Path, change: Any) -> None:
        """Give the drafter another vocabulary."""
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content["model"]["vocab"])
        file.write_text(json.dumps(content))

    def test_different_tokenizers_whose_bytes_nobody_knows_are_refused(self, folder):
        def swap(vocab: dict[str, int]) -> None:
            vocab["aa"], vocab["ab"] = vocab["ab"], vocab["aa"]

        self.other(folder / "draft", swap)
        target, draft = folder / "target", folder / "draft"
        failure(target, "is neither byte-level nor sentencepiece's", target=target, drafter=draft)


class TestCalibration:
    CORRUPT = ["{", "{}", "[0.5]", '{"temperature": "warm"}']  # noqa: RUF012
    CORRUPT += ['{"temperature": null}', '{"temperature": 0}', '{"temperature": -1}']

    def write(self, folder: Path, text: str) -> None:
        (folder / "calibration.json").write_text(text)

    @pytest.mark.parametrize("part", ["draft", "eagle"])
    def test_a_stored_temperature_sharpens_the_drafter_unless_bare(self, folder, part):
        """One beside the target means nothing."""
        self.write(folder / "target", json.dumps({"temperature": 0.9}))
        self.write(folder / part, json.dumps({"temperature": 0.35, "positions": 123}))
        drafter = {"eagle": str(folder / "eagle")} if part == "eagle" else {"drafter": str(folder / "draft")}
        pair = load_pair(str(folder / "target"), **drafter, **FP64)
        assert pair.drafter.temperature == 0.35
        bare = load_pair(str(folder / "target"), **drafter, **FP64, bare=True)
        assert isinstance(bare.drafter, EagleDrafter if part == "eagle" else CausalLMDrafter)

    @pytest.mark.parametrize("text", CORRUPT)
    def test_a_corrupt_one_is_named(self, folder, text):
        self.write(folder / "draft", text)
        failure(folder / "draft", "calibration", target=folder / "target", drafter=folder / "draft")
        load_pair(str(folder / "target"), str(folder / "draft"), **FP64, bare=True)


class TestDtypes:
    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float99", "int8", "bool", "", "Tensor"])
    def test_an_unknown_dtype_is_refused(self, originals, name):
        with pytest.raises(CheckpointError, match="unknown dtype") as error:
            load_pair(str(originals / "target"), str(originals / "draft"), dtype=name)
        assert repr(name) in str(error.value)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("fp32", torch.float32),
            ("float", torch.float32),
            ("float64", torch.float64),
            ("bf16", torch.bfloat16),
            ("half", torch.float16),
            (torch.float16, torch.float16),
        ],
    )
    def test_the_usual_names_are_known(self, originals, name, expected):
        assert load_causal_lm(str(originals / "draft"), name).dtype == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "nowhere"}, "no device 'nowhere' here"),
        ({"device": "mps"}, "device 'mps' has no float64"),
        ({"nonsense": 3}, "TypeError: .*'nonsense'"),
        ({"drafter": "medusa:demo"}, "the package has no medusa for demo"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(originals, options, named):
    with pytest.raises(CheckpointError, match=named) as error:
        load_pair(str(originals / "target"), **{"drafter": "ngram"} | FP64 | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "field"), [("target", "hidden_act"), ("eagle", "hidden_act"), ("target", "activation_function")]
)
def test_an_unknown_activation_is_named_with_its_field(folder, part, field):
    if field == "activation_function":
        tiny("gpt2").save_pretrained(folder / "target")
    file = folder / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: "nonsense"}))
    with pytest.raises(CheckpointError, match=rf"{field} 'nonsense' is no activation that transformers knows$"):
        load_pair(str(folder / "target"), f"eagle:{folder / 'eagle'}", **FP64)


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_checkpoint_that_lacks_weights_is_refused(part, tmp_path):
    """transformers would make them up, by chance; the name in the message is one that is missing."""
    model = build(tiny("llama").config, dtype=torch.float32)
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1." not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    call = load_causal_lm if part == "target" else (lambda path: load_drafter(f"lm:{path}", CausalLM(model)))
    with pytest.raises(
        CheckpointError, match=r"lacks \d+ of the weights of LlamaForCausalLM, model.layers.1.input_lay"
    ):
        call(str(tmp_path))
