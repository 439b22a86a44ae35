"""A ragged, left-padded batch through the door: row by row what `generate` of transformers gives the batch."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, prompt, tiny, tiny_drafter
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.integrations.hf_generate import TreeOutput
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.policy import OptTree

PAD, NEW = VOCAB - 1, 12
ROWS = [prompt(length, seed=length, vocab=VOCAB - 1) for length in (3, 20, 9)]
IDS = torch.tensor([[PAD] * (20 - len(row)) + row for row in ROWS])
MASK = torch.tensor([[0] * (20 - len(row)) + [1] * len(row) for row in ROWS])


def decoder_of(model: Any, drafter: Any) -> Decoder:
    return Decoder(CausalLM(model), CausalLMDrafter(CausalLM(drafter), VOCAB), OptTree(12, 0.1, 5))


def both(model: Any, decoder: Decoder, **options: Any) -> tuple[Any, Any]:
    """What transformers gives, and what the door does."""
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": False, **options}
    given = {"input_ids": IDS, "attention_mask": MASK}
    return model.generate(**given, **copy.copy(options)), model.generate(
        **given, **options, custom_generate=custom_generate(decoder)
    )


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Decoder]:
    return tiny("llama"), decoder_of(tiny("llama"), tiny_drafter("llama"))


@pytest.mark.quick("llama")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
def test_a_ragged_batch_is_decoded_as_transformers_does(architecture):
    """One row ends at a stop token inside an accepted path, the others go on."""
    model = tiny(architecture)
    decoder = decoder_of(model, tiny_drafter(architecture))
    expected, found = both(model, decoder)
    torch.testing.assert_close(found, expected)
    stop = int(expected[1, 20 + 6])
    expected, found = both(model, decoder, eos_token_id=stop)
    torch.testing.assert_close(found, expected)
    assert (expected[1, 20 + 7 :] == PAD).all() and (expected[:, -1] != PAD).any()


@pytest.mark.quick("CausalLM-llama")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt", "gpt2"])
@pytest.mark.parametrize("scored_by", [CausalLM, ChainLM])
def test_a_batch_returns_its_cache(architecture, scored_by):
    """Row for row what plain `generate` leaves, and plain `generate` goes on from it."""
    model = tiny(architecture)
    decoder = Decoder(scored_by(model), NGramDrafter(), OptTree(12, 0.1, 5))
    stop = int(both(model, decoder)[0][1, 20 + 6])
    expected, found = both(model, decoder, eos_token_id=stop, return_dict_in_generate=True)
    length = expected.sequences.shape[1] - 1
    shown = torch.cat([MASK, torch.ones(3, length - 20, dtype=torch.long)], 1).bool()
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == length
    if architecture != "mistral":  # whose cache keeps the window alone
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            for name in ("keys", "values"):
                one, other = (getattr(layer, name).transpose(1, 2)[shown] for layer in (ours, theirs))
                torch.testing.assert_close(one, other)
    longer = torch.cat([found.sequences, torch.full((3, 1), 5)], 1)
    given = {"attention_mask": torch.cat([shown.long(), torch.ones(3, 2, dtype=torch.long)], 1), "max_new_tokens": 6}
    given |= {"do_sample": False, "pad_token_id": PAD}
    went_on = model.generate(longer, past_key_values=found.past_key_values, **given)
    torch.testing.assert_close(went_on, model.generate(longer, **given))
    assert both(model, decoder, return_dict_in_generate=True, use_cache=False)[1].past_key_values is None


@pytest.mark.slow
def test_without_a_padding_token_the_first_stop_token_pads_as_in_transformers(llama):
    text = both(*llama)[0]
    stops = [int(text[1, 26]), 3]
    expected, found = both(*llama, eos_token_id=stops, pad_token_id=None)
    assert (expected[1, 27:] == stops[0]).all() and expected.shape[1] > 27
    torch.testing.assert_close(found, expected)


class Ends(StoppingCriteria):
    """Ends each row by its own newest token."""

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: Any) -> Tensor:
        return input_ids[:, -1] % 5 == 0


def test_without_stop_tokens_rows_that_a_criterion_ended_are_padded(llama):
    """transformers goes on writing there; up to each row's end the texts are the same (docs/generate.md)."""
    expected, found = both(*llama, stopping_criteria=StoppingCriteriaList([Ends()]))
    own = range(IDS.shape[1], expected.shape[1])
    ends = [next((p + 1 for p in own if row[p] % 5 == 0), len(row)) for row in expected]
    assert min(ends) < found.shape[1] and not torch.equal(expected, found)
    for row, plain, end in zip(found, expected, ends, strict=True):
        assert torch.equal(row[:end], plain[:end]) and (row[end:] == PAD).all()


class Sum(StoppingCriteria):
    """Ends each row by its own tokens, the padding among them."""

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: Any) -> Tensor:
        return input_ids.sum(1) % 5 == 0


PER_ROW: dict[str, dict[str, Any]] = {
    "padding is counted in": {"min_new_tokens": 9, "eos_token_id": list(range(30))},
    "history": {"repetition_penalty": 1.8},
    "the number of the row": {"prefix_allowed_tokens_fn": lambda row, ids: [7 * row, 7 * row + 1, int(ids[-1])]},
    "the row's prompt": {"encoder_no_repeat_ngram_size": 1},
    "criteria": {"stopping_criteria": StoppingCriteriaList([Sum()]), "eos_token_id": 0},
}


@pytest.mark.quick("history", "the row's prompt", "criteria")
@pytest.mark.parametrize("what", PER_ROW)
def test_what_was_made_for_the_batch_is_asked_row_by_row(llama, what):
    expected, found = both(*llama, **PER_ROW[what])
    torch.testing.assert_close(found, expected)


def test_what_comes_back(llama):
    model, decoder = llama
    expected, found = both(model, decoder, return_dict_in_generate=True, eos_token_id=list(range(25)))
    assert isinstance(found, TreeOutput) and torch.equal(found.sequences, expected.sequences)
    assert set(found.finish_reason) <= {"stop_token", "length"}
    assert len(found.finish_reason) == len(ROWS)


@pytest.mark.slow
def test_each_row_is_drawn_with_a_seed_of_its_own(llama):
    model, decoder = llama
    options = {"max_new_tokens": NEW, "do_sample": True, "custom_generate": custom_generate(decoder), "seed": 7}
    out = model.generate(IDS[1:2], attention_mask=MASK[1:2], num_return_sequences=2, **options)
    alone = model.generate(IDS[1:2], attention_mask=MASK[1:2], **options | {"seed": 8})
    assert torch.equal(out[1:], alone) and not torch.equal(out[:1], alone)


def test_what_takes_one_prompt_is_refused(llama):
    model, decoder = llama
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    rule = {"stopping_criteria": StoppingCriteriaList([Sum()])}
    for options, match in (
        ({"streamer": BaseStreamer()}, "streamer: it takes one prompt, these are 3"),
        (rule, "3 prompts may end at different lengths: pass pad_token_id"),
    ):
        with pytest.raises(ValueError, match=match):
            if "streamer" in options:
                options = {
                    "custom_generate": custom_generate(decoder, streamer=type("S", (), {"end": lambda self: None})())
                }
            model.generate(
                IDS,
                attention_mask=MASK,
                generation_config=config,
                **{"custom_generate": custom_generate(decoder)} | options,
            )
