"""Trees through layers with a state: every row as if its path were the text, whatever was drafted beside it."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from accelerate.hooks import ModelHook
from sweep_architectures import VOCAB, built, noisy
from tiny_models import causal_logits, prompt, random_tree
from transformers import DynamicCache

from opt_tree import (
    Buckets,
    CausalLM,
    Decoder,
    NotCanonicalError,
    OptTree,
    Sampling,
    Static,
    UnsupportedModelError,
    custom_generate,
    generate_batch,
    make_canonical,
)
from opt_tree.backends import delta_net, recurrent
from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_layers import recurrent_forwards, recurrent_layers
from opt_tree.backends.recurrent_rows import last_ancestors
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.models.capabilities import cache_name
from opt_tree.models.chain_lm import ChainLM, wrap
from opt_tree.models.compiling import compile_forwards
from opt_tree.target import causal

TYPES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
LENGTH, NEW_TOKENS = 29, 14


@functools.cache
def model_of(name):
    return built(name)


@functools.cache
def target(name):
    return wrap(model_of(name))


@functools.cache
def drafter(name):
    return model_drafter(wrap(noisy(model_of(name))))


def generate(name, ids, new_tokens=NEW_TOKENS, **options):
    ids = torch.tensor([ids])
    return model_of(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        **options,
    )


def rule_along(path, state, q, k, v, g, beta):
    """The gated delta rule as it is defined, a row after the other: what the last one reads, and the state."""
    for row in path:
        state = state * g[row].exp()[:, None, None]
        update = beta[row][:, None] * (v[row] - (state * k[row][..., None]).sum(1))
        state = state + k[row][..., None] * update[:, None]
    return (state * q[path[-1]][..., None]).sum(1) * q.shape[-1] ** -0.5, state


def test_the_rule_along_every_path_in_float64():
    """A prefill, trees in one forward and layer by layer, paths committed: against the definition."""
    random = torch.Generator().manual_seed(3)
    heads, size, wide = 4, 6, 5
    cache, state = RecurrentCache([], {0: 3}), torch.zeros(heads, size, wide, dtype=torch.float64)

    def rows(count):
        shapes = (2, size), (2, size), (heads, wide), (heads,), (heads,)
        q, k, v, g, beta = (torch.randn(count, *shape, generator=random).double() for shape in shapes)
        return q, k / k.norm(dim=-1, keepdim=True), v, -g.abs(), beta.sigmoid()

    def follow(new, visible):
        cache.see(visible, torch.device("cpu"))
        cache.convolve(0, torch.zeros(1, 2, len(visible), dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
        cache.pending += len(visible)
        return delta_net.follow(cache, 0, *(part[None] for part in new))[0][0]

    for seed, splits in enumerate(([9], [2, 3, 4], [1, 8])):
        tree = random_tree(9, seed, root=0)
        whole = rows(9)
        q, k = (part.repeat_interleave(2, 1) for part in whole[:2])
        start, found = 0, []
        for count in splits:
            end = start + count
            found.append(follow([part[start:end] for part in whole], tree.ancestors[start:end, :end]))
            start = end
        for row, out in enumerate(torch.cat(found)):
            expected, _ = rule_along(tree.path_to(row), state, q, k, *whole[2:])
            assert (out - expected).abs().max() < 1e-13
        kept = tree.path_to(7).tolist()
        _, state = rule_along(kept, state, q, k, *whole[2:])
        cache.commit(kept)
        assert (cache._layers[0].state - state).abs().max() < 1e-13


def test_no_row_outlives_its_tree():
    """Pending rows are dropped where others are the first, where a path is committed and where they are forgotten."""
    cache = RecurrentCache([], {0: 3})

    def run(count):
        cache.see(causal(count), torch.device("cpu"))
        cache.convolve(0, torch.zeros(1, 2, count), torch.zeros(2, 3))
        delta_net.follow(cache, 0, *torch.zeros(3, 1, count, 1, 2), *torch.zeros(2, 1, count, 1))
        cache.pending = count
        held = cache._layers[0]
        return held.inputs.shape[1], held.rows.keys.shape[1], held.rows.updates.shape[1]

    for drop in (lambda: cache.commit([0, 2]), lambda: cache.commit([]), lambda: cache.truncate(2), cache.reset):
        assert run(3) == (3,) * 3 and run(4) == (4,) * 3
        drop()
        assert cache._layers[0].inputs is None and cache._layers[0].rows is None


def test_where_the_last_ancestors_lie():
    for seed in range(20):
        tree = random_tree(11, seed, root=0)
        found = last_ancestors(tree.ancestors, 4)
        for row in range(11):
            path = [*range(3), *(3 + tree.path_to(row))]  # three of the context, then the path
            assert found[row].tolist() == path[-4:]


@pytest.mark.quick("olmo_hybrid")
@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_tree_are_plain_rows_whatever_was_kept_before(name):
    """transformers computes the rule, and norms behind it, in float32: two forms agree to that rounding."""
    lm, context, chains = target(name), prompt(LENGTH, vocab=VOCAB), CausalLM(model_of(name), probe=False)
    assert isinstance(lm, CausalLM) and lm.recurrent
    lm.reset()
    lm.append(context)
    for seed in range(2):
        tree = random_tree(9, seed, root=seed + 1, vocab=VOCAB)
        for _ in range(2):  # scored and dropped, scored again
            logits = lm.score(tree).logits.clone()
        for row in range(len(tree)):
            text = [*context, *tree.tokens[tree.path_to(row)].tolist()]
            assert (logits[row] - causal_logits(lm.model, text)[-1]).abs().max() < 2e-4
            chains.reset()
            assert (logits[row] - chains.append(text).logits[-1]).abs().max() < 5e-6
        kept = tree.path_to(len(tree) - 1)[: 2 + seed % 2]
        lm.commit(kept.tolist())
        context = [*context, *tree.tokens[kept].tolist()]


@pytest.mark.quick("olmo_hybrid")
@pytest.mark.parametrize("name", TYPES)
def test_texts_are_those_of_transformers(name):
    ids = prompt(LENGTH, vocab=VOCAB - 1)
    expected = generate(name, ids)[0, LENGTH:].tolist()
    assert isinstance(drafter(name), CausalLMDrafter) and drafter(name).lm.recurrent
    for policy in (Static.chain(3), OptTree(12, 0.0, 4)):
        decoder = Decoder(target(name), drafter(name), policy)
        result = decoder.generate(ids, NEW_TOKENS)
        assert result.tokens == expected
        assert sum(step.accepted for step in result.steps) > 3, "the drafter should sometimes be right"
        assert generate(name, ids, custom_generate=custom_generate(decoder))[0, LENGTH:].tolist() == expected
        assert generate_batch(decoder, [ids, ids[:9]], max_new_tokens=NEW_TOKENS)[0].tokens == expected
    assert Decoder(target(name), None, Static.empty()).generate(ids, NEW_TOKENS).tokens == expected


@pytest.mark.slow
def test_a_seed_gives_one_text_and_turns_go_on():
    lm, sampling, ids = target("qwen3_next"), Sampling(0.8, top_p=0.9), prompt(LENGTH, vocab=VOCAB)
    plain = Decoder(lm, None, Static.empty())
    decoder = Decoder(lm, drafter("qwen3_next"), OptTree(12, 0.0, 4))
    first = decoder.generate(ids, NEW_TOKENS, sampling, seed=3)
    assert first.tokens == plain.generate(ids, NEW_TOKENS, sampling, seed=3).tokens
    longer = [*ids, *first.tokens, 5, 6]
    expected = plain.generate(longer, NEW_TOKENS).tokens
    decoder.generate(ids, NEW_TOKENS, sampling, seed=3)
    again = decoder.generate(longer, NEW_TOKENS, reuse=True)
    assert again.reused and again.tokens == expected
    other = [*ids[:-4], 7, 8]  # the state is past these: the prompt is taken in anew
    again = decoder.generate(other, NEW_TOKENS, reuse=True)
    assert not again.reused and again.tokens == plain.generate(other, NEW_TOKENS).tokens


def test_a_copy_goes_on_from_the_same_state():
    lm, context = CausalLM(model_of("qwen3_next"), probe=False), prompt(LENGTH, vocab=VOCAB)
    lm.append(context)
    tree = random_tree(7, 0, root=1, vocab=VOCAB)
    expected = lm.score(tree).logits.clone()
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert torch.equal(twin.score(tree).logits, expected)


@pytest.mark.slow
def test_others_have_the_layers_themselves():
    """Another thread's forwards, and transformers' own caches, meanwhile and afterwards."""
    model, ids = model_of("qwen3_next"), prompt(LENGTH, vocab=VOCAB)
    expected, texts = causal_logits(model, ids), generate("qwen3_next", ids)
    found = []
    with recurrent_forwards(recurrent_layers(model)), recurrent_forwards(recurrent_layers(model)):
        assert torch.equal(causal_logits(model, ids), expected)
        assert torch.equal(generate("qwen3_next", ids), texts)
        thread = threading.Thread(target=lambda: found.append(causal_logits(model, ids)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_layer_that_was_given_another_forward_is_not_passed_by():
    model = copy.deepcopy(model_of("qwen3_next"))
    lm, layer = CausalLM(model), next(iter(recurrent_layers(model).values()))
    layer.forward = functools.partial(type(layer).forward, layer)
    with pytest.raises(RuntimeError, match="another forward since it was wrapped"):
        Decoder(lm, None, Static.empty()).generate([1, 2, 3], 2)


def test_what_a_state_cannot_do_is_refused_by_name(kernel):
    model, lm, ids = model_of("qwen3_next"), target("qwen3_next"), prompt(LENGTH, vocab=VOCAB)
    with pytest.warns(UserWarning, match="not compiled: it has layers with a running state"):
        assert not compile_forwards(lm)
    with pytest.raises(UnsupportedModelError, match="a running state, which score a tree as it is"):
        lm.buckets = Buckets()
    decoder = Decoder(lm, NGramDrafter(), Static.chain(3))
    with pytest.raises(ValueError, match="goes on from the state of its layers"):
        generate(
            "qwen3_next",
            ids,
            custom_generate=custom_generate(decoder),
            past_key_values=DynamicCache(config=model.config),
        )
    lm.append(ids)
    with pytest.raises(ValueError, match="the state behind 29 tokens cannot be taken back to 20"):
        lm.cut(20)
    lm.reset()
    with pytest.raises(NotCanonicalError, match="layers ask transformers' interface"):
        make_canonical(CausalLM(built("qwen3_next").bfloat16()))


def test_the_returned_cache_goes_on():
    """`return_dict_in_generate` has a cache of transformers' own, states included."""
    model, ids = model_of("qwen3_next"), prompt(LENGTH, vocab=VOCAB)
    decoder = Decoder(target("qwen3_next"), NGramDrafter(), Static.chain(3))
    found = generate("qwen3_next", ids, custom_generate=custom_generate(decoder), return_dict_in_generate=True)
    whole = found.sequences[0].tolist()
    assert found.past_key_values.get_seq_length() == len(whole) - 1
    with torch.no_grad():
        logits = model(torch.tensor([whole[-1:]]), **{cache_name(model): found.past_key_values}).logits[0, -1]
    assert (logits - causal_logits(model, whole)[-1]).abs().max() < 2e-4


@pytest.mark.slow
def test_where_accelerate_moves_the_weights_paths_are_scored():
    model = copy.deepcopy(model_of("qwen3_next"))
    next(iter(recurrent_layers(model).values())).conv1d._hf_hook = ModelHook()
    assert not recurrent_layers(model)
    with pytest.warns(UserWarning, match="path by path"):
        assert isinstance(wrap(model), ChainLM)


@pytest.mark.quick("3")
@pytest.mark.parametrize("ends", [1, 2, 3])
def test_an_interruption_leaves_no_layer_ahead_of_another(ends, monkeypatch):
    """Ctrl-C in the middle of a commit: the next text goes on from a state of the whole context, or from none."""
    name, text = "qwen3_next", prompt(9, vocab=VOCAB)
    decoder = Decoder(CausalLM(model_of(name)), drafter(name), OptTree(6, 0.0, 3))
    text += [*decoder.generate(text, 4).tokens, *prompt(3, seed=5, vocab=VOCAB)]
    calls, own = [], recurrent._committed

    def interrupted(*given):
        calls.append(given)
        if len(calls) == ends:
            raise KeyboardInterrupt
        return own(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(recurrent, "_committed", interrupted)
        decoder.generate(text, 9, reuse=True)
    again = decoder.generate(text, 9, reuse=True)
    assert again.reused > 0 or ends > 2, "nothing was committed"
    assert again.tokens == generate(name, text, 9)[0, len(text) :].tolist()
