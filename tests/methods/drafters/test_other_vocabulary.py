"""A draft model with another tokenizer: what it drafts, what it reads, and that every text stays the target's own."""

import functools
from collections import defaultdict

import numpy as np
import pytest
import tokenizers
import torch
from asking import begin, root_of
from enumeration import LOSSLESS, exact_for, unchecked, verdicts
from table_models import hashed_laws
from tiny_models import ARCHITECTURES, VOCAB, build, prompt
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evaluation.run.baselines import assistant_of
from opt_tree import CheckpointError, Decoder, OptTree, Sampling, Static, load_pair
from opt_tree.methods.drafters.small_models.common_tokens import CommonTokens
from opt_tree.methods.drafters.small_models.other_vocabulary import OtherVocabulary
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import load_tokenizer
from opt_tree.models.named import resolve
from opt_tree.models.token_bytes import token_bytes
from opt_tree.tools.enumeration import continued, distance, drawn_trees, log_rows, paths_of
from opt_tree.verify import greedy, match

NAMES = ("target", "draft")
FP64 = {"dtype": "float64", "device": "cpu"}


def byte_level(*tokens, marks=("</s>",)):
    """A byte-level tokenizer of these tokens, in this order; longer ones are merged from what comes before a letter."""
    vocab = {token.replace(" ", "Ġ"): index for index, token in enumerate(tokens)}
    merges = [(token[:-1], token[-1]) for token in vocab if {token[:-1], token[-1]} <= vocab.keys()]
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = {"eos_token": marks[0]} if marks else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **end)
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks[1:]]})
    return tokenizer


def sentencepiece(*pieces):
    """A tokenizer in the style of Llama 2: a space in front of a text, "▁" for spaces, bytes for what no piece has."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(piece[:-1], piece[-1]) for piece in pieces if piece[1:]]
    raw = tokenizers.Tokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


LLAMA = functools.cache(lambda: sentencepiece(*"▁abcdehlort", "he", "hel", "hell", "hello", "▁h", "▁t", "▁to"))


def unicode_texts(count):
    """Texts of letters, spaces, line breaks, other scripts, signs that join, and emoji."""
    random = np.random.default_rng(0)
    ranges = [
        (97, 123),
        (32, 33),
        (10, 14),
        (33, 127),
        (0xC0, 0x250),
        (0x300, 0x370),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1FAFF),
    ]
    for _ in range(count):
        spans = [ranges[i] for i in random.integers(0, len(ranges), random.integers(1, 24))]
        yield "".join(chr(random.integers(*span)) for span in spans)


class TestBytes:
    def test_of_a_byte_level_tokenizer(self):
        tokenizer = load_tokenizer(resolve("demo", "target"))
        found = token_bytes(tokenizer, "demo")
        assert found.plain.keys() | found.marks.keys() == {*range(len(tokenizer))} and len(found.marks) == 5
        for text in unicode_texts(1000):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert b"".join(found.plain[index] for index in ids) == text.encode()

    def test_of_a_sentencepiece_tokenizer(self):
        tokenizer = LLAMA()
        found = token_bytes(tokenizer, "llama")
        assert found.marks == {0: "<unk>"} and len(found.spare) == 256
        for text in unicode_texts(1000):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert b"".join(found.plain[index] for index in ids) == b" " + text.encode()

    @pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "one that changes text"])
    def test_a_text_is_spelled_byte_by_byte_whatever_the_tokenizer(self, kind):
        tokenizer = load_tokenizer(resolve("demo", "target")) if kind != "sentencepiece" else LLAMA()
        if kind == "one that changes text":
            tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
        common = CommonTokens(load_tokenizer(resolve("demo", "target")), tokenizer, *NAMES)
        for number, text in enumerate(unicode_texts(300)):
            data = text.encode()[number % 2 :]  # every other one may begin inside a character
            assert b"".join(common.drafter.plain[index] for index in common.spelled(data)) == data

    def test_what_the_tokenizer_says_is_taken_where_it_has_these_bytes(self):
        common = CommonTokens(byte_level("h", "e"), LLAMA(), *NAMES)
        known = {piece: index for piece, index in LLAMA().get_vocab().items()}
        assert common.spelled(b"hello") == [known["hello"]]
        assert common.spelled(b" to") == [known["▁to"]]
        assert b"".join(common.drafter.plain[index] for index in common.spelled(b"<unk>")) == b"<unk>", "no mark"
        assert common.spelled("h\u00e9".encode()) == [known["h"], known["<0xC3>"], known["<0xA9>"]]

    def test_an_unknown_kind_is_refused_by_name(self):
        raw = tokenizers.Tokenizer(models.WordLevel({"aa": 0, "ab": 1}))
        raw.decoder = decoders.Fuse()
        with pytest.raises(CheckpointError, match=r"tokenizer of draft is neither byte-level .*\(Fuse\)"):
            CommonTokens(byte_level("a"), PreTrainedTokenizerFast(tokenizer_object=raw), *NAMES)


class TestPairs:
    def test_by_bytes_and_marks_by_name_or_role(self):
        target = byte_level("a", "b", " c", "ab", "<u>", marks=("<end>", "<user>", "<u>", "<mine>"))
        drafter = byte_level("ab", "d", " c", "a", marks=("</s>", "<user>", "<theirs>"))
        common = CommonTokens(target, drafter, *NAMES)
        known, own = target.get_vocab(), drafter.get_vocab()
        expected = {"a": "a", "Ġc": "Ġc", "ab": "ab", "<end>": "</s>", "<user>": "<user>"}
        assert common.pairs == {known[ours]: own[theirs] for ours, theirs in expected.items()}

    def test_a_piece_of_text_goes_before_a_spelled_byte(self):
        common = CommonTokens(byte_level("a", "h", "q"), LLAMA(), *NAMES)
        known = LLAMA().get_vocab()
        assert [common.pairs[index] for index in range(3)] == [known["a"], known["h"], known["<0x71>"]]


class TestReading:
    def test_token_by_token_and_what_was_read_stays(self):
        """The drafter has "hello" and " to" as one token each; the target writes them in pieces."""
        words = ("h", "e", "l", "l", "o", " t", "o", "<other>", "<end>", " to")
        target = byte_level("h", "e", "l", "o", " ", "t", " t", "to", " to", marks=("<end>", "<other>"))
        common, known = CommonTokens(target, LLAMA(), *NAMES), target.get_vocab()
        ids = [known[word.replace(" ", "Ġ")] for word in words]
        said = [LLAMA().convert_ids_to_tokens(common.read([index])) for index in ids]
        assert said[:7] == [["h"], ["e"], ["l"], ["l"], ["o"], ["▁t"], ["o"]] and said[9] == ["▁to"]
        assert "".join(said[7]) == "<0x3C>other<0x3E>" and "".join(said[8]) == "<0x3C>e<0x6E>d<0x3E>"
        assert common.read(ids) == [index for token in ids for index in common.read([token])]
        assert LLAMA().get_vocab()["hello"] not in common.read(ids)

    def test_all_bytes_are_read_whatever_the_target_s_pieces_are(self):
        """Of characters that the target writes in several tokens, too."""
        demo = load_tokenizer(resolve("demo", "target"))
        common = CommonTokens(demo, LLAMA(), *NAMES)
        for text in unicode_texts(200):
            ids = common.read(demo(text, add_special_tokens=False).input_ids)
            assert b"".join(common.drafter.plain[index] for index in ids) == text.encode()

    def test_a_token_of_nobody_is_one_id(self):
        assert CommonTokens(byte_level("a"), byte_level("b", "c"), *NAMES).read([0, 999]) == [0, 0]


@functools.cache
def model(vocab, seed=0):
    config = ARCHITECTURES["llama"]()
    config.vocab_size = vocab
    return build(config, seed)


class Anew(OtherVocabulary):
    """Reads the text again whenever it is asked about it: for many trees below one root."""

    def root(self, context):
        begin(self, context, sampling=Sampling(1.0))
        return super().root(context)


def drafter_of(target, own, vocab, seed=1, kind=OtherVocabulary):
    return kind(CausalLM(build(model(len(own), seed).config, seed)), CommonTokens(target, own, *NAMES), vocab)


OURS = byte_level(*"abcdef", marks=())
OVERLAPS = {2: "xayzb", 5: "edcba"}
CASES = [
    (2, Sampled((2, 1))),
    (2, Sampled.kary(2, 2, replacement=False)),
    (2, Rheo(nodes=2, threshold=0.0, max_depth=2)),
    (5, Sampled.chain(2)),
    (5, Sampled.kary(2, 1, replacement=False)),
    (5, OptTree(3, 0.0, 2)),
]


def test_every_verifier_has_a_case():
    assert all(any(exact_for(verifier, policy.children) for _, policy in CASES) for verifier in LOSSLESS)


@pytest.mark.quick("2-Rheo(nodes=2, threshold=0.0, max_depth=2)", "5-OptTree(nodes=3, threshold=0.0, max_depth=2)")
@pytest.mark.parametrize(("overlap", "policy"), CASES, ids=str)
def test_every_verifier_keeps_the_law_of_six_tokens_with_a_draft_model_of_five(overlap, policy):
    """Exact enumeration of every tree and every verdict: the law of the next tokens is p to 1e-12."""
    laws, text, warm = hashed_laws(1, 6), (0, 5, 1), Sampling(1.0)
    drafter, judged = drafter_of(OURS, byte_level(*OVERLAPS[overlap], marks=()), 6, kind=Anew), 0
    with unchecked(), torch.inference_mode():
        trees = drawn_trees(drafter, policy, text, warm)
        assert {token for tree, _ in trees for token in tree.tokens[1:].tolist()} <= {*range(overlap)}
        for verifier in LOSSLESS:
            too_many = verifier is match and len(trees) * 6 ** len(trees[0][0]) > 5e3
            if too_many or not exact_for(verifier, policy.children):
                continue
            law, judged = defaultdict(float), judged + 1
            for tree, probability in trees:
                scores = log_rows(laws, paths_of(tree, text))
                for (path, token), chance in verdicts(verifier, tree, scores).items():
                    law[(*tree.tokens[list(path[1:])].tolist(), token)] += probability * chance
            target = lambda more: laws((*text, *more))  # noqa: E731
            length = policy.max_depth + 1
            assert distance(continued(law, target, length), continued({(): 1.0}, target, length)) < 1e-12
    assert judged


def test_nothing_common_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"another one, and 0 of the target's 6 tokens are common: 0.0% .*; 10% is"):
        drafter_of(OURS, byte_level(*"vwxyz", marks=()), 6)


def test_what_it_says_is_the_model_s_own_law_among_the_common_tokens():
    own = byte_level(*OVERLAPS[5], marks=())
    drafter = drafter_of(OURS, own, 6)
    begin(drafter, [0, 1, 2, 3])
    said = root_of(drafter, [0, 1, 2, 3])
    logits = model(5, 1)(torch.tensor([[4, 3, 2, 1]])).logits[0, -1]
    assert said.tokens.tolist() == [0, 1, 2, 3, 4]
    assert torch.allclose(said.values[0], logits.flip(0).log_softmax(-1), atol=1e-9)


@pytest.mark.slow
def test_a_text_that_the_drafter_s_tokenizer_would_spell_anew_grows_by_its_new_ids_alone():
    """Drift: "he" + "llo" is "hello" in one. Behind every prefix it says what one says that reads it the first time."""
    target, own = byte_level("h", "e", "l", "o", "x"), byte_level("h", "e", "l", "o", "he", "hel", "hell", "hello")
    drafter, text = drafter_of(target, own, len(target)), [0, 1, 2, 2, 3, 4, 3, 0, 1]
    assert [*map(len, own(["h", "he", "hel", "hell", "hello"]).input_ids)] == [1] * 5
    begin(drafter, text[:1])
    before = drafter.lm.work.tokens
    for end in range(1, len(text) + 1):
        said = root_of(drafter, text[:end]).values
        fresh = drafter_of(target, own, len(target))
        begin(fresh, text[:end])
        assert torch.allclose(said, root_of(fresh, text[:end]).values, atol=1e-9)
        assert drafter.lm.length == fresh.lm.length == end
    assert drafter.lm.work.tokens - before == len(text), "no row is run twice"


LETTERS = "abcdefgh"
TWO = [a + b for a in LETTERS for b in LETTERS]
SETS = {"target": [*LETTERS, *TWO[:53]], "draft": [*reversed(TWO[11:]), *LETTERS]}
SETS["strange"] = [*"uvwxyz", *(a + b for a in "uvwxyz" for b in "uvwxyz")]
"""Tokens of one letter and of two; the draft model lacks some of the target's, and has others."""


def unlike(target=None):
    """A draft model of as many tokens as the target has; most of the ids mean others."""
    own, theirs = (byte_level(*SETS[name], marks=()) for name in NAMES)
    return drafter_of(own, theirs, VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and draft models of random weights."""
    root = tmp_path_factory.mktemp("pair")
    for seed, (name, tokens) in enumerate(SETS.items()):
        build(model(len(tokens) + 1, seed).config, seed).save_pretrained(root / name)
        byte_level(*tokens).save_pretrained(root / name)
    return root


POLICY = OptTree(9, 0.0, 4)


@pytest.mark.slow
def test_a_pair_of_unlike_tokenizers_loads_by_lm_and_keeps_the_text(folder):
    pair = load_pair(f"{folder}/target", f"lm:{folder}/draft", **FP64)
    assert isinstance(pair.drafter, OtherVocabulary) and assistant_of(pair.drafter) is None
    said = pair.drafter.describe()
    assert said.endswith("float64, 51 tokens of 62, of another tokenizer (83% of a text's tokens, 86% of what it says)")
    plain = Decoder(CausalLM(pair.target.model), None, Static.empty())
    drafted, prompts = set(), [prompt(length, seed, 62) for seed, length in enumerate((1, 9, 20))]
    for verifier, policy, sampling in (
        (greedy, POLICY, Sampling()),
        (match, POLICY, Sampling(1.0)),
        (multi_round, Sampled.kary(2, 3), Sampling(1.0)),
    ):
        decoder = Decoder(pair.target, pair.drafter, policy, verifier)
        for seed, text in enumerate(prompts):
            found = decoder.generate(text, 10, sampling=sampling, seed=seed, stop=None)
            drafted |= {token for step in found.steps for token in step.tree.tokens[1:].tolist()}
            if verifier is not multi_round:
                assert found.tokens == plain.generate(text, 10, sampling=sampling, seed=seed, stop=None).tokens
    assert drafted <= {*pair.drafter.tokens.tolist()} and len(drafted) > 10


def test_too_little_in_common_is_one_line(folder):
    with pytest.raises(
        CheckpointError, match=r"strange cannot draft for .*target: its tokenizer is another one"
    ) as error:
        load_pair(f"{folder}/target", f"lm:{folder}/strange", **FP64)
    assert "\n" not in str(error.value)


def test_it_drafts_as_far_as_its_own_ids_reach():
    """A token of the target may be several of its own: positions are counted in those."""
    target, own = byte_level("h", "e", "l", "o", "he", "hel", "hell", "hello"), byte_level(*"helo")
    drafter = drafter_of(target, own, len(target))
    begin(drafter, [7] * 40)
    assert drafter.room(40) == drafter.max_context - 200


def test_a_draft_vocabulary_of_its_own_limits_it_further():
    common = CommonTokens(OURS, byte_level(*OVERLAPS[5], marks=()), *NAMES)
    drafter = OtherVocabulary(CausalLM(build(model(5).config, 1)), common, 6, torch.tensor([0, 2]))
    begin(drafter, [0, 1])
    assert root_of(drafter, [0, 1]).tokens.tolist() == [2, 4]
