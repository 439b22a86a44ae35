"""A conversation keeps its cache: with it and without it the same texts, in the same steps, turn after turn."""

import pytest
import torch
from methods.drafters.every_kind import MAKERS, head, small, target_model
from tiny_models import CONTEXT, VOCAB, padded_to, prompt, tiny
from transformers import DynamicCache

from opt_tree import Decoder, OptTree, Sampling, Static, side_by_side
from opt_tree.backend import cache_argument
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.heads.early_exit import EarlyExit
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.target import shared

POLICY = OptTree(nodes=7, threshold=0.0, max_depth=4)
NEW = 5
ANEW = {"dflash", "dspark"}
"""Kinds that begin every prompt anew."""
LEARNT = {"recycling"}
"""Kinds that have seen the rows of a prompt once where it is reused, and twice where it is not: other trees."""


def turns(answer, context):
    """Ask a conversation's prompts; `answer` gives the new tokens of one. As they come: the next turn, another end of
    the text, the same once more, its beginning alone, one token of it, all of it, and more up to the context's end."""
    first = prompt(10) * 2
    text = first + answer(first) + prompt(9, seed=2)
    answer(text)
    other = text[:15] + prompt(8, seed=4)
    answer(other)
    answer(other)
    answer(other[:-5])
    answer(other[:1])
    answer(other)
    if context:
        answer((other * 12)[: CONTEXT - 4])


def compare(plain, reusing, sampling=Sampling(), steps=True, context=False):
    """Return how many tokens of each prompt were reused; the other decoder begins every prompt anew.

    `steps`: the trees are the same, too.
    """
    found = []

    def answer(text):
        expected = plain.generate(text, NEW, sampling, seed=len(text))
        before = reusing.target.work.tokens
        result = reusing.generate(text, NEW, sampling, seed=len(text), reuse=True)
        assert (result.tokens, result.finish_reason) == (expected.tokens, expected.finish_reason)
        if steps:
            assert result.accept_lengths == expected.accept_lengths
        if isinstance(reusing.target, CausalLM) and not isinstance(reusing.drafter, EarlyExit):
            scored = sum(len(step.tree) for step in result.steps)
            assert reusing.target.work.tokens - before == len(text) - 1 - result.reused + scored
        assert expected.reused == 0 <= result.reused < max(len(text) - 1, 1)
        found.append(result.reused)
        return result.tokens

    turns(answer, context)
    return found


@pytest.mark.quick("lm", "store")
@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_drafter(kind):
    """The same trees too: a drafter that resumed at the wrong place would draft others."""
    targets = [CausalLM(target_model()) for _ in range(2)]
    decoders = [Decoder(target, MAKERS[kind](target), POLICY) for target in targets]
    reused = compare(*decoders, steps=kind not in LEARNT)
    if kind in ANEW:
        assert not any(reused)
        return
    assert reused[0] == reused[5] == 0
    for place, least in ((1, 20 + NEW), (2, 15), (3, 22), (4, 17), (6, 1)):
        assert reused[place] >= least - 1, (place, reused)


@pytest.mark.slow
def test_drawn_texts_up_to_the_end_of_the_context():
    targets = [CausalLM(target_model()) for _ in range(2)]
    plain, reusing = [Decoder(target, head(target), POLICY) for target in targets]
    assert sum(compare(plain, reusing, Sampling(0.9, top_p=0.9), context=True)) > 80


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt2", "llama4"])
def test_every_kind_of_mask(architecture):
    """Windows and chunks too: no row leaves the cache, so a shorter text finds what it sees. Two are padded."""
    buckets = Buckets((1, 8, 32), (64, 128)) if architecture in ("llama", "gemma3") else None
    pair = [padded_to(buckets, Decoder(CausalLM(tiny(architecture)), NGramDrafter(), POLICY)) for _ in range(2)]
    assert sum(compare(*pair)) > 70


@pytest.mark.slow
def test_path_by_path_begins_anew():
    targets = [ChainLM(tiny("llama")) for _ in range(2)]
    pair = [Decoder(target, small(), POLICY) for target in targets]
    assert not any(compare(*pair))


def test_another_drafter_in_between():
    """Each knows of which tokens its own rows are: the head was not there for the second turn, nor for the first text
    of the third decoder, whose target is the same."""
    target, other = CausalLM(target_model()), CausalLM(target_model())
    heads = [Decoder(one, head(one), POLICY) for one in (target, other)]
    lookup = Decoder(target, NGramDrafter(), POLICY)
    text = prompt(30)
    text += heads[0].generate(text, NEW, reuse=True).tokens + prompt(4, seed=5)
    text += lookup.generate(text, NEW, reuse=True).tokens + prompt(4, seed=6)
    result, expected = heads[0].generate(text, NEW, reuse=True), heads[1].generate(text, NEW)
    assert (result.tokens, result.accept_lengths) == (expected.tokens, expected.accept_lengths)
    assert 30 + NEW - 2 <= result.reused < 30 + NEW + 5
    changed = [VOCAB - 1, *text[1:]]
    lookup.generate(changed, NEW)
    result, expected = heads[0].generate(changed, NEW, reuse=True), heads[1].generate(changed, NEW)
    assert (result.tokens, result.accept_lengths, result.reused) == (expected.tokens, expected.accept_lengths, 0)


@pytest.mark.slow
def test_side_by_side_each_lane_keeps_its_own():
    def talk(seed, reuse):
        def job(decoder):
            text, found = prompt(20, seed), []
            for turn in range(3):
                found.append((yield from decoder.answer(text, NEW, reuse=reuse and turn > 0)))
                text = text + found[-1].tokens + prompt(6, seed + turn + 1)
            return found

        return job

    target = CausalLM(target_model())
    decoder = Decoder(target, head(target), POLICY)
    alone = [decoder.compute(talk(seed, False)(decoder)) for seed in range(3)]
    for place, found in side_by_side(decoder, (talk(seed, True) for seed in range(3)), width=2):
        assert [result.tokens for result in found] == [result.tokens for result in alone[place]]
        assert [result.reused > 0 for result in found] == [False, True, True]


@pytest.mark.slow
def test_a_text_that_stopped_inside_a_tree_goes_on():
    """What the target accepted behind the stop is not what the next prompt says."""
    pair = [Decoder(CausalLM(target_model()), small(), POLICY) for _ in range(2)]
    ends = {pair[0].generate(prompt(9) * 3, NEW).tokens[k] for k in (1, 2)}
    text = prompt(9) * 3
    for turn in range(3):
        expected, result = [
            one.generate(text, NEW, stop=lambda tokens: "end" if tokens[-1] in ends else None, reuse=reuse)
            for one, reuse in zip(pair, (False, True), strict=True)
        ]
        assert result.tokens == expected.tokens and (result.reused > 0) == (turn > 0)
        text = text + result.tokens + prompt(3, seed=turn)


def test_rows_that_were_given_are_nobodys_text():
    """An image's rows stand behind tokens that say nothing of it."""
    target = CausalLM(tiny("llama"))
    decoder, past = Decoder(target, None, Static.empty()), DynamicCache()
    tiny("llama")(torch.tensor([prompt(20, seed=7)]), use_cache=True, **{cache_argument(type(tiny("llama"))): past})
    expected = decoder.generate(prompt(25), NEW).tokens
    with target.given(past):
        assert decoder.generate(prompt(25), NEW, reuse=True).tokens != expected
        assert decoder.generate(prompt(25), NEW, reuse=True).reused == 0
    result = decoder.generate(prompt(25), NEW, reuse=True)
    assert (result.tokens, result.reused) == (expected, 0)


def test_whoever_resets_the_target_or_runs_it_alone_is_seen():
    target = CausalLM(tiny("llama"))
    decoder = Decoder(target, None, Static.empty())
    expected = decoder.generate(prompt(25), NEW)
    target.append(prompt(5, seed=1))
    result = decoder.generate(prompt(25), NEW, reuse=True)
    assert (result.tokens, result.reused) == (expected.tokens, 23)
    target.reset()
    assert decoder.generate(prompt(25), NEW, reuse=True).reused == 0


def test_a_drafter_that_keeps_nothing_is_shown_the_whole_prompt():
    class Own(DrafterAround):
        def keeps(self, prompt):
            return 0

        def begin(self, prompt, kept, prefill, sampling):
            assert kept == 0 and len(prefill.features[-1]) == len(prompt) - 1
            super().begin(prompt, kept, prefill, sampling)

    target = CausalLM(target_model())
    decoder = Decoder(target, Own(head(target)), POLICY)
    assert [decoder.generate(prompt(25), NEW, reuse=True).reused for _ in range(2)] == [0, 0]


def test_steps_take_it_too_and_an_interrupted_one_leaves_what_is_true():
    pair = [Decoder(CausalLM(target_model()), small(), POLICY) for _ in range(2)]
    text = prompt(25)
    running = pair[1].steps(text, NEW)
    found = [token for _ in range(2) for token in next(running).tokens]
    running.close()
    text = text + found + prompt(4, seed=1)
    tokens = [token for step in pair[1].steps(text, NEW, reuse=True) for token in step.tokens]
    assert tokens[:NEW] == pair[0].generate(text, NEW).tokens
    assert pair[1].target.work.tokens < pair[0].target.work.tokens + 25


@pytest.mark.quick("lm", "eagle", "store")
@pytest.mark.parametrize("kind", MAKERS)
def test_a_text_goes_on_behind_one_whose_processor_failed(kind):
    """It fails when the tree is scored, and what the drafter was to learn of the step never comes."""
    target = CausalLM(target_model())
    decoder, text = Decoder(target, MAKERS[kind](target), POLICY), prompt(10) * 2
    plain = Decoder(CausalLM(target_model()), None, Static.empty())
    for length in (len(text), len(text) + 3):

        def fail(ids, scores, length=length):
            if ids.shape[1] > length:
                raise RuntimeError("no grammar allows this")
            return scores

        with pytest.raises(ValueError, match="no grammar allows this"):
            decoder.generate(text, NEW, Sampling(processors=(fail,)))
        longer = [*text, *prompt(3, seed=length)]
        assert decoder.generate(longer, NEW, reuse=True).tokens == plain.generate(longer, NEW).tokens


def test_what_two_texts_share():
    assert [shared([], [1]), shared([1, 2], [1, 2, 3]), shared([1, 2, 4], [1, 2, 3]), shared([2], [1])] == [0, 2, 2, 0]
