"""What a checkpoint's generation config asks for beyond temperature, top-k and top-p, and who applies it."""

import copy
import warnings

import pytest
import torch
from tiny_models import prompt, tiny
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from opt_tree import Decoder, Sampling, Static, custom_generate, generate_batch
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.models.left_out import processing


@pytest.fixture(params=[CausalLM, ChainLM])
def decoder(request):
    model = copy.deepcopy(tiny("llama"))
    model.generation_config = GenerationConfig(repetition_penalty=1.5, no_repeat_ngram_size=2, temperature=0.7, top_k=5)
    return Decoder(request.param(model), NGramDrafter(), Static.chain(3))


@pytest.mark.quick("CausalLM")
def test_it_is_told_once_and_not_to_whoever_gives_processors(decoder):
    ids = prompt(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(ids, 4, Sampling(processors=(RepetitionPenaltyLogitsProcessor(1.0),)))
        given = torch.tensor([ids])
        decoder.target.model.generate(
            given,
            custom_generate=custom_generate(decoder),
            attention_mask=torch.ones_like(given),
            max_new_tokens=4,
            do_sample=False,
        )
    ways = (
        lambda: decoder.generate(ids, 4),
        lambda: list(decoder.steps(ids, 4)),
        lambda: generate_batch(decoder, [ids], 4),
    )
    for way in ways:
        decoder.target.told = False
        with pytest.warns(UserWarning, match=r"has repetition_penalty=1\.5, no_repeat_ngram_size=2, which only model"):
            way()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in ways:
            way()


@pytest.mark.quick("CausalLM")
def test_the_same_text_with_the_setting_as_a_processor(decoder):
    """As the warning says."""
    model, ids = decoder.target.model, prompt(9)
    model.generation_config = GenerationConfig(repetition_penalty=1.5)
    given = torch.tensor([ids])
    theirs = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    ours = decoder.generate(ids, 12, Sampling(processors=(RepetitionPenaltyLogitsProcessor(1.5),)))
    assert ours.tokens == theirs[0, 9:].tolist() != decoder.generate(ids, 12).tokens


def test_settings_that_change_nothing_are_not_told():
    asked = {"repetition_penalty": 1.0, "min_length": 0, "suppress_tokens": [], "bad_words_ids": None}
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert processing(GenerationConfig(**asked, **sampled)) == processing(GenerationConfig()) == processing(None) == ()
    assert processing(GenerationConfig(forced_eos_token_id=2, min_length=3)) == (
        "min_length=3",
        "forced_eos_token_id=2",
    )
