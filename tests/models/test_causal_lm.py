"""The wrapper around a model: padding is exact, prefill may be cut, outputs live until the next forward."""

import copy

import numpy as np
import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    HIDDEN,
    TOLERANCE,
    VOCAB,
    build,
    causal_logits,
    padded_to,
    prompt,
    random_tree,
    tiny,
)

from opt_tree import model as lm_module
from opt_tree.backends.device_clock import DeviceMeter
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.target import Work
from opt_tree.tree import Tree

SMALL = Buckets(rows=(1, 8, 32), keys=(16, 32, 64))


def grouped(kv_heads: int) -> torch.nn.Module:
    """A tiny Llama whose four query heads share 1, 2 or 4 key/value heads."""
    config = ARCHITECTURES["llama"]()
    config.num_key_value_heads = kv_heads
    return build(config)


def scored(lm: CausalLM, context: list[int], tree: Tree) -> torch.Tensor:
    lm.reset()
    lm.append(context)
    return lm.score(tree).logits.clone()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_padding_is_exact_whatever_lies_in_unused_slots(kv_heads):
    """Stale rows of an earlier, longer text as well."""
    model = grouped(kv_heads)
    exact, padded = CausalLM(model), padded_to(SMALL, CausalLM(model))
    padded.cache.reserve(100)
    with torch.inference_mode():
        for storage in padded.cache._groups:
            storage.fill_(1e3)
    for rows, length in [(1, 5), (6, 20), (3, 60), (9, 20), (20, 40)]:
        tree, context = random_tree(rows, seed=rows, root=4), prompt(length)
        assert (scored(exact, context, tree) - scored(padded, context, tree)).abs().max() < 1e-12


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_every_bucket_boundary_is_exact(architecture):
    """One more or one less than each bucket of rows and keys, larger than the largest of both included."""
    exact, padded = CausalLM(tiny(architecture)), padded_to(SMALL, CausalLM(tiny(architecture)))
    for rows in (1, 2, 8, 9, 32, 33):
        for keys in (16, 17, 32, 33, 64, 65):
            if keys <= rows:
                continue
            tree, context = random_tree(rows, seed=rows, root=4), prompt(keys - rows)
            difference = (scored(exact, context, tree) - scored(padded, context, tree)).abs().max()
            assert difference < 1e-12, f"{rows} rows, {keys} keys"


def test_buckets_pad_to_the_next_size():
    buckets = Buckets(rows=(1, 8), keys=(16, 32))
    assert buckets.pad(1, 0) == (1, 16)
    assert buckets.pad(2, 8) == (8, 16)
    assert buckets.pad(8, 9) == (8, 32), "keys are counted with the padded rows"
    assert buckets.pad(9, 0) == (9, 16), "more rows than any bucket keep their number"
    assert buckets.pad(1, 32) == (1, 64), "past the last bucket keys double"
    assert buckets.pad(100, 100) == (100, 256)


def test_the_model_sees_bucket_shapes_only(monkeypatch):
    lm = padded_to(SMALL, CausalLM(tiny("llama")))
    shapes = set()
    forward = lm.model.forward

    def watched(input_ids, attention_mask, **options):
        shapes.add((input_ids.shape[1], tuple(attention_mask.shape)))
        return forward(input_ids=input_ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(lm.model, "forward", watched)
    for rows in (1, 2, 5, 9, 30):
        scored(lm, prompt(21), random_tree(rows, seed=rows, root=4))
    assert {rows for rows, _ in shapes} == {1, 8, 32}
    assert {mask[-1] for _, mask in shapes} == {32, 64}
    assert all(mask[:3] == (1, 1, rows) for rows, mask in shapes)


@pytest.mark.quick("llama-exact", "mistral-padded")
@pytest.mark.parametrize("buckets", [None, SMALL], ids=["exact", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_a_prefill_in_pieces_is_a_prefill_in_one(architecture, buckets, monkeypatch):
    context, tree = prompt(50), random_tree(7, seed=1, root=4)
    lm = padded_to(buckets, CausalLM(tiny(architecture)))
    lm.watch((-1,))
    whole = lm.append(context)
    logits, features, after = whole.logits.clone(), whole.features[-1].clone(), lm.score(tree).logits.clone()
    assert (logits[0] - causal_logits(lm.model, context)[-1]).abs().max() < 1e-9
    for size in (1, 7, 25):
        monkeypatch.setattr(lm_module, "PREFILL", size)
        lm.reset()
        cut = lm.append(context)
        assert cut.logits.shape == (1, VOCAB) and cut.features[-1].shape == (50, HIDDEN)
        assert (cut.logits - logits).abs().max() < 1e-9
        assert (cut.features[-1] - features).abs().max() < 1e-9
        assert (lm.score(tree).logits - after).abs().max() < 1e-9


def test_a_context_of_one_token_and_of_none():
    lm = CausalLM(tiny("llama"))
    tree = random_tree(5, seed=2, root=7)
    without = lm.score(tree).logits
    for row in range(5):
        expected = causal_logits(lm.model, tree.tokens[tree.path_to(row)].tolist())[-1]
        assert (without[row] - expected).abs().max() < 1e-9
    lm.reset()
    assert (lm.append([7]).logits[0] - causal_logits(lm.model, [7])[-1]).abs().max() < 1e-9
    with pytest.raises(ValueError, match="empty"):
        lm.append([])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt2", "opt", "gpt-neox", "mixtral"])
def test_features_are_the_final_hidden_states_behind_the_last_norm(architecture):
    """The reference is another object of the same weights: the hook must not see its forwards."""
    reference, context = tiny(architecture), prompt(20)
    lm = CausalLM(build(ARCHITECTURES[architecture]()))
    lm.watch((-1,))
    with torch.no_grad():
        expected = reference.base_model(torch.tensor([context]), use_cache=False).last_hidden_state[0]
        logits = reference.get_output_embeddings()(expected)
    if cap := getattr(reference.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    assert (logits - causal_logits(reference, context)).abs().max() < 1e-9, "what the head is applied to"
    assert (lm.append(context).features[-1] - expected).abs().max() < TOLERANCE[architecture]
    tree = random_tree(6, seed=0, root=1)
    features = lm.score(tree).features[-1]
    assert features.shape == (6, HIDDEN)
    for row in range(6):
        path = torch.tensor([[*context, *tree.tokens[tree.path_to(row)].tolist()]])
        with torch.no_grad():
            expected = reference.base_model(path, use_cache=False).last_hidden_state[0, -1]
        assert (features[row] - expected).abs().max() < TOLERANCE[architecture]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt", "gpt-neox", "mixtral"])
def test_features_of_a_layer_are_what_it_puts_out(architecture):
    lm, context = CausalLM(tiny(architecture)), prompt(20)
    layers = tuple(range(lm.model.config.num_hidden_layers - 1))  # transformers norms what the last one puts out
    with torch.no_grad():
        # A copy: transformers hooks into what it asks for hidden states.
        states = copy.deepcopy(lm.model)(
            torch.tensor([context]), use_cache=False, output_hidden_states=True
        ).hidden_states
    lm.watch(layers)
    lm.watch((-1,))
    features = lm.append(context).features
    assert sorted(features) == [-1, *layers]
    for layer in layers:
        assert (features[layer] - states[layer + 1][0]).abs().max() < TOLERANCE[architecture]
    assert (features[-1] - states[-1][0]).abs().max() < TOLERANCE[architecture]
    assert lm.score(random_tree(6, seed=0, root=1)).features[0].shape == (6, HIDDEN)


def test_a_layer_that_is_not_there_is_refused():
    lm = CausalLM(tiny("llama"))
    for layer in (2, -2):
        with pytest.raises(ValueError, match=f"no layer {layer} to read hidden states of; it has 2 layers"):
            lm.watch((layer,))
    assert not lm.append(prompt(4)).features


def test_a_decoder_called_past_the_hook_is_noticed(monkeypatch):
    """Should a release do so, there is an error rather than no features, or those of an earlier forward."""
    lm = CausalLM(tiny("llama"))
    lm.watch((-1,))
    assert lm.append(prompt(4)).features
    monkeypatch.setattr("opt_tree.backends.hidden_states.watched_module", lambda model, layer: torch.nn.Identity())
    with pytest.raises(RuntimeError, match=r"did not run the layers whose features are read: \[-1\]"):
        lm.append(prompt(4))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_hidden_states_are_read_of_every_architecture(architecture):
    """Llama 4 answers `get_decoder()` with the language model: what that returns are logits."""
    model = tiny(architecture)
    lm, caught = CausalLM(model), []
    lm.watch((-1,))
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, rows: caught.append(rows[0]))
    features = lm.append(prompt(4), all_logits=True).features[-1]
    hook.remove()
    assert features.shape == (4, HIDDEN) and torch.allclose(features, caught[-1].view(4, HIDDEN))


def test_what_is_no_hidden_state_is_refused(monkeypatch):
    """Should a decoder return something else, nothing is drafted from it."""
    lm = CausalLM(tiny("llama"))
    lm.watch((-1,))
    monkeypatch.setattr("opt_tree.backends.hidden_states._decoder", lambda model: model.lm_head)
    refusal = rf"LlamaForCausalLM, layer -1, cannot be read: they are {HIDDEN} wide, and what Linear returns is \[1, "
    with pytest.raises(UnsupportedModelError, match=refusal):
        lm.append(prompt(4))


def test_watching_is_a_wrappers_own_and_leaves_nothing_on_the_model():
    model = build(ARCHITECTURES["llama"]())
    lm, other = CausalLM(model), CausalLM(model, probe=False)
    assert not lm.append(prompt(4)).features
    lm.watch((-1,))
    assert lm.append(prompt(4)).features and not other.append(prompt(4)).features
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("buckets", [None, SMALL], ids=["exact", "padded"])
@pytest.mark.parametrize("rows", [512, 7])
def test_the_logits_of_a_whole_prompt(buckets, rows, monkeypatch):
    monkeypatch.setattr(lm_module, "PREFILL", rows)
    lm, context = padded_to(buckets, CausalLM(tiny("llama"))), prompt(20)
    logits = lm.append(context, all_logits=True).logits
    assert logits.shape == (20, VOCAB) and (logits - causal_logits(lm.model, context)).abs().max() < 1e-9


@pytest.mark.parametrize("buckets", [None, SMALL], ids=["exact", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_rows_added_layer_by_layer_equal_a_tree_scored_at_once(architecture, buckets):
    """What a drafter does: each call adds one layer behind pending rows that it sees through `visible`."""
    lm, context = padded_to(buckets, CausalLM(tiny(architecture))), prompt(30)
    tree = random_tree(12, seed=3, root=4)
    order = np.argsort(tree.depths, kind="stable")
    tree = Tree(
        tree.tokens[order], np.array([-1, *np.argsort(order)[tree.parents[order][1:]]]), np.zeros(12), np.full(12, -1)
    )
    expected = scored(lm, context, tree)
    lm.reset()
    lm.append(context)
    done = 0
    for depth in range(tree.depths.max() + 1):
        rows = (tree.depths == depth).nonzero()[0]
        done += len(rows)
        output = lm.extend(tree.tokens[rows], lm.length + tree.depths[rows], tree.ancestors[rows][:, :done])
        assert (output.logits - expected[rows]).abs().max() < 1e-9
    assert lm.cache.pending == 12


def test_forwards_and_their_seconds_are_counted():
    lm = CausalLM(tiny("llama"))
    assert lm.work == Work()
    lm.append(prompt(10))
    before = lm.work
    assert (before.forwards, before.tokens) == (1, 10) and before.seconds > 0
    lm.score(random_tree(4, seed=0, root=1))
    lm.extend(np.array([3]), np.array([12]), np.ones((1, 5), dtype=bool))
    more = lm.work - before
    assert (more.forwards, more.tokens) == (2, 5) and more.seconds > 0


def test_on_cuda_a_forward_s_seconds_are_the_device_s_read_when_asked(monkeypatch):
    waited = []

    class Moment:
        """An event of a device that takes two seconds from each to the next."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.on = stream

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            assert self.on == end.on == "the device's" and waited[-1] is end, "it may not be there yet"
            return 2000.0

    lm = CausalLM(tiny("llama"))
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the device's")
    lm.backend.meter = DeviceMeter(torch.device("cuda"))
    lm.append(prompt(10))
    lm.score(random_tree(4, seed=0, root=1))
    assert not waited, "nobody has asked"
    assert copy.deepcopy(lm).work == lm.work == Work(2, 14, 4.0)
    assert len(waited) == 2, "each is read once"


def test_only_the_last_logits_of_a_prefill_are_computed():
    """A 128k vocabulary times a long prompt is gigabytes that nobody reads."""
    lm = CausalLM(tiny("llama"))
    heads = []
    handle = lm.model.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(output.shape[1]))
    lm.append(prompt(20))
    lm.score(random_tree(4, seed=0, root=1))
    handle.remove()
    assert heads == [1, 4]
