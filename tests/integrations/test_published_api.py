"""The published classes: their signatures, and what they return."""

import inspect
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, prompt, publish, save_pair, tiny, tiny_head

from opt_tree import EaModel, SPModel
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter

NEW_TOKENS = 20
IDS = torch.tensor([prompt(12, seed=4)])  # no end of text in the next 60 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 target, a drafter and a head, as the published `from_pretrained` takes them."""
    folder = save_pair(tmp_path_factory.mktemp("published"))
    (folder / "eagle").mkdir()
    publish(folder / "eagle", tiny_head(tiny("llama")))
    return folder


@pytest.fixture(scope="module")
def published(folder: Path) -> dict[str, SPModel | EaModel]:
    options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": True, "device_map": "cpu"}
    target = str(folder / "target")
    return {
        "classic": SPModel.from_pretrained(
            base_model_path=target, draft_model_path=str(folder / "draft"), **options
        ).eval(),
        "eagle": EaModel.from_pretrained(base_model_path=target, ea_model_path=str(folder / "eagle"), **options).eval(),
    }


def generate(model: SPModel | EaModel, *arguments: object, **options: object) -> torch.Tensor:
    return (model.spgenerate if isinstance(model, SPModel) else model.eagenerate)(*arguments, **options)


@pytest.mark.parametrize("function", [SPModel.spgenerate, EaModel.eagenerate], ids=["spgenerate", "eagenerate"])
def test_generate_has_the_published_arguments(function):
    """Names, order and defaults, as a caller of the published code relies on them."""
    _, ids, *parameters = inspect.signature(function).parameters.values()
    assert (ids.name, ids.default) == ("input_ids", inspect.Parameter.empty)
    assert {p.kind for p in (ids, *parameters)} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [(p.name, p.default) for p in parameters] == [
        ("temperature", 0.0), ("top_p", 0.0), ("top_k", 0.0), ("max_new_tokens", 512), ("max_length", 2048),
        ("nodes", 50), ("threshold", 0.5), ("max_depth", 10), ("print_time", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "second"), [(SPModel.from_pretrained, "draft_model_path"), (EaModel.from_pretrained, "ea_model_path")]
)
def test_loading_has_the_published_arguments(function, second):
    """`Type` comes first and is ignored; any other keyword goes to transformers."""
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters[:3]] == ["Type", "base_model_path", second]
    assert {p.kind for p in parameters[:3]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert parameters[0].default == "LLaMA"
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD


def test_attributes_of_the_published_models(published):
    classic, eagle = published["classic"], published["eagle"]
    assert isinstance(classic.pair.drafter, CausalLMDrafter) and isinstance(eagle.pair.drafter, EagleDrafter)
    for model in (classic, eagle):
        assert model.get_tokenizer() is model.pair.tokenizer
        assert model.base_model.config.vocab_size == VOCAB
        assert model.eval() is model and model.training is False
        assert model.base_model.dtype == model.pair.drafter.lm.dtype == torch.float32


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"total_token": -1}, "nodes= of the"),
        ({"load_in_8bit": True}, 'weights="int8"'),
        ({"depth": 5}, "max_d"),
    ],
)
@pytest.mark.parametrize("kind", [SPModel, EaModel])
def test_an_option_of_other_code_is_refused_by_its_name(kind, option, says):
    (name,) = option
    with pytest.raises(TypeError, match=f"^{name}=.* is not taken here: .*{says}"):
        kind.from_pretrained(base_model_path="demo", **option)


@pytest.mark.parametrize("name", ["is_llama3", "log"])
def test_an_argument_of_eagle_s_generate_is_refused_by_its_name(published, name):
    with pytest.raises(TypeError, match=f"argument '{name}'"):
        published["eagle"].eagenerate(IDS, max_new_tokens=4, **{name: True})


class TestGeneration:
    @pytest.mark.quick("classic")
    @pytest.mark.parametrize("kind", ["classic", "eagle"])
    def test_the_ids_are_prompt_and_greedy_text(self, published, kind):
        model = published[kind]
        expected = model.base_model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        ids = generate(model, IDS, temperature=0, max_new_tokens=NEW_TOKENS, nodes=20, threshold=0.1, max_depth=6)
        assert ids.dtype == torch.int64 and ids.device == IDS.device
        torch.testing.assert_close(ids, expected)

    def test_max_length_counts_the_prompt(self, published):
        assert published["classic"].spgenerate(IDS, max_length=17).shape == (1, 17)
        with pytest.raises(ValueError, match="max_length=12"):
            published["classic"].spgenerate(IDS, max_length=12)

    @pytest.mark.slow
    def test_it_ends_at_the_tokenizer_s_end_of_text(self, published):
        """The published code went on to the end of the path."""
        model = published["classic"]
        text = model.spgenerate(IDS, max_new_tokens=60)[0, 12:].tolist()
        assert VOCAB - 1 not in text[:-1]
        stopped = model.pair.tokenizer.eos_token
        try:
            model.pair.tokenizer.eos_token = model.pair.tokenizer.convert_ids_to_tokens(text[7])
            assert model.spgenerate(IDS, max_new_tokens=60)[0, 12:].tolist() == text[: text.index(text[7]) + 1]
        finally:
            model.pair.tokenizer.eos_token = stopped

    @pytest.mark.slow
    def test_zero_means_off_for_top_p_and_top_k(self, published):
        model = published["classic"]
        texts = []
        for options in ({}, {"top_p": 1.0, "top_k": VOCAB}, {"top_k": 1}):
            torch.manual_seed(3)
            texts.append(model.spgenerate(IDS, temperature=1.0, max_new_tokens=NEW_TOKENS, **options).tolist())
        assert texts[0] == texts[1]
        assert texts[2] == model.spgenerate(IDS, max_new_tokens=NEW_TOKENS).tolist() != texts[0]

    @pytest.mark.slow
    def test_sampling_follows_torch_s_seed(self, published):
        def sampled(seed: int) -> list[int]:
            torch.manual_seed(seed)
            return published["classic"].spgenerate(IDS, temperature=0.9, top_p=0.8, max_new_tokens=NEW_TOKENS).tolist()

        assert sampled(1) == sampled(1) != sampled(2)

    def test_print_time_prints_a_line_a_step(self, published, capsys):
        published["classic"].spgenerate(IDS, max_new_tokens=10, print_time=True)
        lines = capsys.readouterr().out.splitlines()
        assert 1 < len(lines) <= 10 and all("accepted" in line for line in lines)
        published["classic"].spgenerate(IDS, max_new_tokens=10)
        assert capsys.readouterr().out == ""
