"""Every architecture the README names, in float64: trees against plain causal forwards, decoding against transformers.

And what cannot decode a tree exactly: refused when it is wrapped, in one line that says why.
"""

import functools

import numpy as np
import pytest
import torch
import transformers
from asking import refusal
from tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    TOLERANCE,
    VOCAB,
    WIDTH,
    WINDOW,
    build,
    causal_logits,
    padded_to,
    prompt,
    random_tree,
    tiny,
    tiny_drafter,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opt_tree.backend import cache_argument
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.policies.static import Static
from opt_tree.model import Model
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.policy import OptTree
from opt_tree.target import Work
from opt_tree.tree import Tree

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
LENGTH = WINDOW + 19
PROBED_EVERY_TIME = True
NEW_TOKENS = 24
POLICY = OptTree(nodes=12, threshold=0.1, max_depth=5)
BUCKETS = Buckets(rows=(1, 8, 32), keys=(64, 128))
# Padded forwards: one mask, one with a window, two kinds of layers, chunks.
PADDED = ("llama", "mistral", "gemma3", "llama4")
architectures_and_buckets = pytest.mark.parametrize(
    ("architecture", "buckets"), [*((name, None) for name in ARCHITECTURES), *((name, BUCKETS) for name in PADDED)]
)


@functools.cache
def target(architecture: str, buckets: Buckets | None = None) -> CausalLM:
    return padded_to(buckets, CausalLM(tiny(architecture)))


@functools.cache
def decoder(architecture: str, buckets: Buckets | None = None) -> Decoder:
    drafter = CausalLMDrafter(CausalLM(tiny_drafter(architecture)), VOCAB)
    return padded_to(buckets, Decoder(target(architecture, buckets), drafter, POLICY))


@functools.cache
def plain_tokens(architecture: str) -> list[int]:
    return Decoder(target(architecture), None, Static.empty()).generate(prompt(LENGTH), NEW_TOKENS).tokens


def assert_tree_is_causal(lm: CausalLM, context: list[int], tree: Tree, tolerance: float) -> None:
    """Compare the rows above every leaf of the scored tree with a plain forward over the context and their path."""
    logits = lm.score(tree).logits
    for leaf in set(range(len(tree))) - set(tree.parents.tolist()):
        path = tree.path_to(leaf)
        expected = causal_logits(lm.model, [*context, *tree.tokens[path].tolist()])[len(context) :]
        error = (logits[path] - expected).abs().max().item()
        assert error < tolerance, f"the path to row {leaf} of parents {tree.parents.tolist()}: {error}"


@pytest.mark.quick("llama-None", "gemma3-buckets16")
@architectures_and_buckets
def test_tree_logits_are_causal_logits(architecture, buckets):
    """Bushy trees, and a comb deeper than the window: there a row may not see the first rows of its own path."""
    lm, context = target(architecture, buckets), prompt(LENGTH)
    parents = np.array([-1, *(row // 2 * 2 for row in range(2 * (WINDOW + 3)))])
    trees = [random_tree(rows, seed, root=seed + 1) for seed, rows in enumerate((2, 7, 20))]
    trees.append(Tree(np.arange(len(parents)), parents, np.zeros(len(parents)), np.full(len(parents), -1)))
    for tree in trees:
        lm.reset()
        lm.append(context)
        assert_tree_is_causal(lm, context, tree, TOLERANCE[architecture])


@pytest.mark.quick("llama", "gemma3", "gpt2", "llama4")
@architectures
def test_decoding_goes_on_from_a_committed_branch(architecture):
    """A path whose rows are not neighbours is kept twice in a row; both times the rest equals a fresh prefill."""
    lm, context = target(architecture), prompt(LENGTH)
    lm.reset()
    lm.append(context)
    for step in range(2):
        tree = Tree(np.array([5, 6, 7, 8, 9, 10]) + step, np.array([-1, 0, 0, 1, 2, 4]), np.zeros(6), np.full(6, -1))
        lm.score(tree)
        lm.commit([0, 2, 4, 5])
        context = [*context, *tree.tokens[[0, 2, 4, 5]].tolist()]
        assert_tree_is_causal(lm, context, random_tree(9, step, root=3), TOLERANCE[architecture])
    fresh = CausalLM(lm.model, probe=False)
    fresh.append(context)
    for kept, new in zip(lm.cache._groups, fresh.cache._groups, strict=True):
        assert (kept[..., : lm.length, :] - new[..., : lm.length, :]).abs().max() < TOLERANCE[architecture]


@pytest.mark.quick("gpt2-None", "gemma3-buckets16")
@architectures_and_buckets
def test_greedy_text_is_plain_text_and_that_of_transformers(architecture, buckets):
    result = decoder(architecture, buckets).generate(prompt(LENGTH), NEW_TOKENS)
    assert sum(step.accepted for step in result.steps) > 5, "the drafter should sometimes be right"
    assert any(step.accepted < step.tree.depths.max() for step in result.steps), "and sometimes wrong"
    assert result.tokens == plain_tokens(architecture)
    ids = torch.tensor([prompt(LENGTH)])
    expected = tiny(architecture).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert result.tokens == expected[0, LENGTH:].tolist()


@pytest.mark.parametrize("spread", [0.02, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_rounding_is_not_taken_for_an_ignored_mask(dtype, spread):
    architectures = ["llama", "qwen3-window", "mistral", "gemma2", "gemma3", "gpt2", "opt"]
    for architecture in architectures if dtype == torch.bfloat16 else architectures[:1]:
        config = ARCHITECTURES[architecture]()
        setattr(config, "init_std" if architecture == "opt" else "initializer_range", spread)
        CausalLM(build(config, dtype=dtype))


_SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "bloom": (lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
    "falcon-alibi": (lambda: transformers.FalconConfig(alibi=True, **_SMALL), "ALiBi"),
    "mpt": (lambda: transformers.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4), "ALiBi"),
    "gpt-neo": (
        lambda: transformers.GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        ),
        "local",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        "linear_attention: one running state",
    ),
    "rwkv": (
        lambda: transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        "is recurrent: one running state",
    ),
    "xlnet": (
        lambda: transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48),
        "keeps its past in a form of its own",
    ),
    "roberta": (
        lambda: transformers.RobertaConfig(is_decoder=True, pad_token_id=1, **_SMALL),
        "does not count positions from 0",
    ),
    "bert": (lambda: transformers.BertConfig(is_decoder=False, **_SMALL), "it is no decoder"),
    "bart": (
        lambda: transformers.BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            is_encoder_decoder=False,
            is_decoder=True,
        ),
        "position_ids change nothing: it numbers the rows by itself",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=32, num_layers=1, num_heads=2, d_kv=8, d_ff=32),
        "encoder-decoder",
    ),
}


def refused(model: object) -> str:
    """Why a model is refused: one line that names it."""
    message = refusal(UnsupportedModelError, CausalLM, model)
    assert type(model).__name__ in message
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_hold_a_tree_is_refused_by_name(name):
    config, reason = REFUSED[name]
    torch.manual_seed(0)  # which cause shows first depends on the weights
    factory = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    assert reason in refused(factory.from_config(config()))


def test_a_model_without_an_output_layer_is_refused():
    assert "output" in refused(tiny("llama").model)


def test_a_flash_attention_model_is_refused_by_the_name_of_its_attention(monkeypatch):
    model = build(ARCHITECTURES["llama"]())
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    message = refused(model)
    assert "flash_attention_2" in message and "sdpa" in message


def test_the_attention_to_load_a_model_with_is_one_that_it_has(monkeypatch):
    model = build(ARCHITECTURES["llama"]())
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flex_attention")
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    assert "attn_implementation='eager'" in refused(model)


@pytest.mark.parametrize("buckets", [None, Buckets((1, 8, 32), (16, 32, 64))], ids=["exact", "padded"])
def test_doge_is_refused_past_its_window(buckets):
    """Its own forward is not causal there: it keeps the best keys of all, later ones included."""
    config = transformers.DogeConfig(**_SMALL, num_key_value_heads=2, intermediate_size=48, keep_window_size=40)
    decoder = padded_to(buckets, Decoder(CausalLM(build(config)), None, Static.empty()))
    ids = torch.tensor([prompt(20)])
    expected = decoder.target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert decoder.generate(ids, 10).tokens == expected[0, 20:].tolist()
    with pytest.raises(UnsupportedModelError, match="not causal beyond 40 keys"):
        decoder.generate(ids, 30)


def test_moshi_ends_at_its_window():
    """Behind it transformers answers otherwise with a cache than without; before it a tree changes nothing."""
    sizes = {"ffn_dim": 48, "head_dim": 8, "sliding_window": 150, "initializer_range": 0.4}
    config = transformers.MoshiConfig(**WIDTH | sizes | {"max_position_embeddings": 512, "pad_token_id": 0})
    lm = CausalLM(build(config))
    assert lm.max_context == 150
    ids = torch.tensor([prompt(100)])
    plain = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0, 100:]
    drafter = CausalLMDrafter(CausalLM(build(config, seed=1)), VOCAB)
    assert Decoder(lm, drafter, POLICY).generate(prompt(100), 20).tokens == plain.tolist()
    with pytest.raises(ValueError, match=r"leaves no room in 150 of context \(its window"):
        Decoder(lm, None, Static.empty()).generate(prompt(170), NEW_TOKENS)


def test_experts_that_do_not_run_in_the_dtype_are_refused_with_their_own_error():
    config = ARCHITECTURES["mixtral"]()
    config._experts_implementation = "grouped_mm"
    assert "Double" in refused(build(config))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_the_probe_catches_an_attention_that_ignores_the_mask(monkeypatch, architecture, dtype):
    """It is causal by row, so plain forwards are right: only siblings, which must not see each other, tell.

    With learned positions (GPT-2, OPT) the positions move the logits far more than that does.
    """
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def blind(module, query, key, value, attention_mask, **options):
        rows, keys = query.shape[2], key.shape[2]
        causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return sdpa(module, query, key, value, causal[None, None], **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", blind)
    message = refused(build(ARCHITECTURES[architecture](), dtype=dtype))
    assert "does not honour a tree mask" in message and "sdpa" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_probe_catches_a_model_that_numbers_rows_itself(monkeypatch, architecture, dtype):
    """Its positions are those of the rows: siblings stand one behind the other."""
    model = build(ARCHITECTURES[architecture](), dtype=dtype)
    forward = model.forward

    @functools.wraps(forward)
    def numbering(input_ids, position_ids=None, **options):
        cache = options.get(cache_argument(type(model)))
        start = 0 if cache is None else cache.get_seq_length()
        return forward(input_ids, position_ids=torch.arange(start, start + input_ids.shape[1])[None], **options)

    monkeypatch.setattr(model, "forward", numbering)
    assert "it numbers the rows by itself" in refused(model)


@pytest.mark.parametrize("architecture", ["mistral", "phi3", "qwen2-window", "qwen3-window", "gemma2", "gemma3"])
def test_the_probe_catches_a_lost_window(monkeypatch, architecture):
    """A lone full mask is what transformers' models take without complaint and what loses their window."""
    monkeypatch.setattr(CausalLM, "masks", Model.masks)
    assert "does not honour a tree mask" in refused(tiny(architecture))


def test_the_probe_leaves_no_trace():
    lm = CausalLM(tiny("mistral"))
    assert (lm.length, lm.cache.pending, lm.work) == (0, 0, Work())
    assert lm.max_context == CONTEXT
