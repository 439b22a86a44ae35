"""Rotary positions that a config widens: the context ends where the widened ones do, and trees change nothing there."""

import pytest
import torch
import transformers
from tiny_models import VOCAB, WIDTH, build, perturbed, prompt

from opt_tree import Decoder, OptTree
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.positions import positions_of

TRAINED = 32
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT = {"rope_type": "default"}


def config_of(rope, positions=TRAINED, kind="LlamaConfig", **changes):
    rope = {k: v | {"rope_theta": 1e4} for k, v in rope.items()} if "rope_type" not in rope else rope
    rope = rope | ({"rope_theta": 1e4} if "rope_type" in rope else {})
    return getattr(transformers, kind)(
        **(WIDTH | {"max_position_embeddings": positions, "rope_parameters": rope} | changes)
    )


def gemma(linear, positions):
    layers = {"full_attention": linear, "sliding_attention": DEFAULT}
    more = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return config_of(layers, positions, "Gemma3TextConfig", **more)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (config_of(LINEAR), 4 * TRAINED),
        (config_of(YARN), 4 * TRAINED),
        (config_of(YARN, 4 * TRAINED), 4 * TRAINED),  # both are named, as in DeepSeek V3 and gpt-oss
        (config_of(YARN, 6 * TRAINED), 6 * TRAINED),
        (config_of(LLAMA3 | {"original_max_position_embeddings": 8}), TRAINED),  # Llama 3.2: 32 times 8,192, of 131,072
        (config_of({"rope_type": "dynamic", "factor": 4.0}), TRAINED),
        (config_of(DEFAULT), TRAINED),
        (gemma(LINEAR, TRAINED), TRAINED),  # windowed layers are not widened
        (transformers.GPT2Config(n_positions=TRAINED), TRAINED),
        (config_of(DEFAULT, -1), 1 << 30),
    ],
    ids=str,
)
def test_how_many_positions_a_config_has(config, positions):
    assert positions_of(config) == positions


@pytest.mark.quick("linear")
@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=["linear", "yarn"])
def test_a_text_goes_on_to_the_end_of_the_widened_context(rope):
    """As transformers writes it, by trees on both sides of what the model was trained on, and up to the last token."""
    model = build(config_of(rope))
    drafter = CausalLMDrafter(CausalLM(perturbed(model, 0.03)), VOCAB)
    decoder = Decoder(CausalLM(model), drafter, OptTree(8, 0.0, 4))
    for length in (20, TRAINED + 20):
        ids = torch.tensor([prompt(length)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4 * TRAINED - length, "do_sample": False}
        expected = model.generate(ids, **options)[0, length:].tolist()
        found = decoder.generate(prompt(length), 200)
        assert found.tokens == expected and found.finish_reason == "context"
        drafted = [step for step in found.steps if step.accepted]
        assert drafted, "the drafter should sometimes be right"
    with pytest.raises(ValueError, match="leaves no room in 128 of context"):
        decoder.generate(prompt(4 * TRAINED), 1)
