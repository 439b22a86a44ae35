"""`model.generate(custom_generate=custom_generate(decoder))`: sampling, a stream that is bound to it, what is refused.

`test_hf_options.py` has each argument: the ids of plain generate, or a refusal.
"""

from typing import Any

import pytest
import torch
from asking import Recorder
from tiny_models import ARCHITECTURES, build, prompt
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.methods.policies.static import Static

PROMPT = prompt(12)
IDS = torch.tensor([PROMPT])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    return model.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(PROMPT) :].tolist()


def test_processors_are_asked_with_the_history_of_their_node(model, decoder):
    """Not only the accepted rows: a processor that saw a wrong history anywhere in the tree is noticed here."""
    seen = []

    class Witness(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append((input_ids[0].tolist(), scores.clone()))
            return scores

    processors = LogitsProcessorList([Witness()])
    model.generate(
        **INPUTS,
        max_new_tokens=8,
        do_sample=False,
        logits_processor=processors,
        custom_generate=custom_generate(decoder),
    )
    assert len(seen) > 12
    for history, scores in seen:
        with torch.no_grad():
            expected = model(torch.tensor([history]), use_cache=False).logits[0, -1]
        assert (scores[0] - expected).abs().max() < 1e-9


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_new_tokens": NEW_TOKENS}


class TestSampling:
    def text(self, model: Any, decoder: Any, seed: int, **changes: Any) -> list[int]:
        torch.manual_seed(seed)
        return model.generate(**INPUTS, **(SAMPLED | changes), custom_generate=custom_generate(decoder))[0].tolist()

    @pytest.mark.slow
    def test_torch_s_seed_governs_it_unless_one_is_bound(self, model, decoder):
        bound = custom_generate(decoder, seed=7)
        torch.manual_seed(1)
        first = model.generate(**INPUTS, **SAMPLED, custom_generate=bound)
        torch.manual_seed(2)
        assert torch.equal(first, model.generate(**INPUTS, **SAMPLED, custom_generate=bound))
        assert self.text(model, decoder, 1) == self.text(model, decoder, 1) != self.text(model, decoder, 2)
        torch.manual_seed(1)
        first, second = (
            model.generate(**INPUTS, **SAMPLED, custom_generate=custom_generate(decoder)) for _ in range(2)
        )
        assert not torch.equal(first, second), "two texts in a row"

    @pytest.mark.slow
    def test_it_is_the_text_of_plain_decoding_with_the_same_warpers(self, model, decoder, text):
        plain = Decoder(decoder.target, None, Static.empty())
        for changes in ({}, {"min_p": 0.05}, {"typical_p": 0.9}, {"repetition_penalty": 1.4}, {"top_k": 3}):
            assert self.text(model, decoder, 3, **changes) == self.text(model, plain, 3, **changes)
        assert self.text(model, decoder, 3, top_k=1)[len(PROMPT) :] == text, "of one token it is greedy"

    def test_greedy_decoding_leaves_torch_s_generator_alone(self, model, decoder):
        state = torch.random.get_rng_state()
        model.generate(**INPUTS, max_new_tokens=5, do_sample=False, custom_generate=custom_generate(decoder))
        assert torch.equal(torch.random.get_rng_state(), state)


def test_a_bound_streamer_receives_what_a_plain_one_does(model, decoder):
    plain, bound = Recorder(), Recorder()
    model.generate(**INPUTS, max_new_tokens=15, do_sample=False, streamer=plain)
    door = custom_generate(decoder, streamer=bound)
    model.generate(**INPUTS, max_new_tokens=15, do_sample=False, custom_generate=door)
    assert (bound.tokens, bound.ended) == (plain.tokens, 1)


def test_stop_strings_without_a_tokenizer_are_refused(model, decoder):
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**INPUTS, max_new_tokens=5, custom_generate=custom_generate(decoder, stop_strings="a"))


def refused(model: Any, decoder: Any, message: str, **inputs: Tensor) -> None:
    with pytest.raises(ValueError, match=message) as error:
        model.generate(**INPUTS | inputs, max_new_tokens=5, custom_generate=custom_generate(decoder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("hidden", [[5], [-1], [0, 3], slice(None)])
def test_padding_anywhere_but_on_the_left(model, decoder, hidden):
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    mask[0, hidden] = 0
    refused(model, decoder, "attention mask hides", attention_mask=mask)


def test_another_model(decoder):
    refused(build(ARCHITECTURES["llama"]()), decoder, "not for the model that generates")
