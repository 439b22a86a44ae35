"""Models that cannot hold a tree, path by path, in float64: logits of plain forwards, texts of `model.generate`."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook
from sweep_architectures import SPECIAL, VOCAB, built, noisy
from tiny_models import build, causal_logits, prompt, random_tree, tiny_tokenizer

from opt_tree import Decoder, OptTree, Sampling, Static, UnsupportedModelError, custom_generate, load_pair
from opt_tree.backends.batch.shared_forwards import why_alone
from opt_tree.methods.drafters.small_models.chain_lm import ChainLMDrafter, model_drafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM, wrap
from opt_tree.models.compiling import compile_forwards

TYPES = ["kimi_linear", "zaya", "lfm2", "bloom", "deepseek_v32"]
"""Running states of several kinds, ALiBi, keys chosen by an index; sweep_architectures.py has all."""
LENGTH, NEW_TOKENS = 29, 14


@functools.cache
def model_of(name):
    return built(name)


@functools.cache
def target(name):
    with pytest.warns(UserWarning, match="path by path"):
        return wrap(model_of(name))


@functools.cache
def drafter(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_drafter(wrap(noisy(model_of(name))))


def generated(model, ids, new_tokens=NEW_TOKENS):
    ids = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.quick("lfm2", "bloom")
@pytest.mark.parametrize("name", TYPES)
def test_trees_are_the_text_of_transformers(name):
    assert isinstance(target(name), ChainLM)
    ids = prompt(LENGTH, vocab=VOCAB - 1)
    expected = generated(model_of(name), ids)
    result = Decoder(target(name), drafter(name), OptTree(8, 0.0, 4)).generate(ids, NEW_TOKENS)
    assert result.tokens == expected
    assert sum(step.accepted for step in result.steps) > 3, "the drafter should sometimes be right"
    assert Decoder(target(name), None, Static.empty()).generate(ids, NEW_TOKENS).tokens == expected


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize(("name", "close"), [("lfm2", 1e-9), ("deepseek_v4", 1e-5)], ids=["lfm2", "deepseek_v4"])
def test_rows_of_any_tree_are_plain_rows_whatever_was_kept_before(name, close):
    """DeepSeek V4 computes some of its layers in float32, whose kernels depend on the CPU."""
    lm, context = target(name), prompt(LENGTH, vocab=VOCAB)
    lm.reset()
    lm.append(context)
    for seed in range(4):  # short paths are kept again and again: the cache falls behind and catches up
        tree = random_tree(7, seed, root=seed + 1, vocab=VOCAB)
        for _ in range(2):  # scored and dropped, scored again
            logits = lm.score(tree).logits
        for leaf in set(range(7)) - set(tree.parents.tolist()):
            path = tree.path_to(leaf)
            expected = causal_logits(lm.model, [*context, *tree.tokens[path].tolist()])[len(context) :]
            assert (logits[path] - expected).abs().max() < close
        kept = tree.path_to(len(tree) - 1)[: 2 + seed % 2]
        lm.commit(kept.tolist())
        context = [*context, *tree.tokens[kept].tolist()]
        assert lm.length == len(context)


def test_the_forwards_are_those_of_any_decoder_and_little_is_computed_twice():
    """One forward a step; accepted tokens of a rejected path are rows of a later one."""
    lm = target("lfm2")
    begin = lm.work
    result = Decoder(lm, drafter("lfm2"), Static.chain(4)).generate(prompt(LENGTH, vocab=VOCAB), NEW_TOKENS)
    work = lm.work - begin
    assert work.forwards - 1 <= 1.3 * len(result.steps)
    assert work.tokens - (LENGTH - 1) <= 16 * len(result.steps) + sum(len(step.tree) for step in result.steps)


def test_sampled_trees_with_equal_siblings_are_drafted_and_judged():
    """Equal draws are one row to the drafter."""
    decoder = Decoder(target("lfm2"), drafter("lfm2"), Sampled.chains(3, 4), traversal)
    result = decoder.generate(prompt(LENGTH, vocab=VOCAB), 12, Sampling(1.0))
    assert len(result.tokens) == 12 and any(step.accepted for step in result.steps)


@pytest.mark.slow
def test_a_prompt_of_several_prefill_chunks_and_one_of_a_single_token(monkeypatch):
    monkeypatch.setattr("opt_tree.models.chain_lm._PREFILL_ROWS", 16)
    model = model_of("lfm2")
    for length in (1, 45):
        ids = prompt(length, vocab=VOCAB)
        decoder = Decoder(ChainLM(model), NGramDrafter(), Static.chain(3))
        with torch.no_grad():
            assert decoder.generate(ids, 6).tokens == generated(model, ids, 6)


@pytest.mark.slow
def test_the_drafter_answers_what_plain_forwards_answer():
    """A tree of it is the tree of a drafter without any cache."""
    small = noisy(model_of("zaya"))
    ids = prompt(LENGTH, vocab=VOCAB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft = model_drafter(wrap(small))
    assert isinstance(draft, ChainLMDrafter)
    for step in Decoder(target("zaya"), draft, OptTree(8, 0.0, 4)).steps(ids, 7):
        tree = step.tree
        for row in range(1, len(tree)):
            path = tree.path_to(row)
            context = [*ids, *tree.tokens[path[1:-1]].tolist()]
            log_probs = causal_logits(small, context)[-1].log_softmax(-1)
            gained = tree.path_log_probs[row] - tree.path_log_probs[path[-2]]
            assert abs(log_probs[tree.tokens[row]].item() - gained) < 1e-5  # some rotate in float32
        ids = [*ids, *step.tokens]


def test_the_door_and_what_it_returns():
    model, ids = model_of("lfm2"), torch.tensor([prompt(LENGTH, vocab=VOCAB)])
    mask, decoder = torch.ones_like(ids), Decoder(target("lfm2"), drafter("lfm2"), Static.chain(4))
    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    expected = model.generate(ids, **options)
    found = model.generate(ids, custom_generate=custom_generate(decoder), return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, expected)
    more = torch.cat([found.sequences, ids[:, :3]], 1)
    longer = options | {"attention_mask": torch.ones_like(more)}
    from_cache = model.generate(more, past_key_values=found.past_key_values, **longer)
    assert torch.equal(from_cache, model.generate(more, **longer))
    with pytest.raises(ValueError, match="scored path by path from its own cache"):
        model.generate(
            ids, custom_generate=custom_generate(decoder), past_key_values=transformers.DynamicCache(), **options
        )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("jamba", "does not go on from its own cache by several tokens at once"),
        ("mamba", "does not go on from its own cache by several tokens at once"),
        ("minimax", "its own cache: it takes a cache class of its own only"),
        ("rwkv", "takes no transformers cache"),
    ],
)
def test_what_is_inexact_path_by_path_too_is_refused_with_both_reasons(name, reason):
    with pytest.raises(UnsupportedModelError, match=r"one running state.*nor path by path") as error:
        wrap(model_of(name))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_steps_that_are_limited_in_chunks_alone_are_refused():
    """Which holds where accelerate moves the weights of a layer about, so that its states follow no tree."""
    model = copy.deepcopy(model_of("zamba2"))
    next(part for part in model.modules() if hasattr(part, "conv1d")).conv1d._hf_hook = ModelHook()
    with pytest.raises(UnsupportedModelError, match=r"nor path by path: .* limits its time step \(0.001 to inf\)"):
        wrap(model)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_refused_however_little_its_later_tokens_weigh(seed, dtype):
    """With the weights a model begins with, a later token moves an earlier row by a thousandth of it."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for how in (ChainLM, CausalLM, wrap):
        with pytest.raises(UnsupportedModelError, match="its rows see later ones"):
            how(model)


INDEXED = ("deepseek_v32", "hy_v4", "deepseek_v4")
"""Types whose layers choose keys by an index."""


def indexed(name, seed, topk, monkeypatch):
    """Build one with few index heads: for many keys ReLU makes all of them 0, and any of these may be chosen."""
    few = {"index_head_dim": 8, "index_n_heads": 4, "index_topk": topk}
    monkeypatch.setitem(SPECIAL, name, SPECIAL.get(name, {}) | few)
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: manual_seed(seed))
    return built(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEXED)
def test_the_context_ends_where_an_index_leaves_keys_out(name, monkeypatch):
    end = 32
    model = indexed(name, 2, end // 4 if name == "deepseek_v4" else end, monkeypatch)  # its rows stand for 4 tokens
    with pytest.warns(UserWarning, match="path by path"):
        lm = wrap(model)
    assert lm.max_context == end
    decoder = Decoder(lm, NGramDrafter(), Static.chain(3))
    for length in (5, 17):
        ids = prompt(length, vocab=VOCAB)
        assert decoder.generate(ids, NEW_TOKENS).tokens == generated(model, ids)
    with pytest.raises(ValueError, match=f"no room in {end} of context .keys its index chooses"):
        decoder.generate(prompt(end, vocab=VOCAB), 4)


@pytest.mark.quick("0-deepseek_v32")
@pytest.mark.parametrize("name", INDEXED[:2])
@pytest.mark.parametrize("seed", range(4))
def test_longer_probes_see_that_an_index_chooses_otherwise_in_another_forward(name, seed, monkeypatch):
    """One text of 27 tokens let five of these eight pass; their texts were not those of `generate`."""
    model = indexed(name, seed, 8, monkeypatch)
    monkeypatch.setattr("opt_tree.models.chain_lm.context_limit", lambda model: (256, ""))
    with pytest.raises(UnsupportedModelError, match=r"does not go on from its own cache by (several|one) token"):
        ChainLM(model)


def test_the_probe_catches_what_goes_wrong_path_by_path(monkeypatch):
    """No cache at all; a state that hardly matters, of barely spread weights, and is lost; one that is not put back."""
    with pytest.raises(UnsupportedModelError, match="takes no key/value cache"):
        wrap(model_of("openai-gpt"))
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="does not go on from its own cache by several tokens"):
        ChainLM(build(config, dtype=torch.float32))
    monkeypatch.setattr("opt_tree.models.chain_lm.restore", lambda cache, state: None)
    with pytest.raises(UnsupportedModelError, match="does not go on from its own cache"):
        ChainLM(model_of("kimi_linear"))


@pytest.mark.slow
def test_a_hybrid_model_with_adapters_is_the_model_inside():
    """The wrapper's own signature names nothing."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(copy.deepcopy(model_of("lfm2")), config)
    with pytest.warns(UserWarning, match="path by path"):
        lm = wrap(adapted)
    ids = prompt(9, vocab=VOCAB)
    assert Decoder(lm, None, Static.empty()).generate(ids, 6).tokens == generated(model_of("lfm2"), ids, 6)


def test_a_model_that_can_hold_a_tree_is_wrapped_for_it_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(wrap(model_of("llama")), CausalLM)


@pytest.mark.slow
def test_the_probe_leaves_no_trace_and_tells_rounding_from_errors():
    for dtype in (torch.float32, torch.bfloat16):
        lm = ChainLM(copy.deepcopy(model_of("lfm2")).to(dtype))
        assert (lm.length, lm.work.forwards, lm.cache.get_seq_length()) == (0, 0, 0)


@pytest.mark.slow
def test_copies_decode_the_same_text_in_the_middle_of_a_generation():
    decoder, ids = Decoder(target("lfm2"), drafter("lfm2"), Static.chain(4)), prompt(LENGTH, vocab=VOCAB)
    expected = decoder.generate(ids, NEW_TOKENS).tokens
    next(decoder.steps(ids))
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert copied.generate(ids, NEW_TOKENS).tokens == expected


def test_what_it_cannot_do_is_one_line():
    lm = ChainLM(model_of("lfm2"), probe=False)
    with pytest.raises(ValueError, match="no scored tree"):
        lm.commit([0])
    with pytest.raises(ValueError, match="nothing to append"):
        lm.append([])
    with pytest.raises(ValueError, match="no hidden states to read"):
        lm.watch((-1,))
    lm.score(random_tree(1, 0, root=3))
    with pytest.raises(RuntimeError, match="scored and not committed"):
        lm.score(random_tree(1, 0, root=3))
    lm.reset()
    with pytest.warns(UserWarning, match="is not compiled: it keeps a cache of its own"):
        assert not compile_forwards(lm)
    assert "path by path" in why_alone([lm])


@pytest.mark.parametrize("sdpa", [True, False])
def test_an_attention_without_tree_masks_is_switched_in_one_line(sdpa, monkeypatch):
    model = copy.deepcopy(model_of("llama"))
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    monkeypatch.setattr(type(model), "_supports_sdpa", sdpa)
    other = "sdpa" if sdpa else "eager"
    with pytest.warns(UserWarning, match=f"'flash_attention_2' takes no tree mask; now '{other}'"):
        assert isinstance(wrap(model), CausalLM)
    ids = prompt(9, vocab=VOCAB)
    assert Decoder(wrap(model), None, Static.empty()).generate(ids, 6).tokens == generated(model_of("llama"), ids, 6)


@pytest.mark.slow
def test_a_pair_of_hybrid_models_loads_by_path(tmp_path):
    for part, model in (("target", model_of("lfm2")), ("draft", noisy(model_of("lfm2")))):
        model.save_pretrained(tmp_path / part)
        tiny_tokenizer().save_pretrained(tmp_path / part)
    with pytest.warns(UserWarning, match="path by path"):
        pair = load_pair(str(tmp_path / "target"), str(tmp_path / "draft"), dtype="float64")
    ids = prompt(9, vocab=VOCAB)
    text = Decoder(pair.target, pair.drafter, Static.chain(3)).generate(ids, 8).tokens
    assert text == generated(model_of("lfm2"), ids, 8)
