"""Logits processors that keep state: refused where that can be seen, exact where they can step back."""

import sys
import types
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, prompt
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.integrations.grammar import FromHistory
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import CausalLM

pytestmark = pytest.mark.slow

PROMPT = prompt(12)
IDS = torch.tensor([PROMPT])
OPTIONS: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 30, "do_sample": False}


class Cycle:
    """A grammar of three states: in state s a token must leave remainder s by 3; 60 is allowed anywhere and stays."""

    def __init__(self) -> None:
        self.states = [0]

    def advance(self, token: int) -> bool:
        state = self.states[-1]
        if token != 60 and token % 3 != state:
            return False
        self.states.append(state if token == 60 else (state + 1 + token // 20) % 3)
        return True

    def rollback(self, count: int) -> None:
        del self.states[len(self.states) - count :]

    def mask(self, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[1])
        return scores.masked_fill((tokens % 3 != self.states[-1]) & (tokens != 60), -torch.inf)


class OneStateACall(LogitsProcessor):
    """As grammar libraries have it: the first call is the prompt's, every later one takes the last token."""

    def __init__(self, strict: bool = False) -> None:
        self.matcher, self.begun, self.strict = Cycle(), False, strict

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.begun:
            accepted = self.matcher.advance(int(input_ids[0, -1]))
            assert accepted or not self.strict, "not in the grammar"
        self.begun = True
        return self.matcher.mask(scores)


def generated(model: Any, *processors: Any, **options: Any) -> list[int]:
    return model.generate(IDS, **OPTIONS | options, logits_processor=LogitsProcessorList(processors))[0].tolist()


def test_what_advances_at_every_call_is_refused(model, decoder):
    for strict in (False, True):
        with pytest.raises(ValueError, match=r"OneStateACall .*FromHistory") as error:
            generated(model, OneStateACall(strict), custom_generate=custom_generate(decoder))
        assert "\n" not in str(error.value)
    calls = []

    def allowed(batch: int, ids: Tensor) -> list[int]:
        calls.append(0)
        return [len(calls) % VOCAB, (len(calls) + 1) % VOCAB]

    with pytest.raises(ValueError, match="PrefixConstrainedLogitsProcessor answers the same history in two ways"):
        model.generate(IDS, **OPTIONS, prefix_allowed_tokens_fn=allowed, custom_generate=custom_generate(decoder))


def test_plain_decoding_takes_it_as_transformers_does(model):
    """Without a tree every call is the next one."""
    plain = Decoder(CausalLM(model), None, Static.empty())
    assert generated(model, OneStateACall(), custom_generate=custom_generate(plain)) == generated(
        model, OneStateACall()
    )


def test_asked_with_its_own_history_it_is_exact(model, decoder):
    expected = generated(model, OneStateACall(strict=True))
    assert expected != generated(model)
    assert generated(model, FromHistory(Cycle(), len(PROMPT)), custom_generate=custom_generate(decoder)) == expected
    assert generated(model, FromHistory(Cycle(), len(PROMPT))) == expected, "in plain generate, too"


def test_a_batch_is_asked_about_row_by_row_and_nothing_else_is_answered_for_all(model, decoder):
    """The door shows a row as if the whole batch were that row; plain generate shows other texts."""
    rows = torch.cat([IDS, IDS.flip(1)])
    options = OPTIONS | {"attention_mask": torch.ones_like(rows), "pad_token_id": 0}
    alone = [
        model.generate(row[None], **OPTIONS, logits_processor=[FromHistory(Cycle(), len(PROMPT))])[0] for row in rows
    ]
    processor = FromHistory(Cycle(), len(PROMPT))
    found = model.generate(rows, **options, logits_processor=[processor], custom_generate=custom_generate(decoder))
    torch.testing.assert_close(found, torch.stack(alone))
    with pytest.raises(ValueError, match="follows one text, and these are 2"):
        model.generate(rows, **options, logits_processor=[FromHistory(Cycle(), len(PROMPT))])


def test_sampled_text_keeps_to_the_grammar(decoder):
    for seed in range(3):
        sampling = Sampling(1.0, processors=(FromHistory(Cycle(), len(PROMPT)),))
        result = decoder.generate(PROMPT, 30, sampling, seed=seed)
        matcher = Cycle()
        assert all(matcher.advance(token) for token in result.tokens)
        plain = Decoder(decoder.target, None, Static.empty())
        assert plain.generate(PROMPT, 30, sampling, seed=seed).tokens == result.tokens


def test_a_processor_with_a_cache_of_its_own_is_not_refused(model, decoder):
    """State that does not change the answers is nobody's business."""

    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            scores[:, int(input_ids.sum()) % VOCAB] = -torch.inf  # in place: the row is ours
            return scores

    assert generated(model, Counting(), custom_generate=custom_generate(decoder)) == generated(model, Counting())


def test_known_libraries_are_refused_by_name(monkeypatch):
    module = types.ModuleType("xgrammar.contrib.hf")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type("LogitsProcessor", (), {"__module__": module.__name__, "__call__": lambda self, ids, scores: scores})
    with pytest.raises(ValueError, match=r"xgrammar\.contrib\.hf\.LogitsProcessor advances one state a call"):
        Sampling(processors=(kind(),))
