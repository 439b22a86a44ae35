"""Inflated targets compute the small model's function: logits, greedy tokens, trees. What cannot be one is refused."""

import copy
import dataclasses
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import build, perturbed, prompt, publish, save_pair, tiny, tiny_head
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import opt_tree
from evaluation import latency
from evaluation.run.models import made_of
from experiments.inflate import SHAPES, Shape, inflate, inflate_pair, parse_shape
from opt_tree.methods.own_files import load_file
from opt_tree.tools import presets

INFLATE = Path(__file__).parents[2] / "experiments" / "inflate.py"

VARIANTS = {
    "grouped": {},
    "every head its own": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "large eps": {"rms_norm_eps": 0.3},
    "scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "heads wider than hidden": {"head_dim": 16},
}  # fmt: skip


@torch.inference_mode()
def rounding_shift(model: LlamaForCausalLM, large: LlamaForCausalLM, tokens: list[int]) -> float:
    """The largest difference between the two models' logits over one causal forward of `tokens`."""
    ids = torch.tensor([tokens], device=model.device)
    ours, theirs = (m(input_ids=ids, use_cache=False).logits.double() for m in (model, large))
    return float((ours - theirs).abs().max())


def small(dtype: torch.dtype = torch.float32, **changes: object) -> LlamaForCausalLM:
    """A random Llama whose norm weights and biases matter and whose logits are of order 10."""
    options = dict(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = build(LlamaConfig(**(options | changes)), dtype=dtype).requires_grad_(False)
    random = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            weight.copy_(centre + 0.5 * torch.randn(weight.shape, generator=random))
    ids = torch.tensor([prompt(64)])
    model.model.norm.weight *= 10 / model(ids).logits.abs().max()
    return model


@pytest.mark.quick(
    "64x5-grouped",
    "64x5-biases",
    "64x5-large eps",
    "96x2-grouped",
    "96x2-one key head",
    "96x2-large eps",
    "96x2-heads wider than hidden",
    "128x7-one key head",
    "128x7-tied",
    "128x7-heads wider than hidden",
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("spec", ["64x5", "96x2", "128x7"])
def test_logits_are_the_small_models(variant: str, spec: str) -> None:
    model = small(**VARIANTS[variant])
    large = inflate(model, spec)
    hidden, layers = map(int, spec.split("x"))
    assert (large.config.hidden_size, len(large.model.layers)) == (hidden, layers)
    ids = prompt(64, seed=1)
    assert 5 < model(torch.tensor([ids])).logits.abs().max() < 20
    assert rounding_shift(model, large, ids) < 1e-4


def test_in_float64_nothing_is_left_but_float64s_rounding() -> None:
    # RMSNorm and RoPE work in float32 inside transformers, so its rounding is what remains of the difference.
    model = small(torch.float64)
    assert rounding_shift(model, inflate(model, "128x7"), prompt(64)) < 2e-5


@pytest.mark.parametrize(
    ("queries", "keys", "large_queries", "large_keys"),
    [(4, 2, 8, 8), (4, 2, 8, 2), (4, 1, 8, 4), (4, 4, 16, 4), (4, 1, 16, 8)],
)
def test_every_query_head_keeps_its_key_head(queries: int, keys: int, large_queries: int, large_keys: int) -> None:
    model = small(num_key_value_heads=keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "asked", Shape(8 * large_queries, 3, 64, 8 * large_keys))
        large = inflate(model, "asked")
    assert large.config.num_attention_heads == large_queries
    assert large.config.num_key_value_heads == large_keys
    assert rounding_shift(model, large, prompt(64)) < 1e-4


@pytest.mark.slow
def test_greedy_tokens_and_draft_trees_are_the_small_models() -> None:
    model = copy.deepcopy(tiny("llama")).float()
    large = inflate(model, "64x5")
    expected = presets.plain(opt_tree.CausalLM(model)).generate(prompt(9), 60).tokens
    target = opt_tree.CausalLM(large)
    drafter = opt_tree.CausalLMDrafter(opt_tree.CausalLM(perturbed(model, 0.05)))
    drafted = presets.opt(target, drafter, opt_tree.OptTree(nodes=12, threshold=0.0)).generate(prompt(9), 60)
    assert presets.plain(target).generate(prompt(9), 60).tokens == expected
    assert drafted.tokens == expected
    assert drafted.mean_acceptance_length > 1.2
    assert list(large.generate(torch.tensor([prompt(9)]), max_new_tokens=60, do_sample=False)[0, 9:]) == expected


def test_activations_and_weights_are_dense() -> None:
    large = inflate(small(), "128x7")
    hidden = large.model(torch.tensor([prompt(16)]), output_hidden_states=True).hidden_states
    for states in hidden:
        # Without the rotation 96 of 128 dimensions would be zero.
        assert (states.abs() > 1e-3 * states.abs().max()).float().mean() > 0.95
    readers = [w for name, w in large.named_parameters() if "o_proj" not in name and "down_proj" not in name]
    assert all((weight != 0).float().mean() > 0.99 for weight in readers)


def test_real_layers_are_spread_evenly() -> None:
    large = inflate(small(), "64x8")
    writing = [index for index, layer in enumerate(large.model.layers) if layer.mlp.down_proj.weight.any()]
    assert writing == [2, 6]


def test_half_precision_moves_logits_by_its_own_rounding() -> None:
    exact = small()
    half = small().to(torch.bfloat16)
    large = inflate(half, "128x7")
    assert large.dtype == torch.bfloat16
    assert large.model.rotary_emb.inv_freq.dtype == half.model.rotary_emb.inv_freq.dtype
    ids = prompt(64)
    shift, own = rounding_shift(half, large, ids), rounding_shift(exact, half, ids)
    # The weights are rounded once more, so the same order as bfloat16's own error.
    assert 0 < shift < 4 * own


def test_a_model_gets_the_same_weights_every_time_and_the_global_seed_is_left_alone() -> None:
    model, state = small(), torch.get_rng_state()
    first, again = inflate(model, "64x3"), inflate(model, "64x3")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_description_names_both_ends() -> None:
    model = small()
    model.config.name_or_path = "tiny"
    line = inflate(model, "128x7").config.made_of
    for part in ("inflated target", "tiny (", "7 layers", "hidden 128", "16 query and 8 key/value heads of 8"):
        assert part in line


def test_named_shapes_are_the_published_ones() -> None:
    assert parse_shape("7B") == SHAPES["7b"]
    assert (SHAPES["7b"].hidden, SHAPES["7b"].layers, SHAPES["7b"].intermediate) == (4096, 32, 11008)
    assert (SHAPES["13b"].hidden, SHAPES["13b"].layers, SHAPES["13b"].intermediate) == (5120, 40, 13824)


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({}, "16x4", "16 wide is less than the target's 32"),
        ({}, "64x1", "1 deep is less than the target's 2"),
        ({"intermediate_size": 1000}, "64x4", "256 hidden units in an MLP is less than the target's 1000"),
        ({"head_dim": 64}, "64x4", "does not divide into heads"),
        ({"head_dim": 32}, "64x4", "2 query heads is less than the target's 4"),
        ({}, "100x4", "does not divide into heads of 8"),
        ({}, "9b", "unknown shape '9b'"),
        ({}, "64x", "unknown shape '64x'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        inflate(small(**changes), spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gpt2"])
def test_other_architectures_are_refused(architecture: str) -> None:
    with pytest.raises(ValueError, match="is not of the Llama architecture"):
        inflate(tiny(architecture), "64x4")


def eagle_pair(model: LlamaForCausalLM, sharpening: float | None = None) -> opt_tree.Pair:
    """A random head for a small target, to be inflated or not. It feeds on its own features without blowing them up."""
    target, tokenizer = opt_tree.CausalLM(model), PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    head = tiny_head(model)
    head.fc.weight *= 0.3
    drafter = opt_tree.EagleDrafter(head, target)
    return opt_tree.Pair(target, tokenizer, drafter.calibrated(sharpening or 1.0))


@pytest.mark.quick("dtype1-2.0-1")
@pytest.mark.parametrize(
    ("dtype", "sharpening", "length"), [(torch.float32, None, 9), (torch.float32, 2.0, 1), (torch.float64, None, 1)]
)
def test_an_eagle_head_draws_the_small_targets_trees(dtype: torch.dtype, sharpening: float | None, length: int) -> None:
    traces = []
    for spec in (None, "64x5"):
        pair = eagle_pair(small(dtype), sharpening)
        pair = inflate_pair(pair, spec) if spec else pair
        policy = opt_tree.OptTree(nodes=40, threshold=0.0, max_depth=4)
        traces.append(presets.opt(pair.target, pair.drafter, policy).generate(prompt(length), 24))
    ours, theirs = traces
    assert ours.mean_acceptance_length > 1.2
    assert theirs.tokens == ours.tokens
    assert theirs.accept_lengths == ours.accept_lengths
    for step, same in zip(ours.steps, theirs.steps, strict=True):
        assert same.tree.tokens.tolist() == step.tree.tokens.tolist()
        assert same.tree.parents.tolist() == step.tree.parents.tolist()
        # RMSNorm and RoPE work in float32 inside transformers, whatever the dtype.
        assert same.tree.path_log_probs == pytest.approx(step.tree.path_log_probs, abs=1e-4)


def test_an_inflated_pair_keeps_the_heads_size_and_frees_the_small_target() -> None:
    pair = eagle_pair(small(), 0.5)
    layer = weakref.ref(pair.target.model.model.layers[0])
    pair = inflate_pair(pair, "64x4")
    gc.collect()
    assert layer() is None
    head = pair.drafter.drafter
    assert head.temperature == 0.5
    assert pair.drafter.features
    assert (pair.target.hidden, head.lm.hidden, head.max_context) == (64, 32, 256)
    assert made_of(pair).startswith("inflated target: ") and "the EAGLE head keeps its own size" in made_of(pair)


@pytest.mark.slow
def test_what_reads_other_hidden_states_is_refused_before_anything_is_made() -> None:
    pair = opt_tree.load_pair("demo", drafter="eagle3:demo")
    for drafter in ("eagle3:demo", "graft:1:eagle:demo+store:demo", "exit:demo"):
        pair = dataclasses.replace(pair, drafter=opt_tree.load_drafter(drafter, pair.target))
        with pytest.raises(ValueError, match=r"reads hidden states of the target \(layers .* 350m knows only"):
            inflate_pair(pair, "350m")


@pytest.mark.slow
def test_two_pairs_share_an_inflated_target() -> None:
    first = inflate_pair(eagle_pair(small()), "64x4")
    second = inflate_pair(eagle_pair(small()), "64x4", large=first.target.model)
    assert second.target.model is first.target.model
    texts = [presets.opt(pair.target, pair.drafter).generate(prompt(9), 20).tokens for pair in (first, second, first)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_a_head_is_measured_beside_assisted_generation_with_an_inflated_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    root, made = save_pair(tmp_path), []
    (root / "head").mkdir()
    publish(root / "head", tiny_head(tiny("llama")), "model.safetensors")
    (root / "q.jsonl").write_text('{"question": "abacadae"}\n{"question": "hbhaagaf"}\n')
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(load_file(INFLATE), "inflate", lambda *given: made.append(given) or inflate(*given))
    models = f"--base-model-path {root}/target --question-file {root}/q.jsonl --assistant {root}/draft"
    asked = "--dtype float32 --device cpu --nodes 6 --thresholds 0.1 --max-new-tokens 6 --json"

    def measure(*more: str) -> tuple[dict[str, dict], str]:
        assert latency.main([*models.split(), *asked.split(), *more]) == 0
        *text, last = capsys.readouterr().out.splitlines()
        return {row["method"]: row for row in json.loads(last)["rows"]}, "\n".join(text)

    for drafter in ("--ea-model-path", f"{root}/head"), ("--draft-model-path", f"{root}/draft"):
        plain, said = measure(*drafter)
        assert "inflated" not in said
        made.clear()
        large, said = measure(*drafter, "--through", f"{INFLATE}:inflate_pair:64x4")
        assert len(made) == 1
        assert "inflated target" in said and ("the EAGLE head keeps its own size" in said) == ("ea" in drafter[0])
        assert {name: row.get("tokens/step") for name, row in plain.items()} == {
            name: row.get("tokens/step") for name, row in large.items()
        }
        assert set(large) == {"plain", "OPT-Tree 6/0.1", "transformers", "transformers, assisted"}
        assert all(row["x transformers, assisted"] > 0 for row in large.values())
        parts = ("draft forwards ms", "target forward ms", "outside the forwards ms")
        assert all(large["OPT-Tree 6/0.1"][part] > 0 for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_large_model_is_built_there(dtype: torch.dtype) -> None:
    model = small().to("cuda", dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    large = inflate(model, "1024x8")
    weights = sum(parameter.nbytes for parameter in large.parameters())
    # No second copy, least of all a wider one; a matrix and its parts may be under way.
    assert torch.cuda.max_memory_allocated() - before < 1.5 * weights
    assert all(parameter.device.type == "cuda" and parameter.dtype == dtype for parameter in large.parameters())
    assert rounding_shift(model, large, prompt(64)) < (1e-3 if dtype == torch.float32 else 1.0)
