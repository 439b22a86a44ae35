"""Log-probabilities: those of plain decoding, by `Generation.log_probs` and by the outputs of `model.generate`."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, causal_logits, prompt, tiny, tiny_drafter
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from opt_tree import (
    CausalLM,
    CausalLMDrafter,
    Decoder,
    Generation,
    OptTree,
    Recorder,
    Sampling,
    Stop,
    custom_generate,
    generate_batch,
)
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.block_verification import block
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.tools.presets import plain

PROMPT = prompt(12)
NEW = 24
KEPT = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, processed": Sampling(processors=(RepetitionPenaltyLogitsProcessor(1.7),)),
    "sampled": Sampling(0.8),
    "cut": Sampling(0.9, top_p=0.8, top_k=9, processors=(RepetitionPenaltyLogitsProcessor(1.3),)),
}


def decoder_of(model: Any, **options: Any) -> Decoder:
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama").to(torch.float64)), VOCAB)
    return Decoder(CausalLM(model), drafter, OptTree(12, 0.1, 5), **options)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(tiny("llama"))


def by_hand(answer: Generation, sampling: Sampling) -> list[torch.Tensor]:
    """The processed distribution before each token, from one plain forward over the whole text."""
    rows = causal_logits(tiny("llama"), [*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 :]
    found = []
    for place, row in enumerate(rows[: len(answer.tokens)]):
        ids = torch.tensor([[*answer.prompt, *answer.tokens[:place]]])
        scores = LogitsProcessorList([*sampling.processors, *sampling.warpers()])(ids, row[None].clone())
        found.append(scores[0].log_softmax(-1))
    return found


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_they_are_the_target_s_processed_distribution(decoder, sampling):
    answer = decoder.generate(PROMPT, NEW, sampling, seed=3, recorder=Recorder(4))
    assert decoder.generate(PROMPT, NEW, sampling, seed=3, recorder=Recorder()).top_log_probs is None
    assert len(answer.steps) < NEW - 4, "some paths were accepted"
    rows = by_hand(answer, sampling)
    assert answer.log_probs == pytest.approx(
        [float(row[token]) for row, token in zip(rows, answer.tokens, strict=True)]
    )
    for row, place in zip(rows, answer.top_log_probs, strict=True):
        best = row.topk(4)
        expected = {t: v for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True) if v > -torch.inf}
        assert list(place) == list(expected) and place == pytest.approx(expected)


@pytest.mark.quick("policy1-traversal")
@pytest.mark.parametrize(
    ("policy", "verifier"),
    [(Sampled.chain(3), block), (Sampled.chains(3, 3), traversal), (Sampled.kary(2, 3), multi_round)],
)
def test_every_way_of_judging_tells_of_the_tokens_that_it_emitted(policy, verifier):
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    sampling = SAMPLINGS["cut"]
    answer = Decoder(CausalLM(tiny("llama")), drafter, policy, verifier).generate(
        PROMPT, NEW, sampling, recorder=Recorder()
    )
    rows = by_hand(answer, sampling)
    assert answer.log_probs == pytest.approx(
        [float(row[token]) for row, token in zip(rows, answer.tokens, strict=True)]
    )


@pytest.mark.slow
def test_a_stop_token_inside_an_accepted_path_ends_them_too(decoder):
    whole = decoder.generate(PROMPT, NEW, recorder=Recorder(2))
    ends = [sum(whole.accept_lengths[:step]) for step in range(1, len(whole.steps))]
    inside = next(
        place for place, token in enumerate(whole.tokens) if place + 1 not in ends and token not in whole.tokens[:place]
    )
    for stop in (Stop(tokens=[whole.tokens[inside]]), lambda tokens: "enough" if len(tokens) == inside + 1 else None):
        answer = decoder.generate(PROMPT, NEW, stop=stop, recorder=Recorder(2))
        assert len(answer.tokens) == len(answer.log_probs) == len(answer.top_log_probs) == inside + 1
        assert answer.log_probs == pytest.approx(whole.log_probs[: inside + 1], abs=1e-9)


@pytest.mark.slow
def test_batches_and_kept_contexts_tell_the_same(decoder):
    prompts = [PROMPT, prompt(5), prompt(20)]
    alone = [decoder.generate(one, NEW, recorder=Recorder(3)) for one in prompts]
    together = generate_batch(decoder, prompts, NEW, recorder=Recorder(3), width=2)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.log_probs == pytest.approx(other.log_probs, abs=1e-9)
        assert [list(place) for place in one.top_log_probs] == [list(place) for place in other.top_log_probs]
    again = [*PROMPT, *alone[0].tokens, 7]
    decoder.generate(PROMPT, NEW)
    kept = decoder.generate(again, NEW, reuse=True, recorder=Recorder())
    assert kept.reused > len(PROMPT)
    assert kept.log_probs == pytest.approx(decoder.generate(again, NEW, recorder=Recorder()).log_probs, abs=1e-9)


def test_nothing_is_kept_where_nobody_asks(decoder, monkeypatch):
    monkeypatch.setattr(Recorder, "__init__", None)
    answer = decoder.generate(PROMPT, NEW)
    assert answer.log_probs is None and answer.top_log_probs is None
    decoder.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=custom_generate(decoder))


@pytest.mark.parametrize(
    ("asked", "error"), [(-1, ValueError), (VOCAB + 1, ValueError), (1.5, TypeError), ("5", TypeError)]
)
def test_a_bad_number_is_refused(decoder, asked, error):
    for call in (decoder.generate, lambda prompt, **options: generate_batch(decoder, [prompt], **options)):
        with pytest.raises(error, match=r"^likeliest"):
            call(PROMPT, recorder=Recorder(asked))
        with pytest.raises(TypeError, match=r"recorder must be a Recorder, such as Recorder\(5\), got 5"):
            call(PROMPT, recorder=5)


def test_what_cannot_record_is_refused_before_anything_runs(decoder, monkeypatch):
    monkeypatch.setattr(decoder.target, "run", None)  # no forward

    class Half:
        add = told = print

    for call in (decoder.generate, lambda prompt, **options: generate_batch(decoder, [prompt], **options)):
        for given in (Recorder, Half(), True):
            with pytest.raises(TypeError, match="recorder must be a Recorder"):
                call(PROMPT, recorder=given)
        with pytest.raises(ValueError, match=f"likeliest: {VOCAB + 1} of a vocabulary of {VOCAB}"):
            call(PROMPT, recorder=Recorder(VOCAB + 1))
    for rows in ("logits", ["score"]):
        with pytest.raises(ValueError, match=r'^rows: a list of "logits" and "scores", got'):
            Recorder(rows=rows)


def test_a_batch_records_each_text_apart(decoder):
    """Also by a recorder of one's own, which empties what it has."""

    class Emptied(Recorder):
        def begin(self, vocab):
            super().begin(vocab)
            self.seen = getattr(self, "seen", [])
            self.seen.clear()

        def add(self, logits, scores, path, tokens):
            super().add(logits, scores, path, tokens)
            self.seen += tokens

        def told(self, length):
            assert len(self.seen) >= length > len(self.seen) - 20
            return self.seen[:length], None

    texts = [prompt(length, seed=length) for length in (5, 9, 12)]
    own, rows = Emptied(), Recorder(rows=["scores"])
    for answer in generate_batch(decoder, texts, NEW, recorder=own):
        assert answer.log_probs == answer.tokens
    decoder.generate(texts[0], NEW, recorder=rows)
    generate_batch(decoder, texts, NEW, recorder=rows)
    with pytest.raises(ValueError, match="no scores were kept"):
        rows.rows("scores", NEW)


def test_a_recorder_begins_anew_with_every_text(decoder):
    """Also behind one that failed."""
    recorder = Recorder(2)
    stop = iter([None] * 3 + [RuntimeError("stop")])

    def fail(tokens):
        if isinstance(error := next(stop), Exception):
            raise error

    with pytest.raises(RuntimeError, match="stop"):
        decoder.generate(prompt(9), NEW, stop=fail, recorder=recorder)
    for text in (PROMPT, prompt(7)):
        found, alone = (decoder.generate(text, NEW, recorder=one) for one in (recorder, Recorder(2)))
        assert found.log_probs == alone.log_probs and found.top_log_probs == alone.top_log_probs


# ---- through `model.generate`


def outputs(model: Any, decoder: Decoder, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """What transformers returns, and what the door does."""
    options = {"max_new_tokens": NEW, "do_sample": False, **KEPT, **options}
    return model.generate(ids, **copy.deepcopy(options)), model.generate(
        ids, **options, custom_generate=custom_generate(decoder)
    )


@pytest.mark.quick("options2")
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}, {"min_new_tokens": 9, "eos_token_id": 5}])
def test_scores_and_logits_are_those_of_transformers(decoder, options):
    model = decoder.target.model
    expected, found = outputs(model, decoder, torch.tensor([PROMPT]), **options)
    torch.testing.assert_close(found.sequences, expected.sequences)
    for kind in ("scores", "logits"):
        assert isinstance(found[kind], tuple) and len(found[kind]) == found.sequences.shape[1] - len(PROMPT)
        torch.testing.assert_close(found[kind], expected[kind])
    scores = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    processors = (RepetitionPenaltyLogitsProcessor(1.7),) if "repetition_penalty" in options else ()
    if "eos_token_id" not in options:
        answer = decoder.generate(PROMPT, NEW, Sampling(processors=processors), recorder=Recorder())
        assert scores[0].tolist() == pytest.approx(answer.log_probs, abs=1e-5)


def test_one_of_them_alone_and_none_without_the_output_object(decoder):
    model, ids = decoder.target.model, torch.tensor([PROMPT])
    found = model.generate(
        ids,
        max_new_tokens=5,
        custom_generate=custom_generate(decoder),
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert found.scores is None and len(found.logits) == 5 and found.logits[0].shape == (1, VOCAB)
    assert isinstance(
        model.generate(ids, max_new_tokens=5, custom_generate=custom_generate(decoder), output_scores=True),
        torch.Tensor,
    )


def test_sampled_scores_are_what_transformers_makes_of_the_logits(decoder):
    model, ids = decoder.target.model, torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 7, **KEPT}
    found = model.generate(ids, **options, custom_generate=custom_generate(decoder), seed=4)
    expected = model.generate(ids, **options, custom_generate=custom_generate(plain(decoder.target)), seed=4)
    torch.testing.assert_close(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores)
    for scores, logits in zip(found.scores, found.logits, strict=True):
        made = (logits / 0.8).masked_fill(logits < logits.topk(7).values[0, -1], -torch.inf)
        torch.testing.assert_close(scores, made)


def test_a_ragged_batch(decoder):
    """0 behind the end of the shorter answer."""
    model, pad = decoder.target.model, VOCAB - 1
    rows = [prompt(length, seed=length, vocab=pad) for length in (4, 9)]
    ids = torch.tensor([[pad] * (9 - len(row)) + row for row in rows])
    mask = (ids != pad).long()
    stop = int(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=pad)[1, 9 + 3])
    expected, found = outputs(model, decoder, ids, attention_mask=mask, pad_token_id=pad, eos_token_id=stop)
    torch.testing.assert_close(found.sequences, expected.sequences)
    ends = [(row[9:] == stop).nonzero()[:1, 0].tolist() or [NEW] for row in found.sequences]
    assert ends[0] != ends[1] and len(found.scores) == len(expected.scores)
    for place, (mine, its) in enumerate(zip(found.scores, expected.scores, strict=True)):
        for row, (end,) in enumerate(ends):
            torch.testing.assert_close(mine[row], its[row] if place <= end else torch.zeros(VOCAB))
