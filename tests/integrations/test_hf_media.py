"""Prompts with images through the door: the model takes them in by itself, trees grow behind.

Tiny random models with an image tower; the reference is plain `generate`.
"""

from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCAB, WIDTH, perturbed, prompt

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policy import OptTree

pytestmark = pytest.mark.slow

IMAGE = VOCAB - 1
PATCHES = 4
POLICY = OptTree(nodes=10, threshold=0.1, max_depth=5)
_TEXT = WIDTH | {"num_hidden_layers": 3}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def llava() -> transformers.PretrainedConfig:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def gemma3() -> transformers.PretrainedConfig:
    text = transformers.Gemma3TextConfig(
        **_TEXT,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        image_token_id=IMAGE,
        mm_tokens_per_image=PATCHES,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module", params=[llava, gemma3])
def model(request: pytest.FixtureRequest) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(request.param(), dtype=torch.float64).eval()
        for name, weight in model.named_parameters():
            if "mm_input_projection" in name:  # starts from zeros: the image would not matter
                torch.nn.init.normal_(weight, std=0.4)
        return model


def inputs(model: Any, seed: int = 0, before: int = 6, after: int = 9) -> dict[str, torch.Tensor]:
    text = [token % (VOCAB - 1) for token in prompt(before + after)]
    ids = torch.tensor([[*text[:before], *[IMAGE] * PATCHES, *text[before:]]])
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    extra = {"token_type_ids": (ids == IMAGE).long()} if model.config.model_type == "gemma3" else {}
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids), **extra}


OPTIONS = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    drafter = CausalLMDrafter(CausalLM(perturbed(model, 0.02)), VOCAB)
    return Decoder(CausalLM(model), drafter, POLICY)


@pytest.mark.parametrize(("before", "after"), [(6, 9), (0, 1), (20, 3)])
def test_the_text_behind_an_image_is_that_of_plain_generate(model, decoder, before, after):
    """Windows shorter than the prompt included: the image may lie beyond them or within."""
    texts = set()
    for seed in (0, 1):
        given = inputs(model, seed, before, after)
        expected = model.generate(**given, **OPTIONS)
        torch.testing.assert_close(
            model.generate(**given, **OPTIONS, custom_generate=custom_generate(decoder)), expected
        )
        texts.add(tuple(expected[0].tolist()))
    assert len(texts) == 2, "the image should matter"


def test_text_alone_is_that_of_plain_generate(model, decoder):
    ids = torch.tensor([[token % (VOCAB - 1) for token in prompt(14)]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = torch.zeros_like(ids)  # its processor gives them with every text
    expected = model.generate(**given, **OPTIONS)
    torch.testing.assert_close(model.generate(**given, **OPTIONS, custom_generate=custom_generate(decoder)), expected)


def test_what_cannot_be_honoured_is_refused(model, decoder):
    def refuse(match: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match) as error:
            model.generate(**(inputs(model) | changes), **OPTIONS, custom_generate=custom_generate(decoder))
        assert "\n" not in str(error.value)

    given = inputs(model, after=0)
    refuse("ends with an image", **given)
    drafter = decoder.drafter
    assert drafter is not None
    drafter.features = (-1,)
    try:
        refuse("CausalLMDrafter reads what the target made of every token")
    finally:
        del drafter.features


def test_another_model_type_is_refused(decoder, monkeypatch):
    """Only what is proven: the rows of a model that needs its images again would be wrong without a word."""
    monkeypatch.setattr("opt_tree.integrations.hf_generate._MEDIA", {})
    model = decoder.target.model
    with pytest.raises(ValueError, match=r"pixel_values.*: a tree's forward of \w+ would not see it"):
        model.generate(**inputs(model), **OPTIONS, custom_generate=custom_generate(decoder))
