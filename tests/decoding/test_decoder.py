"""The loop: it stops where it should, keeps to what there is room for, and counts what it did."""

import copy
import inspect
import sys
from functools import partial

import numpy as np
import pytest
import torch
from asking import Recorder, begin, root_of
from tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    VOCAB,
    build,
    perturbed,
    prompt,
    tiny,
    tiny_drafter,
    tiny_head,
    tiny_tokenizer,
)

from opt_tree import generate_batch, load_pair
from opt_tree.children import LogProbs
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.policy import OptTree
from opt_tree.request import check_prompt
from opt_tree.sampling import Random
from opt_tree.tools.stop_strings import Stop
from opt_tree.tree import fetch

NEW_TOKENS = 40
PROMPT = prompt(12)
POLICY = OptTree(nodes=10, threshold=0.1, max_depth=5)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny("llama"))


@pytest.fixture(scope="module")
def drafter(target: CausalLM) -> CausalLMDrafter:
    return CausalLMDrafter(CausalLM(tiny_drafter("llama")), target.vocab)


@pytest.fixture(scope="module")
def decoder(target: CausalLM, drafter: CausalLMDrafter) -> Decoder:
    return Decoder(target, drafter, POLICY)


@pytest.fixture(scope="module")
def plain(target: CausalLM) -> Decoder:
    return Decoder(target, None, Static.empty())


@pytest.fixture(scope="module")
def text(plain: Decoder) -> list[int]:
    """What plain decoding says after PROMPT, long enough for every test here."""
    return plain.generate(PROMPT, 80).tokens


class TestLengths:
    @pytest.mark.parametrize("new_tokens", [1, 2, 3, 7, 12])
    def test_exactly_max_new_tokens(self, decoder, text, new_tokens):
        result = decoder.generate(PROMPT, new_tokens)
        assert result.tokens == text[:new_tokens]
        assert result.finish_reason == "length"
        assert sum(result.accept_lengths) == new_tokens

    def test_a_whole_number_may_be_a_float(self, decoder, text):
        """As 8.0 or numpy's it comes out of arithmetic; batches and steps take it as `generate` does."""
        call = inspect.unwrap  # the tests' own type checks left out
        for many in (8.0, np.int64(8), np.float64(8)):
            assert call(Decoder.generate)(decoder, PROMPT, many).tokens == text[:8]
            [answer] = call(generate_batch)(decoder, [PROMPT], many, width=1)
            assert answer.tokens == text[:8] and answer.finish_reason == "length"
            assert [token for step in call(Decoder.steps)(decoder, PROMPT, many) for token in step.tokens] == text[:8]
        for many in (0, -5, 2.5, float("nan")):
            with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1, got {many}: whole tokens"):
                call(Decoder.steps)(decoder, PROMPT, many)

    def test_no_tree_is_deeper_than_what_may_still_be_emitted(self, decoder):
        """The last step of a budget drafts no layer that could only be thrown away."""
        left = 7
        for step in decoder.steps(PROMPT, left):
            assert step.tree.depths.max() <= left - 1
            left -= len(step.tokens)
        assert left == 0

    def test_accept_lengths_are_tokens_per_step(self, decoder):
        result = decoder.generate(PROMPT, NEW_TOKENS)
        assert sum(result.accept_lengths) == len(result.tokens) == NEW_TOKENS
        assert len(result.accept_lengths) == len(result.steps)
        assert result.accept_lengths == [step.accepted + 1 for step in result.steps]
        assert result.mean_acceptance_length == NEW_TOKENS / len(result.steps)
        assert [token for step in result.steps for token in step.tokens] == result.tokens
        for step in result.steps:
            assert step.path[0] == 0 and len(step.tokens) == len(step.path)
            assert step.tokens[:-1] == step.tree.tokens[step.path[1:]].tolist()
            assert all(step.tree.parents[row] == above for above, row in zip(step.path, step.path[1:], strict=False))
        roots = [step.tree.tokens[0] for step in result.steps]
        assert roots == [PROMPT[-1], *(step.tokens[-1] for step in result.steps[:-1])]

    def test_expected_lengths_are_those_of_the_trees(self, decoder):
        result = decoder.generate(PROMPT, 20)
        for expected, step in zip(result.expected_lengths, result.steps, strict=True):
            assert expected == pytest.approx(1 + np.exp(step.tree.path_log_probs[1:]).sum())


class TestStopping:
    def test_stop_strings_end_it_behind_the_token_that_completes_them(self, decoder, text):
        """A token is two letters: strings of three lie across token boundaries, wherever they begin."""
        letters = tiny_tokenizer()
        whole = letters.decode(text[:NEW_TOKENS])
        for start in (5, 12, 21):
            string = whole[start : start + 3]
            result = decoder.generate(PROMPT, NEW_TOKENS, stop=Stop(strings=(string, "zzz"), tokenizer=letters))
            end = (whole.index(string) + 3 + 1) // 2
            assert result.tokens == text[:end]
            assert result.finish_reason == "stop_string"

    def test_a_stop_string_in_the_prompt_does_not_stop(self, decoder, text):
        letters = tiny_tokenizer()
        across = letters.decode([PROMPT[-1], text[0]])
        result = decoder.generate(PROMPT, 10, stop=Stop(strings=across, tokenizer=letters))
        assert result.tokens == text[:10]


class TestStreaming:
    def test_a_streamer_receives_the_prompt_then_exactly_the_tokens(self, decoder):
        streamer = Recorder()
        result = decoder.generate(PROMPT, 20, streamer=streamer)
        assert streamer.received[0] == PROMPT
        assert [token for tokens in streamer.received[1:] for token in tokens] == result.tokens
        assert [len(tokens) for tokens in streamer.received[1:]] == result.accept_lengths
        assert streamer.ended == 1

    def test_nothing_behind_a_stop_token_is_streamed(self, decoder, text):
        streamer = Recorder()
        result = decoder.generate(PROMPT, 30, stop=Stop(frozenset({text[6]})), streamer=streamer)
        assert [token for tokens in streamer.received[1:] for token in tokens] == result.tokens

    @pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"prompt": []}, {"stop": lambda tokens: 1 / 0}])
    def test_an_error_ends_the_stream(self, decoder, wrong):
        """Else whoever reads it in another thread waits for ever."""
        streamer = Recorder()
        with pytest.raises((ValueError, ZeroDivisionError)):
            decoder.generate(**{"prompt": PROMPT, "streamer": streamer} | wrong)
        assert streamer.ended == 1


class TestContextLimit:
    @pytest.fixture(scope="class", params=["llama", "gpt2", "opt"])
    def short(self, request: pytest.FixtureRequest) -> tuple[CausalLM, CausalLM]:
        """A target and a drafter with room for 32 positions."""
        config = ARCHITECTURES[request.param]()
        config.max_position_embeddings = 32
        model = build(config)
        return CausalLM(model), CausalLM(perturbed(model, 0.05))

    @pytest.mark.quick("opt")
    def test_decoding_ends_where_the_context_does(self, short):
        """Learned positions (GPT-2, OPT) have no row for a position behind the last one: touching it would crash."""
        target, draft = short
        expected = Decoder(target, None, Static.empty()).generate(PROMPT, 100)
        assert expected.finish_reason == "context"
        assert len(expected.tokens) == 32 - len(PROMPT)
        for policy in (OptTree(nodes=30, threshold=0, max_depth=10), Static.chain(8), Static.kary(3, 3)):
            result = Decoder(target, CausalLMDrafter(draft), policy).generate(PROMPT, 100)
            assert result.tokens == expected.tokens
            assert result.finish_reason == "context"
        assert target.length <= 32

    def test_a_prompt_that_just_fits(self, short):
        target, draft = short
        decoder = Decoder(target, CausalLMDrafter(draft), POLICY)
        result = decoder.generate(prompt(31), 5)
        assert len(result.tokens) == 1 and result.finish_reason == "context"
        with pytest.raises(ValueError, match="32 tokens, which leaves no room in 32"):
            decoder.generate(prompt(32), 5)

    def test_max_new_tokens_that_just_fit_end_by_length(self, short):
        target, draft = short
        result = Decoder(target, CausalLMDrafter(draft), POLICY).generate(PROMPT, 32 - len(PROMPT))
        assert result.finish_reason == "length"

    @pytest.mark.slow
    def test_a_drafter_with_a_shorter_context_stops_drafting_there(self, target, text):
        config = ARCHITECTURES["gpt2"]()
        config.n_positions = 24
        drafter = CausalLMDrafter(CausalLM(build(config)), VOCAB)
        result = Decoder(target, drafter, Static.kary(2, 4)).generate(PROMPT, NEW_TOKENS)
        assert result.tokens == text[:NEW_TOKENS]
        length = len(PROMPT)
        drafted = []
        for step in result.steps:
            drafted.append(int(step.tree.depths.max()))
            assert length + step.tree.depths.max() <= 24 or step.tree.nodes == 0
            length += len(step.tokens)
        assert max(drafted) > 0 and drafted[-1] == 0, "it should draft at first and not at the end"


class TestRepetition:
    def test_an_abandoned_generation_leaves_nothing_behind(self, decoder, text):
        steps = decoder.steps(prompt(9, seed=8), 50)
        next(steps)
        next(steps)
        assert decoder.generate(PROMPT, 20).tokens == text[:20]

    def test_interleaved_generations_on_one_target_are_noticed(self, target, drafter):
        first = Decoder(target, drafter, POLICY).steps(PROMPT, 50)
        next(first)
        second = Decoder(target, None, Static.empty()).steps(prompt(5, seed=3), 50)
        next(second)
        with pytest.raises(RuntimeError, match="another generation"):
            next(first)
        next(second)

    def test_steps_without_a_random_are_reproducible(self, decoder):
        sampling = Sampling(temperature=1.0)
        runs = [[step.tokens for step in decoder.steps(PROMPT, 10, sampling)] for _ in range(2)]
        assert runs[0] == runs[1]
        assert runs[0] == [step.tokens for step in decoder.steps(PROMPT, 10, sampling, Random(0))]


class TestPrompts:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([], "empty"),
            (torch.zeros(1, 0, dtype=torch.long), "empty"),
            ([[1, 2], [3, 4]], "batch of 2"),
            (torch.ones(3, 4, dtype=torch.long), "batch of 3"),
            ([1, 2, VOCAB], f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
            ([1, -1, 2], "token -1"),
            ("hello", "token ids"),
            (["hello"], "token ids"),
            ([1.5, 2.0], "token ids"),
            (prompt(CONTEXT), f"{CONTEXT} tokens"),
        ],
    )
    def test_bad_prompts_are_refused_in_one_line(self, target, bad, message):
        with pytest.raises(ValueError, match=message) as error:
            check_prompt(bad, target)
        assert "\n" not in str(error.value)

    def test_they_are_refused_before_anything_is_decoded(self, decoder):
        """`steps` is refused at the call, not at the first step; nothing reaches the model or the streamer."""
        streamer, work = Recorder(), decoder.target.work
        with pytest.raises(ValueError, match="batch of 2"):
            decoder.generate(torch.ones(2, 3, dtype=torch.long), 5, streamer=streamer)
        with pytest.raises(ValueError, match="empty"):
            decoder.steps([], 5)
        assert decoder.target.work == work and not streamer.received

    @pytest.mark.parametrize(
        "given",
        [
            PROMPT,
            tuple(PROMPT),
            [PROMPT],
            torch.tensor(PROMPT),
            torch.tensor([PROMPT]),
            np.array(PROMPT),
            np.array([PROMPT]),
        ],
        ids=["list", "tuple", "nested", "tensor", "row", "numpy", "numpy-row"],
    )
    def test_every_usual_form_of_token_ids_is_taken(self, target, given):
        ids = check_prompt(given, target)
        assert ids == PROMPT and {type(token) for token in ids} == {int}

    def test_the_prompt_is_not_changed(self, decoder):
        given = list(PROMPT)
        decoder.generate(given, 10)
        assert given == PROMPT


class TestVocabularies:
    @pytest.mark.quick("72")
    @pytest.mark.parametrize("size", [VOCAB - 9, VOCAB + 11])
    def test_vocabularies_padded_to_different_sizes(self, target, plain, size):
        """A smaller drafter meets tokens it has no embedding for; a larger one knows tokens the target lacks."""
        config = ARCHITECTURES["llama"]()
        config.vocab_size = size
        model = build(config, seed=2)
        shared = min(size, VOCAB)
        with torch.no_grad():
            for copied, original in zip(model.parameters(), target.model.parameters(), strict=True):
                rows = slice(None, shared) if copied.shape != original.shape else slice(None)
                copied[rows] = original[rows]
        decoder = Decoder(target, CausalLMDrafter(CausalLM(model), target.vocab), POLICY)
        start = [VOCAB - 1, *PROMPT, VOCAB - 2]
        result = decoder.generate(start, NEW_TOKENS)
        assert result.tokens == plain.generate(start, NEW_TOKENS).tokens
        assert max(result.tokens) >= VOCAB - 9, "the text should hold a token that a smaller drafter lacks"
        assert all(step.tree.tokens.max() < VOCAB for step in result.steps)
        assert result.mean_acceptance_length > 1.3

    def test_a_larger_drafter_loses_the_mass_of_the_tokens_that_the_target_lacks(self, target):
        config = ARCHITECTURES["llama"]()
        config.vocab_size = VOCAB + 11
        drafter = CausalLMDrafter(CausalLM(build(config)), target.vocab)
        begin(drafter, PROMPT, None)
        law = root_of(drafter, PROMPT).values
        assert law.shape == (1, VOCAB)
        assert law.exp().sum().item() == pytest.approx(1.0)


class TestCalibrated:
    def test_it_is_calibrated_at_temperature_0_only(self, target, drafter):
        decoders = [Decoder(target, copy.copy(drafter).calibrated(each), OptTree(10, 0.0, 4)) for each in (0.25, 1)]
        for temperature, equal in ((0.0, False), (0.7, True)):
            sampling = Sampling(temperature=temperature)
            trees = [next(decoder.steps(PROMPT, 10, sampling)).tree for decoder in decoders]
            assert np.array_equal(trees[0].path_log_probs, trees[1].path_log_probs) == equal

    def test_its_law_is_the_drafter_s_at_another_temperature(self, drafter):
        begin(drafter, PROMPT)
        bare = root_of(drafter, PROMPT).values.exp()
        begin(drafter.calibrated(0.25), PROMPT)
        assert torch.allclose(root_of(drafter, PROMPT).values, (bare**4 / (bare**4).sum()).log())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_it_divides_in_float32_or_wider_and_leaves_the_scores_alone(self, dtype):
        scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
        kept = scores.clone()
        got = LogProbs.of(scores, scale=1 / 0.3).values
        wide = torch.promote_types(dtype, torch.float32)
        assert got.dtype == wide and torch.allclose(got, (kept.to(wide) / 0.3).log_softmax(-1))
        assert torch.equal(scores, kept)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
    def test_a_temperature_that_is_not_positive_is_refused(self, drafter, temperature):
        with pytest.raises(ValueError, match="must be positive"):
            drafter.calibrated(temperature)

    def test_it_counts_what_the_drafter_counts(self, target, drafter):
        step = next(Decoder(target, drafter.calibrated(0.5), POLICY).steps(PROMPT, 10))
        assert step.draft_forwards > 0 and step.draft_tokens >= len(PROMPT)
        assert step.times.draft_forward > 0


class TestDrafterCache:
    @pytest.mark.quick("mistral")
    @pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
    def test_the_rows_it_keeps_are_those_of_a_fresh_prefill(self, architecture):
        target, draft = CausalLM(tiny(architecture)), CausalLM(tiny_drafter(architecture))
        drafter, fresh = CausalLMDrafter(draft), CausalLM(draft.model, probe=False)
        context, kept = list(PROMPT), 0
        for step in Decoder(target, drafter, OptTree(12, 0.0, 5)).steps(PROMPT, 30):
            before = len(context)
            context += step.tokens
            if step.tree.nodes == 0:
                continue  # nothing more could be emitted than the target's own token: the drafter was not asked
            assert before <= draft.length <= before + step.accepted
            kept += draft.length - before
            fresh.reset()
            fresh.append(context[: draft.length])
            for ours, theirs in zip(draft.cache._groups, fresh.cache._groups, strict=True):
                assert (ours[..., : draft.length, :] - theirs[..., : draft.length, :]).abs().max() < 1e-9
        assert kept > 5, "accepted rows should be kept, not recomputed"

    @pytest.mark.slow
    def test_a_step_costs_it_one_forward_for_the_root_and_one_a_layer(self, target, drafter):
        """Counters against what went through the model itself."""
        seen: list[int] = []
        handle = drafter.lm.model.register_forward_pre_hook(
            lambda module, args, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        for step in Decoder(target, drafter, POLICY).steps(PROMPT, 30):
            assert step.draft_forwards == len(seen)
            assert step.draft_tokens == sum(seen)
            assert step.draft_forwards >= step.tree.depths.max()
            seen.clear()
        handle.remove()

    def test_plain_decoding_drafts_nothing(self, plain):
        for step in plain.steps(PROMPT, 5):
            assert (step.draft_forwards, step.draft_tokens, step.times.draft_forward) == (0, 0, 0.0)
            assert step.tree.nodes == 0 and step.accepted == 0


def drafter_of(kind: str, target: CausalLM) -> Drafter:
    """The head "eagle", or a draft model."""
    if kind == "eagle":
        return EagleDrafter(tiny_head(target.model), target)
    return CausalLMDrafter(CausalLM(tiny_drafter("llama")))


class TestReadBacks:
    @pytest.mark.quick("greedy-draft", "sampled-draft")
    @pytest.mark.parametrize("kind", ["draft", "eagle"])
    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
    def test_one_read_back_a_draft_layer_and_one_a_step(self, monkeypatch, target, kind, sampling):
        reads = []

        def counted(*tensors):
            reads.append(len(tensors))
            return fetch(*tensors)

        for module in ("opt_tree.children", "opt_tree.verify"):
            monkeypatch.setattr(sys.modules[module], "fetch", counted)
        for module in ("opt_tree.children", "opt_tree.verify", "opt_tree.methods.sampling"):
            monkeypatch.setattr(sys.modules[module], "on_host", lambda tensor: False)
        target = CausalLM(build(ARCHITECTURES["llama"]()))
        layers = 0
        for step in Decoder(target, drafter_of(kind, target), OptTree(10, 0.0, 4)).steps(PROMPT, 25, sampling):
            assert len(reads) == step.draft_forwards + 1
            layers = max(layers, step.draft_forwards)
            reads.clear()
        assert layers == 4


class TestOutputLifetime:
    @pytest.mark.quick("sampled-draft")
    @pytest.mark.parametrize("kind", ["draft", "eagle"])
    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
    def test_nobody_reads_an_output_after_the_next_forward(self, monkeypatch, kind, sampling):
        """In a CUDA graph outputs are static buffers: the next replay overwrites them. Here they turn to NaN."""
        monkeypatch.setattr("opt_tree.model.PREFILL", 5)

        def trees() -> list[tuple[list[int], list[float]]]:
            target = CausalLM(build(ARCHITECTURES["llama"]()))
            steps = Decoder(target, drafter_of(kind, target), POLICY).steps(PROMPT, 20, sampling)
            return [(step.tokens, step.tree.path_log_probs.tolist()) for step in steps]

        expected = trees()
        run, outputs = CausalLM.run, {}

        @torch.inference_mode()
        def overwriting(self, *arguments, **options):
            for tensor in outputs.pop(id(self), ()):
                tensor.fill_(torch.nan)
            output = run(self, *arguments, **options)
            outputs[id(self)] = [output.logits, *output.features.values()]
            return output

        monkeypatch.setattr(CausalLM, "run", overwriting)
        assert trees() == expected


class TestComposition:
    def test_times_add_up(self, decoder):
        result = decoder.generate(PROMPT, 20)
        assert result.prefill_seconds > 0
        assert [step.times.prefill for step in result.steps[1:]] == [0.0] * (len(result.steps) - 1)
        for step in result.steps:
            times = step.times
            assert times.total == pytest.approx(times.draft + times.verify + times.commit)
            assert 0 < times.target_forward < times.verify
            assert times.draft_forward < times.draft and (times.draft_forward > 0) == (step.draft_forwards > 0)
            assert times.other == pytest.approx(times.total - times.draft_forward - times.target_forward)
        assert sum(step.times.total for step in result.steps) + result.prefill_seconds < result.seconds
        assert result.tokens_per_second == pytest.approx(20 / result.seconds)


@pytest.mark.slow
def test_what_a_decoder_and_its_parts_are_is_said_on_a_line(decoder, plain, target):
    assert repr(target) == f"<CausalLM LlamaForCausalLM: {target.size}, {CONTEXT} tokens of context>"
    assert "0.0 M parameters, float64" in repr(target)
    drafter = repr(decoder.drafter)
    assert drafter == "<CausalLMDrafter>"
    assert repr(decoder) == f"<Decoder: {target!r}, {drafter}, {POLICY!r:.90}, match>"
    assert repr(plain).startswith(f"<Decoder: {target!r}, None, Static(")
    pair = load_pair("demo", "graft:1:lm:demo+ngram", dtype="float32")
    assert "drafted by <Grafted of <CausalLMDrafter demo> and <NGramDrafter>>>" in repr(pair)
    wide = Decoder(pair.target, pair.drafter, Static.kary(2, 6))
    for one in (pair, pair.target, pair.drafter, wide, ChainLM(tiny("llama"))):
        assert repr(one).startswith("<") and "\n" not in repr(one) and len(repr(one)) < 500


def test_what_a_tokenizer_returns_as_a_whole_is_no_prompt(decoder):
    given = tiny_tokenizer()("abacad")
    assert given["input_ids"]
    for call in (decoder.generate, decoder.steps, partial(generate_batch, decoder)):
        with pytest.raises(
            TypeError, match=r'^prompts? must be token ids, got a BatchEncoding: pass its \["input_ids"\]'
        ):
            call(given)
    with pytest.raises(TypeError, match="got a dict"):
        generate_batch(decoder, [PROMPT, dict(given)])
