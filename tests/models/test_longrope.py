"""LongRoPE: one forward rotates all its rows by short or by long factors, as its largest position says.

The reference is `model.generate`, never our own plain decoding, which could be wrong in the same way.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import VOCAB, WIDTH, perturbed, prompt

from opt_tree.core.tree import Tree
from opt_tree.decoding.decoder import Decoder
from opt_tree.drafters import CausalLMDrafter
from opt_tree.models import causal_lm as lm_module
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.policies import OptTree, Static

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
# Below the border, up to it by one row more or less, and above it from the start.
LENGTHS = [1, 31, 32, 33]
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


@pytest.mark.parametrize(("rows", "buckets"), [(512, None), (7, None), (7, BUCKETS)])
def test_plain_decoding_is_that_of_transformers(model, rows, buckets, monkeypatch):
    """A prefill in pieces takes the factors that the whole prompt's own forward has."""
    monkeypatch.setattr(lm_module, "_PREFILL_ROWS", rows)
    decoder = Decoder(CausalLM(model, buckets), None, Static.empty())
    for length in LENGTHS:
        assert decoder.generate(prompt(length), NEW_TOKENS).tokens == generated(model, length), f"{length} tokens"


@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["exact", "padded"])
def test_a_tree_across_the_border_changes_nothing(model, buckets):
    drafter = CausalLMDrafter(CausalLM(perturbed(model, 0.05), buckets), VOCAB)
    decoder = Decoder(CausalLM(model, buckets), drafter, POLICY)
    for length in LENGTHS:
        result = decoder.generate(prompt(length), NEW_TOKENS)
        assert result.tokens == generated(model, length), f"{length} tokens"
        assert any(step.accepted for step in result.steps), "the drafter should sometimes be right"


def test_a_drafter_of_another_border_only_drafts_less(model):
    """The drafter's factors change near its own border, which is not the target's."""
    target = CausalLM(model)
    config = CONFIGS["llama"]()
    config.rope_parameters["original_max_position_embeddings"] = BORDER + 9
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = CausalLMDrafter(
            CausalLM(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)), VOCAB
        )
    result = Decoder(target, drafter, POLICY).generate(prompt(20), NEW_TOKENS)
    assert result.tokens == generated(model, 20)
    for step, start in zip(result.steps, _starts(20, result.accept_lengths), strict=True):
        deepest = start - 1 + int(step.tree.depths.max())
        for border in (BORDER, BORDER + 9):
            assert not start - 1 < border <= deepest, f"a tree from {start - 1} to {deepest} crosses {border}"


def _starts(length: int, lengths: list[int]) -> list[int]:
    return [length + sum(lengths[:index]) for index in range(len(lengths))]


def test_a_second_prompt_begins_with_its_own_factors(model):
    """A long text before a short one, and the other way round, on the same wrapper."""
    decoder = Decoder(CausalLM(model), None, Static.empty())
    for length in (60, 31, 60, 30):
        assert decoder.generate(prompt(length), NEW_TOKENS).tokens == generated(model, length)


def test_a_tree_across_the_border_is_refused(model):
    lm = CausalLM(model)
    lm.append(prompt(BORDER - 2))
    assert lm.room(lm.length) == 1
    with pytest.raises(ValueError, match=f"2 deep below token 30: it crosses the position {BORDER}"):
        lm.score(Tree(np.array([1, 2, 3]), np.array([-1, 0, 1]), np.zeros(3), np.full(3, -1)))


def test_layers_that_change_at_several_positions_are_refused():
    config = transformers.LlamaConfig(**_WIDTH)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.rope_parameters = {
        kind: ROPE | {"original_max_position_embeddings": border} for kind, border in (("a", 8), ("b", 16))
    }
    with pytest.raises(UnsupportedModelError, match=r"several positions: \[8, 16\]"):
        CausalLM(model)
