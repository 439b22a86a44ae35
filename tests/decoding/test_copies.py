"""A decoder that was pickled or copied decodes the text of the original, whatever the original did before."""

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from tiny_models import VOCAB, padded_to, prompt, tiny, tiny_drafter, tiny_head

from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.generation import Generation
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.policy import OptTree
from opt_tree.tools.pair import load_pair

POLICY = OptTree(nodes=12, threshold=0.1, max_depth=5)
NEW_TOKENS = 20


def independent(architecture: str = "llama") -> Decoder:
    drafter = CausalLMDrafter(CausalLM(tiny_drafter(architecture)), VOCAB)
    return Decoder(CausalLM(tiny(architecture)), drafter.calibrated(0.5), POLICY)


def eagle() -> Decoder:
    target = CausalLM(tiny("llama"))
    return Decoder(target, EagleDrafter(tiny_head(tiny("llama")), target), POLICY)


def sampled() -> Decoder:
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    return Decoder(CausalLM(tiny("llama")), drafter, Sampled.chains(2, 3), multi_round)


DECODERS: dict[str, Callable[[], Decoder]] = {
    "independent": independent,
    "windows": lambda: independent("gemma3"),
    "padded": lambda: padded_to(Buckets((1, 8, 32), (64, 128)), independent()),
    "eagle": eagle,
    "sampled": sampled,
    "plain": lambda: Decoder(CausalLM(tiny("llama")), None, Static.empty()),
}
COPIES: dict[str, Callable[[Decoder], Decoder]] = {
    "pickle": lambda decoder: pickle.loads(pickle.dumps(decoder)),
    "deepcopy": copy.deepcopy,
}
copies = pytest.mark.parametrize("how", COPIES)


def lengths(result: Generation) -> list[int]:
    return result.accept_lengths


@pytest.mark.quick("plain-pickle", "eagle-deepcopy")
@pytest.mark.parametrize(("kind", "how"), [*((kind, "pickle") for kind in DECODERS), ("eagle", "deepcopy")])
def test_a_copy_decodes_the_same_text_in_the_same_steps(kind, how):
    decoder, sampling = DECODERS[kind](), Sampling(0.8)
    unused = COPIES[how](decoder)
    expected = decoder.generate(prompt(20), NEW_TOKENS, sampling)
    for copied in (unused, COPIES[how](decoder)):
        result = copied.generate(prompt(20), NEW_TOKENS, sampling)
        assert (result.tokens, lengths(result)) == (expected.tokens, lengths(expected))
        assert copied.target is not decoder.target


@pytest.mark.quick("store:demo")
@pytest.mark.parametrize("spec", ["store:demo", "copy:lm:demo", "graft:2:lm:demo+store:demo", "recycling", "ngram"])
def test_a_decoder_that_looks_up_is_pickled(spec):
    pair = load_pair("demo", spec, dtype="float32", exact=False)
    decoder = Decoder(pair.target, pair.drafter, POLICY)
    copied, ids = pickle.loads(pickle.dumps(decoder)), pair.encode("Why is the sky blue?")
    expected = decoder.generate(ids, NEW_TOKENS)
    result = copied.generate(ids, NEW_TOKENS)
    assert (result.tokens, lengths(result)) == (expected.tokens, lengths(expected))


@copies
def test_a_copied_wrapper_keeps_its_context(how):
    """Committed and pending rows come along, and the copy writes rows of its own."""
    lm = CausalLM(tiny("gemma3"))
    lm.append(prompt(30))
    twin = pickle.loads(pickle.dumps(lm)) if how == "pickle" else copy.deepcopy(lm)
    assert twin.length == 30
    twin.append(prompt(5, seed=9))
    expected = lm.append(prompt(3, seed=1)).logits.clone()
    again = CausalLM(tiny("gemma3"))
    again.append(prompt(30))
    torch.testing.assert_close(again.append(prompt(3, seed=1)).logits, expected)
    other = again.append(prompt(2, seed=2)).logits.clone()
    twin.cache.truncate(30)
    twin.append([*prompt(3, seed=1)])
    torch.testing.assert_close(twin.append(prompt(2, seed=2)).logits, other)


def test_a_pickle_holds_the_rows_in_use_only():
    lm = CausalLM(tiny("llama"))
    empty = len(pickle.dumps(lm.cache))
    lm.append(prompt(10))
    assert lm.cache.capacity >= 256
    assert len(pickle.dumps(lm.cache)) - empty < 4 * 10 * 2 * 2 * 8 * 8


def in_two_threads(decoders: list[Decoder], tokens: int, times: int) -> list[list[Generation]]:
    """What two decoders say to a prompt each, several times, at the same time."""
    found: list[list[Generation]] = [[], []]

    def work(seed: int) -> None:
        found[seed] = [decoders[seed].generate(prompt(20, seed), tokens) for _ in range(times)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_two_eagle_decoders_in_two_threads_on_one_model():
    """The hooks of one must not catch what the other's forwards leave: same text, and no step more."""
    target = tiny("llama")
    pairs = [CausalLM(target), CausalLM(target)]
    decoders = [Decoder(lm, EagleDrafter(tiny_head(target), lm), POLICY) for lm in pairs]
    expected = [decoders[0].generate(prompt(20, seed), NEW_TOKENS) for seed in (0, 1)]
    for results, known in zip(in_two_threads(decoders, NEW_TOKENS, 3), expected, strict=True):
        assert len(results) == 3
        for result in results:
            assert (result.tokens, lengths(result)) == (known.tokens, lengths(known))


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["decoder", "drafter"])
def test_threads_that_share_a_decoder_or_a_drafter_take_turns(shared):
    """Else the steps of one run in the middle of the other's: other text, or an error from inside the model."""
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    first = Decoder(CausalLM(tiny("llama")), drafter, POLICY)
    decoders = [first, first if shared == "decoder" else Decoder(CausalLM(tiny("llama")), drafter, POLICY)]
    expected = [first.generate(prompt(20, seed), 24).tokens for seed in (0, 1)]
    for results, known in zip(in_two_threads(decoders, 24, 2), expected, strict=True):
        assert [result.tokens for result in results] == [known] * 2


@pytest.mark.parametrize("wrapped", [False, True])
def test_one_drafter_in_two_interleaved_decoders_is_noticed(wrapped):
    """Its cache would hold the other text: many rejected drafts, or an error from inside the model."""
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    given = [DrafterAround(drafter) if wrapped else drafter for _ in range(2)]
    decoders = [Decoder(CausalLM(tiny("llama")), each, POLICY) for each in given]
    first = decoders[0].steps(prompt(20), NEW_TOKENS)
    next(first)
    second = decoders[1].steps(prompt(20, seed=1), NEW_TOKENS)
    next(second)
    next(second)
    with pytest.raises(RuntimeError, match="another generation began with the same drafter") as error:
        next(first)
    assert "\n" not in str(error.value)
    next(second)
