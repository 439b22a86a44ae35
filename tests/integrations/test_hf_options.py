"""Every argument of `generate` and every field of a GenerationConfig, through the door: the same text, or a refusal.

The table in docs/generate.md is held against these cases, and these against what the installed transformers has.
"""

import copy
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCAB, prompt, tiny, tiny_drafter, tiny_head, tiny_tokenizer
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.integrations.hf_generate import TreeOutput
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policy import OptTree

PROMPT = prompt(12)
IDS = torch.tensor([PROMPT])
MASK = torch.ones_like(IDS)
NEW = 14
# Greedy text of the tiny Llama behind PROMPT, filled in by the fixture; cases name its tokens by place.
TEXT: list[int] = []
TABLE = Path(__file__).parents[2] / "docs" / "generate.md"
CACHE = "cache" if hasattr(TreeOutput, "cache") else "past_key_values"
"""The name of a cache in the installed transformers."""


class NoSevens(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 7 == (input_ids.sum() % 7), -torch.inf)


class LastTwo(StoppingCriteria):
    """Stops where the last two tokens add up to a multiple of five."""

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: Any) -> Tensor:
        return (input_ids[:, -2:].sum(-1) % 5 == 0) & (input_ids.shape[1] > len(PROMPT) + 4)


class AtTwenty(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: Any) -> Tensor:
        return torch.full((1,), input_ids.shape[1] >= 20)


def refused(match: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return match, options


def same(**options: Any) -> tuple[None, dict[str, Any]]:
    return None, options


def drawn(**options: Any) -> tuple[None, dict[str, Any]]:
    """Sampling that leaves one token to draw: texts can be compared with those of another way of drawing."""
    return None, {"do_sample": True, "top_k": 0, **options}


FIELDS: dict[str, Any] = {
    "max_length": lambda: same(max_length=20, max_new_tokens=None),
    "max_new_tokens": lambda: same(max_new_tokens=3),
    "min_length": lambda: same(min_length=22, eos_token_id=TEXT[3]),
    "min_new_tokens": lambda: same(min_new_tokens=9, eos_token_id=TEXT[3]),
    "max_time": lambda: same(max_time=1e-9),
    "stop_strings": lambda: refused("stop strings need the tokenizer", stop_strings=["ab"], tokenizer=tiny_tokenizer()),
    "early_stopping": lambda: same(early_stopping=True),
    "do_sample": lambda: drawn(top_k=1),
    "temperature": lambda: drawn(temperature=1e-5),
    "top_k": lambda: drawn(top_k=1),
    "top_p": lambda: drawn(top_p=1e-6),
    "min_p": lambda: drawn(min_p=1.0),
    "top_h": lambda: drawn(top_h=1e-6),
    "typical_p": lambda: drawn(typical_p=1e-9),
    "epsilon_cutoff": lambda: drawn(epsilon_cutoff=0.999999),
    "eta_cutoff": lambda: drawn(eta_cutoff=0.999999, temperature=1e-5),
    "num_beams": lambda: refused("num_beams=2", num_beams=2),
    "num_return_sequences": lambda: drawn(top_k=1, num_return_sequences=2),
    "length_penalty": lambda: same(length_penalty=2.0),
    "repetition_penalty": lambda: same(repetition_penalty=1.8),
    "encoder_repetition_penalty": lambda: same(encoder_repetition_penalty=1.8),
    "no_repeat_ngram_size": lambda: same(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": lambda: same(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": lambda: same(bad_words_ids=[[TEXT[2]], [TEXT[4], TEXT[5]], [TEXT[6], TEXT[7], TEXT[8]]]),
    "renormalize_logits": lambda: same(renormalize_logits=True, repetition_penalty=1.3),
    "remove_invalid_values": lambda: same(remove_invalid_values=True),
    "forced_bos_token_id": lambda: same(forced_bos_token_id=4),
    "forced_eos_token_id": lambda: same(forced_eos_token_id=4),
    "exponential_decay_length_penalty": lambda: same(exponential_decay_length_penalty=(4, 1.9), eos_token_id=3),
    "suppress_tokens": lambda: same(suppress_tokens=TEXT[:3]),
    "begin_suppress_tokens": lambda: same(begin_suppress_tokens=TEXT[:1]),
    "sequence_bias": lambda: same(sequence_bias=[[[TEXT[3]], -20.0], [[TEXT[6], TEXT[7]], -5.0]]),
    "token_healing": lambda: refused("token healing", token_healing=True),
    "guidance_scale": lambda: refused("keeps state", guidance_scale=1.5),
    "watermarking_config": lambda: same(watermarking_config={"bias": 3.5, "seeding_scheme": "lefthash"}),
    "output_attentions": lambda: refused("output_attentions", output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": lambda: refused("output_hidden", output_hidden_states=True, return_dict_in_generate=True),
    "output_scores": lambda: same(output_scores=True, return_dict_in_generate=True),
    "output_logits": lambda: same(output_logits=True, return_dict_in_generate=True),
    "return_dict_in_generate": lambda: same(return_dict_in_generate=True),
    "pad_token_id": lambda: same(pad_token_id=VOCAB - 1),
    "bos_token_id": lambda: same(bos_token_id=5, input_ids=None, attention_mask=None),
    "eos_token_id": lambda: same(eos_token_id=[TEXT[5], TEXT[9]]),
    "decoder_start_token_id": lambda: same(decoder_start_token_id=4),
    "use_cache": lambda: same(use_cache=False),
    "cache_implementation": lambda: same(cache_implementation="static"),
    "cache_config": lambda: same(cache_config={}),
    "max_cache_len": lambda: same(max_cache_len=64, cache_implementation="static"),
    "prefill_chunk_size": lambda: same(prefill_chunk_size=4),
    "compile_config": lambda: same(compile_config=None, disable_compile=True),
    "disable_compile": lambda: same(disable_compile=True),
    "continuous_batching_config": lambda: same(continuous_batching_config=None),
    "low_memory": lambda: same(low_memory=True),
    "diversity_penalty": lambda: same(diversity_penalty=0.5),
    "num_beam_groups": lambda: same(num_beam_groups=1),
    "penalty_alpha": lambda: refused("penalty_alpha=0.6 asks for contrastive search", penalty_alpha=0.6, top_k=4),
    "dola_layers": lambda: refused("dola_layers='high' asks for DoLa", dola_layers="high"),
    "constraints": lambda: refused("constraints=.* asks for constrained", constraints=["x"]),
    "force_words_ids": lambda: refused("force_words_ids=.* asks for constrained", force_words_ids=[[3]]),
    "use_mtp": lambda: refused("use_mtp=True", use_mtp=True),
    "is_assistant": lambda: refused("is_assistant=True", is_assistant=True),
    "num_assistant_tokens": lambda: same(num_assistant_tokens=3),
    "num_assistant_tokens_schedule": lambda: same(num_assistant_tokens_schedule="heuristic"),
    "assistant_confidence_threshold": lambda: same(assistant_confidence_threshold=0.2),
    "assistant_lookbehind": lambda: same(assistant_lookbehind=4),
    "target_lookbehind": lambda: same(target_lookbehind=4),
    "max_matching_ngram_size": lambda: same(max_matching_ngram_size=3),
    "assistant_ensemble_weight": lambda: refused("assistant_ensemble_weight", assistant_ensemble_weight=0.5),
    "prompt_lookup_num_tokens": lambda: refused("prompt_lookup_num_tokens=3", prompt_lookup_num_tokens=3),
    "assistant_early_exit": lambda: refused("assistant_early_exit=1", assistant_early_exit=1),
    "speculation_type": lambda: refused("speculation_type", speculation_type="dflash"),
}
ARGUMENTS: dict[str, Any] = {
    "inputs": lambda: same(inputs=IDS, input_ids=None),
    "generation_config": lambda: same(generation_config=GenerationConfig(max_new_tokens=6, repetition_penalty=1.7)),
    "logits_processor": lambda: same(logits_processor=LogitsProcessorList([NoSevens()])),
    "stopping_criteria": lambda: same(stopping_criteria=StoppingCriteriaList([LastTwo()])),
    "prefix_allowed_tokens_fn": lambda: same(prefix_allowed_tokens_fn=lambda batch, ids: [int(ids.sum()) % VOCAB, 7]),
    "synced_gpus": lambda: refused("synced_gpus", synced_gpus=True),
    "assistant_model": lambda: refused(
        "assistant_model: the decoder has a drafter", assistant_model=tiny_drafter("llama")
    ),
    "negative_prompt_ids": lambda: same(negative_prompt_ids=IDS),
    "negative_prompt_attention_mask": lambda: same(negative_prompt_attention_mask=MASK),
}
INPUTS: dict[str, Any] = {
    "input_ids": lambda: same(),
    "attention_mask": lambda: same(attention_mask=torch.tensor([[0, *[1] * 11]])),
    "position_ids": lambda: refused("position_ids", position_ids=torch.arange(12)[None] + 5),
    "inputs_embeds": lambda: refused("inputs_embeds", inputs_embeds=torch.zeros(1, 12, 32).double()),
    "logits_to_keep": lambda: same(logits_to_keep=3),
    "labels": lambda: refused("labels", labels=IDS),
    CACHE: lambda: same(**{CACHE: DynamicCache()}),
}
# Of these a decoder that left them out would be noticed.
CHANGES = (
    *("min_length", "min_new_tokens", "max_time", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "eos_token_id", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
)
# Not passed to a callable, or no argument of a generation: checked below, or by hand.
ELSEWHERE = {"self", "streamer", "custom_generate", "kwargs", "transformers_version"}


@pytest.fixture(scope="module", autouse=True)
def text(model: Any) -> list[int]:
    TEXT[:] = model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    return TEXT


def test_nothing_that_transformers_knows_is_missing_here():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    assert fields - ELSEWHERE == set(FIELDS)
    assert arguments - ELSEWHERE - {"generation_config"} == set(ARGUMENTS) - {"generation_config"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.quick(*CHANGES, *INPUTS, "num_beams", "use_mtp", "guidance_scale", "cache_implementation", "top_k")
@pytest.mark.parametrize("name", [*FIELDS, *ARGUMENTS, *INPUTS])
def test_an_argument_gives_the_same_text_or_a_refusal(model, decoder, name):
    match, own = (FIELDS | ARGUMENTS | INPUTS)[name]()
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False, **own}
    options = {key: value for key, value in options.items() if value is not None}
    if "generation_config" in own:
        options.pop("max_new_tokens")
    if match is not None:
        with pytest.raises(Exception, match=match) as error:
            model.generate(**options, custom_generate=custom_generate(decoder))
        assert isinstance(error.value, ValueError) and "\n" not in str(error.value).strip()
        return
    cache = options.pop(CACHE, None)  # filled by whoever gets it
    doors = [{}, {"custom_generate": custom_generate(decoder)}]
    given = [{} if cache is None else {CACHE: copy.deepcopy(cache)} for _ in doors]
    expected, found = (model.generate(**options, **own, **door) for own, door in zip(given, doors, strict=True))
    if name in CHANGES:
        assert expected[0, len(PROMPT) :].tolist() != TEXT, "it should change the text"
    if options.get("return_dict_in_generate"):
        expected, found = expected.sequences, found.sequences
    torch.testing.assert_close(found, expected)


def test_the_table_says_so():
    rows = dict(re.findall(r"^\| `(\w+)` \| (same|refused|other)", TABLE.read_text(), re.MULTILINE))
    cases = {name: case()[0] for name, case in (FIELDS | ARGUMENTS | INPUTS).items()}
    found = {name: "same" if match is None else "refused" for name, match in cases.items()}
    assert {name: rows.get(name) for name in found} == found


class TestStreamer:
    """transformers passes no streamer on; the door finds it all the same."""

    def streamed(self, model: Any, **options: Any) -> str:
        streamer = TextIteratorStreamer(tiny_tokenizer(), timeout=60)
        errors: list[Exception] = []

        def run() -> None:
            try:
                model.generate(IDS, attention_mask=MASK, do_sample=False, streamer=streamer, **options)
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text + "".join(str(error) for error in errors)

    def test_its_reader_gets_the_text_and_the_end(self, model, decoder):
        expected = self.streamed(model, max_new_tokens=NEW)
        assert expected == tiny_tokenizer().decode(PROMPT + TEXT)
        assert self.streamed(model, max_new_tokens=NEW, custom_generate=custom_generate(decoder)) == expected

    def test_a_refusal_ends_the_stream(self, model, decoder):
        """Else whoever reads it in another thread waits for ever."""
        text = self.streamed(
            model, max_new_tokens=NEW, num_beams=1, dola_layers="high", custom_generate=custom_generate(decoder)
        )
        assert "asks for DoLa" in text


class TestStopStrings:
    @pytest.mark.parametrize("start", [-3, -1, 0, 3, 8, 17])
    def test_a_string_is_counted_as_transformers_counts_it(self, model, decoder, start):
        """Within the text, and across the prompt's end, which is part of it."""
        letters = tiny_tokenizer()
        whole, first = letters.decode(PROMPT + TEXT), 2 * len(PROMPT)
        string = whole[first + start : max(first, first + start) + 4]
        options = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
        expected = model.generate(IDS, **options, stop_strings=[string, "zz"], tokenizer=letters)
        assert expected.shape[1] < len(PROMPT) + NEW
        for strings in ([string, "zz"], string):
            bound = custom_generate(decoder, tokenizer=letters, stop_strings=strings)
            torch.testing.assert_close(model.generate(IDS, **options, custom_generate=bound), expected)

    def test_a_string_within_the_prompt_stops_nothing(self, model, decoder):
        letters = tiny_tokenizer()
        bound = custom_generate(decoder, tokenizer=letters, stop_strings=[letters.decode(PROMPT)[3:9]])
        out = model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, custom_generate=bound)
        assert out[0, len(PROMPT) :].tolist() == TEXT


class TestCache:
    OPTIONS = {"max_new_tokens": NEW, "do_sample": False}  # noqa: RUF012

    @pytest.mark.quick("llama")
    @pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral", "gpt2"])
    def test_a_chat_continues_from_its_cache(self, architecture):
        """Turn by turn as the documentation has it: the same object goes in again and grows in place."""
        model = tiny(architecture)
        drafter = CausalLMDrafter(CausalLM(tiny_drafter(architecture)), VOCAB)
        decoder = Decoder(CausalLM(model), drafter, OptTree(nodes=10, threshold=0.1, max_depth=5))
        texts, caches = [], []
        for door in ({}, {"custom_generate": custom_generate(decoder)}):
            cache, ids = DynamicCache(config=model.config), IDS
            for turn in range(3):
                mask = torch.ones_like(ids)
                out = model.generate(ids, attention_mask=mask, past_key_values=cache, **self.OPTIONS, **door)
                assert cache.get_seq_length() == out.shape[1] - 1
                ids = torch.cat([out, torch.tensor([prompt(5, seed=turn)])], 1)
            texts.append(ids)
            caches.append(cache)
        torch.testing.assert_close(*texts)
        for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(ours.keys, plain.keys)
            torch.testing.assert_close(ours.values, plain.values)

    def test_the_rows_given_are_not_computed_again(self, model, decoder):
        cache = DynamicCache(config=model.config)
        out = model.generate(
            IDS, attention_mask=MASK, past_key_values=cache, **self.OPTIONS, custom_generate=custom_generate(decoder)
        )
        ids = torch.cat([out, torch.tensor([prompt(5)])], 1)
        cache.layers[0].values.zero_()
        options = {**self.OPTIONS, "attention_mask": torch.ones_like(ids)}
        expected = model.generate(ids, past_key_values=copy.deepcopy(cache), **options)
        assert expected.tolist() != model.generate(ids, **options).tolist(), "the rows given should matter"
        torch.testing.assert_close(
            model.generate(ids, past_key_values=cache, **options, custom_generate=custom_generate(decoder)), expected
        )

    def test_the_cache_is_returned_where_transformers_returns_it(self, model, decoder, monkeypatch):
        monkeypatch.setattr(transformers.utils.generic.logger, "warning_once", pytest.fail)  # of its former name
        options = {**self.OPTIONS, "attention_mask": MASK, "return_dict_in_generate": True}
        expected, found = (
            model.generate(IDS, **options),
            model.generate(IDS, **options, custom_generate=custom_generate(decoder)),
        )
        assert isinstance(found, TreeOutput) and found.finish_reason == "length"
        for plain, ours in zip(expected[CACHE].layers, found[CACHE].layers, strict=True):
            torch.testing.assert_close(ours.keys, plain.keys)
        found = model.generate(IDS, **options, use_cache=False, custom_generate=custom_generate(decoder))
        assert getattr(found, CACHE) is None

    @pytest.mark.quick("llama")
    @pytest.mark.parametrize("architecture", ["llama", "gemma3"])
    def test_a_head_goes_on_from_the_cache_that_was_returned(self, architecture):
        """Its own rows, number for number, so that it has read all of them; others are refused."""
        model, target = tiny(architecture), CausalLM(tiny(architecture))
        decoder = Decoder(target, EagleDrafter(tiny_head(model), target), OptTree(nodes=10, threshold=0.1))
        cache, ids, ran = None, IDS, []
        for turn in range(3):
            options = {**self.OPTIONS, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
            expected, before = model.generate(ids, **options).sequences, target.work
            out = model.generate(ids, past_key_values=cache, **options, custom_generate=custom_generate(decoder))
            torch.testing.assert_close(out.sequences, expected)
            ran.append((target.work - before).tokens)
            cache, ids = out.past_key_values, torch.cat([out.sequences, torch.tensor([prompt(5, seed=turn)])], 1)
            assert cache.get_seq_length() == ids.shape[1] - 6
        assert max(ran[1:]) < NEW * 11 + 8, "earlier turns were taken in anew"
        self.refuse("from the cache that this decoder returned last", model, decoder, IDS, past_key_values=cache)
        cache.layers[1].values[0, 0, -1, 0] += 1
        self.refuse("from the cache that this decoder returned last", model, decoder, ids, past_key_values=cache)
        cache.layers[1].values[0, 0, -1, 0] -= 1
        ids[0, 3] = (ids[0, 3] + 1) % VOCAB
        self.refuse("from the cache that this decoder returned last", model, decoder, ids, past_key_values=cache)

    def refuse(self, match: str, model: Any, decoder: Any, ids: Tensor = IDS, **options: Any) -> None:
        with pytest.raises(ValueError, match=match) as error:
            model.generate(ids, **options, **self.OPTIONS, custom_generate=custom_generate(decoder))
        assert "\n" not in str(error.value)

    def test_what_cannot_be_continued_is_refused(self, model, decoder):
        filled = model.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **self.OPTIONS).past_key_values
        self.refuse("StaticCache", model, decoder, past_key_values=StaticCache(config=model.config, max_cache_len=64))
        self.refuse(f"holds {NEW + 11} tokens, input_ids 12", model, decoder, past_key_values=copy.deepcopy(filled))
        more = torch.ones(1, 12 + filled.get_seq_length(), dtype=torch.long)
        self.refuse(
            f"covers {NEW + 23} tokens, input_ids are 12", model, decoder, attention_mask=more, past_key_values=filled
        )
        other = DynamicCache()
        other.update(torch.zeros(1, 3, 4, 8).double(), torch.zeros(1, 3, 4, 8).double(), 0)
        self.refuse("has 1 layer, the model stores 2", model, decoder, past_key_values=other)
        other.update(torch.zeros(1, 3, 4, 8).double(), torch.zeros(1, 3, 4, 8).double(), 1)
        self.refuse("in layer 0", model, decoder, past_key_values=other)
        narrow = DynamicCache()
        for number, layer in enumerate(filled.layers):
            narrow.update(layer.keys[:, :, :8].float(), layer.values[:, :, :8].float(), number)
        self.refuse("holds torch.float32, the model stores torch.float64", model, decoder, past_key_values=narrow)
        target = CausalLM(model)
        eagle = Decoder(target, EagleDrafter(tiny_head(model), target), OptTree(nodes=8))
        ids = torch.tensor([prompt(40)])
        self.refuse("EagleDrafter reads what the target made", model, eagle, ids, past_key_values=filled)


def test_finish_reasons(model, decoder):
    options = {
        "attention_mask": MASK,
        "do_sample": False,
        "return_dict_in_generate": True,
        "custom_generate": custom_generate(decoder),
    }
    reasons = [
        model.generate(IDS, **options, **own).finish_reason
        for own in (
            {"max_new_tokens": 3},
            {"max_new_tokens": 9, "eos_token_id": TEXT[4]},
            {"max_new_tokens": 9, "max_time": 1e-9},
            {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([AtTwenty()])},
            {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(20)])},
        )
    ]
    assert reasons == ["length", "stop_token", "time", "AtTwenty", "length"]


def test_the_end_of_the_context_is_said(model, decoder, caplog, monkeypatch):
    """Plain generate goes on past the last trained position with a warning; the door stops there, with one."""
    monkeypatch.setattr(decoder.target, "max_context", 18)
    options = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
    with caplog.at_level("WARNING", logger="opt_tree.integrations.hf_generate"):
        out = model.generate(IDS, **options, custom_generate=custom_generate(decoder))
    assert out.finish_reason == "context" and out.sequences.shape[1] == 18
    assert "stopped after 6 new tokens (finish reason: context): 18 tokens" in caplog.text
