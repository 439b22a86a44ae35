"""LongRoPE: one forward rotates all its rows by short or by long factors, as its largest position says.

The context ends at the position where the factors change. The reference is `model.generate`, never our own plain
decoding, which could be wrong in the same way.
"""

import functools
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCAB, WIDTH, padded_to, perturbed, prompt

from opt_tree import generate_batch
from opt_tree import model as lm_module
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.generation import Generation
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.models.positions import context_limit, rope_border
from opt_tree.policy import OptTree

BORDER = 32
NEW_TOKENS = 24
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.5, 3.0, 4.0],
}
_WIDTH = WIDTH | {"max_position_embeddings": 128}
CONFIGS = {
    # Drops its cache at the border and runs the context anew with the long factors.
    "phi3": lambda: transformers.Phi3Config(
        **_WIDTH, original_max_position_embeddings=BORDER, rope_parameters=dict(ROPE)
    ),
    "phi3-window": lambda: transformers.Phi3Config(
        **_WIDTH, original_max_position_embeddings=BORDER, rope_parameters=dict(ROPE), sliding_window=12
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **_WIDTH,
        original_max_position_embeddings=BORDER,
        rope_parameters=ROPE | {"short_mscale": 1.1, "long_mscale": 1.4},
        num_local_experts=2,
        experts_implementation="eager",
    ),
    # Keeps its cache, whose rows stay rotated by the short ones.
    "llama": lambda: transformers.LlamaConfig(**_WIDTH, rope_parameters=dict(ROPE)),
}
LENGTHS = [1, 12, 20, 30, 31]
POLICY = OptTree(nodes=12, threshold=0.0, max_depth=5)
BUCKETS = Buckets((1, 8, 32), (64, 128))


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](), dtype=torch.float64).eval()


@functools.cache
def generated(model: Any, length: int) -> list[int]:
    """What transformers answers to the prompt of this length."""
    ids = torch.tensor([prompt(length)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, length:].tolist()


def test_the_factors_matter(model):
    """Else nothing here would notice the wrong ones: the same rows beside one at the border have other logits."""
    ids = torch.tensor([prompt(BORDER + 1)])
    with torch.no_grad():
        short = model(ids[:, :BORDER], use_cache=False).logits[0]
        long = model(ids, use_cache=False).logits[0, :BORDER]
    assert (short - long).abs().max() > 0.1


def until_the_border(decoder: Decoder, model: Any, length: int) -> Generation:
    """Its answer, which is that of transformers as far as there is room."""
    result = decoder.generate(prompt(length), NEW_TOKENS)
    room = min(NEW_TOKENS, BORDER - length)
    assert result.tokens == generated(model, length)[:room], f"{length} tokens"
    assert result.finish_reason == ("context" if room < NEW_TOKENS else "length")
    return result


@pytest.mark.quick("llama-7-None")
@pytest.mark.parametrize(("rows", "buckets"), [(512, None), (7, None), (7, BUCKETS)])
def test_plain_decoding_is_that_of_transformers_up_to_the_border(model, rows, buckets, monkeypatch):
    monkeypatch.setattr(lm_module, "PREFILL", rows)
    decoder = padded_to(buckets, Decoder(CausalLM(model), None, Static.empty()))
    for length in LENGTHS:
        until_the_border(decoder, model, length)


@pytest.mark.quick("llama-exact")
@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["exact", "padded"])
def test_trees_end_at_the_border_and_change_nothing(model, buckets):
    drafter = CausalLMDrafter(CausalLM(perturbed(model, 0.05)), VOCAB)
    decoder = padded_to(buckets, Decoder(CausalLM(model), drafter, POLICY))
    alone = [until_the_border(decoder, model, length) for length in LENGTHS]
    for length, result in zip(LENGTHS, alone, strict=True):
        assert length > 20 or any(step.accepted for step in result.steps), "the drafter should sometimes be right"
    many = generate_batch(decoder, [prompt(length) for length in LENGTHS], NEW_TOKENS, width=3)
    assert [one.tokens for one in many] == [one.tokens for one in alone]


@pytest.mark.quick("llama")
def test_path_by_path_ends_there_as_well(model):
    decoder = Decoder(ChainLM(model), None, Static.empty())
    for length in LENGTHS:
        until_the_border(decoder, model, length)


@pytest.mark.quick("phi3-window", "llama")
def test_a_drafter_drafts_up_to_its_own_border(model):
    config = CONFIGS["llama"]()
    config.rope_parameters["original_max_position_embeddings"] = BORDER - 9
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = CausalLMDrafter(
            CausalLM(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)), VOCAB
        )
    result = until_the_border(Decoder(CausalLM(model), drafter, POLICY), model, 12)
    starts = [12 + sum(result.accept_lengths[:index]) for index in range(len(result.steps))]
    drafted = [start + int(step.tree.depths.max()) for step, start in zip(result.steps, starts, strict=True)]
    assert all(end <= max(start, BORDER - 9) for start, end in zip(starts, drafted, strict=True)) and starts != drafted


@pytest.mark.parametrize("length", [BORDER, BORDER + 20])
def test_a_prompt_beyond_the_border_is_refused(model, length):
    decoder = Decoder(CausalLM(model), None, Static.empty())
    with pytest.raises(ValueError, match=f"{length} tokens, which leaves no room in {BORDER} of context .LongRoPE"):
        decoder.generate(prompt(length), NEW_TOKENS)


def test_of_several_borders_the_first_one_counts():
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_WIDTH))
    model.config.rope_parameters = {
        kind: ROPE | {"original_max_position_embeddings": border} for kind, border in (("a", 16), ("b", 8))
    }
    assert rope_border(model) == context_limit(model)[0] == 8
