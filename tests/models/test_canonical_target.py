"""A canonical target: in bfloat16, too, a tree changes nothing, and what cannot be canonical is refused by name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, WIDTH, build, prompt, random_tree, save_pair, tiny, tiny_drafter
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig

from opt_tree import (
    CausalLMDrafter,
    Decoder,
    OptTree,
    Output,
    Pair,
    Sampling,
    generate_batch,
    load_drafter,
    load_pair,
)
from opt_tree.backend import Backend, Inputs
from opt_tree.backends import prepacked as packed
from opt_tree.backends.canonical import NotCanonicalError, as_two
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.backends.packed import Packed
from opt_tree.methods.drafters.registry import DrafterOptions
from opt_tree.models.canonical import check, make_canonical, make_exact
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.models.compiling import captured_shapes, compile_forwards
from opt_tree.target import Forward
from opt_tree.tools.presets import plain

NEW = 10
MESSAGES = [
    "Who built the first lighthouse?",
    "Write a short poem about rain.",
    "Explain why the sky is blue, in detail.",
]


pytestmark = pytest.mark.usefixtures("kernel")


def wrapped(kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    return CausalLM(copy.deepcopy(tiny(kind)).to(dtype))


def bits(logits: Tensor) -> Tensor:
    return logits.contiguous().view(torch.int16)


@pytest.mark.quick("llama", "qwen3-window", "llama4")
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2-window", "qwen3-window", "mistral", "phi3", "opt", "llama4", "mixtral"]
)
def test_random_trees_have_the_logits_of_one_prefill(kind: str) -> None:
    """Of each architecture, windows and chunks among them."""
    lm = wrapped(kind)
    make_canonical(lm)
    assert lm.canonical
    context = prompt(50)
    for seed in range(3):
        tree = random_tree(12, seed, seed)
        lm.reset()
        lm.append(context)
        rows = lm.score(tree).logits.clone()
        for leaf in set(range(12)) - set(tree.parents.tolist()):
            path = tree.path_to(leaf)
            lm.reset()
            whole = lm.append([*context, *tree.tokens[path].tolist()], all_logits=True).logits
            assert torch.equal(bits(rows[path]), bits(whole[len(context) :]))


@pytest.mark.slow
def test_without_it_a_tree_has_other_logits() -> None:
    """What the other tests see is not there by itself."""
    lm = wrapped()
    make_canonical(lm)
    lm.eager.packed.make_canonical(False)
    with pytest.raises(NotCanonicalError, match="0 of its 2 layers"):
        check(lm)


class Mixed(nn.Module):
    """An activation in which a row depends on how many there are."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows + 0.05 * rows.shape[1]


def test_what_depends_on_other_rows_is_refused_with_the_layers_name() -> None:
    lm = wrapped()
    lm.model.model.layers[1].mlp.act_fn = Mixed()
    with pytest.raises(NotCanonicalError, match=r"a prefill of 1 row .* model\.layers\.1\.mlp\.act_fn is the first"):
        make_canonical(lm)
    assert not lm.canonical


def test_one_row_goes_as_two_where_the_library_has_another_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not; the other layers compute one row as it is."""
    compute, linear = packed._Linear._compute, nn.functional.linear

    def special(self: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.numel() > rows.shape[-1]:
            return compute(self, rows, bias)
        down = self.parameters["weight"].shape[1] == lm.model.config.intermediate_size
        # As two, since some CPUs' libraries have another kernel for one row of so small layers.
        return as_two(lambda two: compute(self, two, bias), rows) * (1.5 if down else 1)

    lm = wrapped()
    monkeypatch.setattr(packed._Linear, "_compute", special)
    make_canonical(lm)
    layers = lm.eager.packed._layers()
    assert 1 < sum(layer.rule[0] for layer in layers) == lm.model.config.num_hidden_layers < len(layers)
    lm.pack(False)
    assert lm.canonical and not lm.eager.packed and nn.functional.linear is linear
    lm.pack()
    monkeypatch.setattr(packed, "sums_one_otherwise", lambda compute, weight: False)
    with pytest.raises(NotCanonicalError, match=r"a prefill of 1 row .*layers\.0\.mlp\.down_proj is the first layer"):
        lm.pack(False)
    lm.eager.packed.make_canonical(False)


@pytest.fixture
def sums_five_otherwise(monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """A target whose library sums the products of more than four rows in another order, as some do above 32."""
    compute = packed._Linear._compute

    def special(self: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        inputs = rows.shape[-1]
        if rows.numel() <= 4 * inputs or self.weight.numel() < packed._TRIED:
            return compute(self, rows, bias)
        weight = self.weight.float()
        first, second = (rows[..., half].float() @ weight[:, half].T for half in (slice(32), slice(32, inputs)))
        return (first + second).to(rows.dtype)

    monkeypatch.setattr(packed._Linear, "_compute", special)
    config = LlamaConfig(**WIDTH | {"hidden_size": 128, "num_key_value_heads": 4})
    return CausalLM(build(config, dtype=torch.bfloat16))


def test_many_rows_go_in_blocks_where_the_library_sums_them_otherwise(
    sums_five_otherwise: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = sums_five_otherwise
    monkeypatch.setattr(packed, "many_rows_differ", lambda threads: True)
    make_canonical(lm)
    assert lm.canonical and lm.eager.packed.in_blocks
    assert {layer.rule[1] for layer in lm.eager.packed._layers() if layer.weight.numel() >= packed._TRIED} == {4}
    text = prompt(60)
    whole = lm.append(text, all_logits=True).logits.clone()
    for chunk in (1, 3, 4, 5, 9, 33):
        lm.reset()
        parts = [
            lm.append(text[first : first + chunk], all_logits=True).logits.clone() for first in range(0, 60, chunk)
        ]
        assert torch.equal(bits(torch.cat(parts)), bits(whole))
    with pytest.warns(UserWarning, match="not compiled: canonical, it computes many rows in blocks"):
        assert not compile_forwards(lm)


def test_a_library_that_sums_many_rows_otherwise_is_refused(
    sums_five_otherwise: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "many_rows_differ", lambda threads: False)
    with pytest.raises(NotCanonicalError):
        make_canonical(sums_five_otherwise)
    monkeypatch.setattr("opt_tree.models.canonical._trials", lambda lm, ids: ())
    with pytest.raises(NotCanonicalError, match=r"layers of \[\d+, 128\] compute a row otherwise among others"):
        make_canonical(sums_five_otherwise)


def test_experts_are_refused_where_the_library_sums_many_rows_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are no linear layers, and one expert may get any number of rows."""
    lm = CausalLM(build(MixtralConfig(**WIDTH | {"hidden_size": 128, "intermediate_size": 96}), dtype=torch.bfloat16))
    monkeypatch.setattr(packed, "many_rows_differ", lambda threads: True)
    monkeypatch.setattr(packed, "rows_alike", lambda compute, weight: 32)
    with pytest.raises(NotCanonicalError, match=r"Experts multiplies by .*proj itself"):
        make_canonical(lm)
    assert not lm.canonical


def test_what_cannot_be_canonical_is_refused() -> None:
    for lm, why in (
        (wrapped("gemma2"), "0 of its 3 layers ask transformers' interface for 'sdpa'"),
        (wrapped(dtype=torch.float64), "float64 on cpu: only in bfloat16 and float32 on a CPU or CUDA"),
        (ChainLM(tiny("llama")), "scored path by path"),
    ):
        with pytest.raises(NotCanonicalError, match=why):
            make_canonical(lm)
    with pytest.raises(NotCanonicalError, match="columns, and torch computes GELU the same in all rows"):
        make_canonical(wrapped("gpt-neox"))


@pytest.mark.slow
def test_float32_needs_packed_weights() -> None:
    config = ARCHITECTURES["llama"]()
    config.intermediate_size = 64  # torch's SiLU computes a row of 48 numbers in float32 otherwise where AVX-512 is
    lm = CausalLM(build(config, dtype=torch.float32))
    make_canonical(lm)
    with pytest.raises(NotCanonicalError, match="in float32 with packed weights only"):
        lm.pack(False)
    assert lm.canonical and lm.eager.packed
    check(lm)


@pytest.mark.slow
def test_rows_of_one_number_have_the_logits_of_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: smaller forwards are padded, larger ones go in parts, and so do prompts and trees."""
    lm, tree, context = wrapped(), random_tree(45, 1, 1), prompt(50)
    shapes: list[int] = []
    run = lm.eager.run
    monkeypatch.setattr(Packed, "rows_at_once", property(lambda backend: 32 if backend.packed.canonical else None))
    monkeypatch.setattr(lm.eager, "run", lambda given, *of: shapes.append(given.numbers.shape[2]) or run(given, *of))
    make_canonical(lm)
    lm.append(context)
    rows = lm.score(tree).logits.clone()
    assert len(rows) == len(tree) > 32
    for row in range(0, len(tree), 7):
        path = tree.path_to(row)
        lm.reset()
        whole = lm.append([*context, *tree.tokens[path].tolist()], all_logits=True).logits
        assert torch.equal(bits(rows[path]), bits(whole[len(context) :]))
    assert set(shapes) == {32}
    asked = prompt(20)
    decoder = Decoder(lm, CausalLMDrafter(CausalLM(tiny_drafter("llama"))), OptTree(40, 0.0))
    expected = plain(lm).generate(asked, NEW).tokens
    assert decoder.generate(asked, NEW).tokens == expected
    with pytest.warns(UserWarning, match="is canonical by forwards of 32 rows of one sequence"):
        assert [one.tokens for one in generate_batch(decoder, [asked] * 2, NEW, width=2)] == [expected] * 2
    lm.backend, lm.buckets = Captured(lm.eager, (8, 32)), Buckets((8, 32), (64, 128))
    check(lm)
    assert decoder.generate(asked, NEW).tokens == expected
    assert captured_shapes(lm, 12, 60) == [(32, 64), (32, 128)], "smaller forwards never come"
    graphs = lm.backend._calls
    make_canonical(lm, False)
    assert graphs and not lm.backend._calls, "they were of canonical forwards"


def test_it_is_turned_off_again_and_copied() -> None:
    lm, before = wrapped(), wrapped().append(prompt(40)).logits
    make_canonical(lm)
    twin = copy.deepcopy(lm)
    assert twin.canonical
    check(twin)
    make_canonical(lm, False)
    assert not lm.canonical and torch.equal(lm.append(prompt(40)).logits, before)


def test_what_takes_a_layer_s_place_is_noticed() -> None:
    """An adapter that somebody puts there while a text is decoded; forwards of others do no harm."""
    lm = wrapped()
    make_canonical(lm)
    layer = next(module for module in lm.model.modules() if type(module) is torch.nn.Linear)
    with pytest.raises(RuntimeError, match=r"1 linear layers of .* were not computed canonically"), lm.eager.packed:
        with lm.eager.packed:
            pass
        layer.forward = lambda rows: torch.nn.Linear.forward(layer, rows)
    del layer.forward
    assert not any("forward" in module.__dict__ for module in lm.model.modules())


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("demo", dtype="bfloat16", canonical=True)


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, list[list[int]]]:
    """What plain decoding says to each message."""
    decoder, prompts = plain(pair.target), [pair.encode(message) for message in MESSAGES]
    return {"prompts": prompts, "greedy": [decoder.generate(one, NEW).tokens for one in prompts]}


def drafted(pair: Pair, spec: str, nodes: int = 12) -> Decoder:
    drafter = pair.drafter if spec == "own" else load_drafter(spec, pair.target, DrafterOptions(pair.tokenizer))
    return Decoder(pair.target, drafter, OptTree(nodes, 0.2))


class Recorded:
    """Keeps the logits of every row that a target commits."""

    def __init__(self, lm: CausalLM, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[Tensor] = []
        run, commit, last = lm.run, lm.commit, [torch.empty(0)]

        def scored(forward: Forward, *engine: Any) -> Output:
            output = run(forward, *engine)
            if forward.tree is not None:
                last[0] = output.logits
            return output

        def committed(path: list[int]) -> None:
            if len(last[0]):
                self.rows.append(last[0][path].clone())
            last[0] = torch.empty(0)
            commit(path)

        patch.setattr(lm, "run", scored)
        patch.setattr(lm, "commit", committed)


@pytest.mark.quick("own-12", "eagle:demo-12")
@pytest.mark.parametrize(
    "spec, nodes",
    [("own", 12), ("eagle:demo", 12), ("eagle3:demo", 12), ("store:demo", 12), ("exit:demo", 12)],
)
def test_every_drafters_text_is_plain_decodings_and_every_row_one_prefills(pair, texts, monkeypatch, spec, nodes):
    decoder, lm = drafted(pair, spec, nodes), pair.target
    for asked, expected in zip(texts["prompts"], texts["greedy"], strict=True):
        with monkeypatch.context() as patch:
            recorded = Recorded(lm, patch)
            assert decoder.generate(asked, NEW).tokens == expected
        rows = torch.cat(recorded.rows)[:NEW]
        lm.reset()
        whole = lm.append(asked + expected[:-1], all_logits=True).logits[len(asked) - 1 :]
        assert len(rows) == NEW and torch.equal(bits(rows), bits(whole))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["own", "eagle:demo", "store:demo"])
def test_ragged_lanes_give_the_same_texts(pair: Pair, texts: dict[str, Any], spec: str) -> None:
    decoder = drafted(pair, spec)
    found = generate_batch(decoder, texts["prompts"], NEW, width=2)
    assert [one.tokens for one in found] == texts["greedy"]
    sampled = generate_batch(decoder, texts["prompts"], NEW, Sampling(1.0), seed=3, width=3)
    alone = plain(pair.target)
    assert [one.tokens for one in sampled] == [
        alone.generate(asked, NEW, Sampling(1.0), seed=3).tokens for asked in texts["prompts"]
    ]


@pytest.mark.slow
def test_a_reused_beginning_gives_the_same_text(pair: Pair, texts: dict[str, Any]) -> None:
    decoder = drafted(pair, "own")
    asked, expected = texts["prompts"][0], texts["greedy"][0]
    decoder.generate(asked[: len(asked) * 2 // 3], 9)
    found = decoder.generate(asked, NEW, reuse=True)
    assert found.reused and found.tokens == expected
    conversation = asked + expected + asked
    again = decoder.generate(conversation, 9, reuse=True)
    assert again.reused and again.tokens == plain(pair.target).generate(conversation, 9).tokens


@pytest.mark.slow
def test_an_early_exit_of_a_compiled_target_is_scored_by_the_whole_of_it(pair, texts, monkeypatch):
    """Its package has other bits than the eager halves."""
    decoder = drafted(pair, "exit:demo")
    forwards: list[int] = []

    class Package(Backend):
        eager, layers = pair.target.eager, pair.target.eager.layers

        def forward(self, inputs: Inputs, cache: Any) -> Output:
            forwards.append(1)
            return self.eager.forward(inputs, cache)

    monkeypatch.setattr(pair.target, "backend", Package(pair.target.model))
    found = decoder.generate(texts["prompts"][0], NEW)
    assert found.tokens == texts["greedy"][0] and len(forwards) == len(found.steps) + 1 < NEW


@pytest.mark.slow
def test_load_pair_makes_a_target_canonical_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 on a CPU, unless it is told not to; what cannot be so is warned of, and says why."""
    tiny_pair = f"{save_pair(tmp_path)}/target", "ngram"
    assert load_pair(*tiny_pair, dtype="bfloat16").target.canonical
    assert not load_pair(*tiny_pair, dtype="bfloat16", exact=False).target.canonical
    assert not load_pair(*tiny_pair, dtype="float32").target.canonical

    def fails(lm: CausalLM) -> None:
        raise NotCanonicalError(f"{lm.name} is not canonical: so it is")

    monkeypatch.setattr("opt_tree.models.canonical.check", fails)
    with pytest.warns(UserWarning, match=r"is not canonical: so it is\. A tree may change its text"):
        target = load_pair(*tiny_pair, dtype="bfloat16").target
    assert not target.canonical and target.not_canonical.endswith("so it is")
    with pytest.raises(NotCanonicalError, match="so it is"):
        load_pair(*tiny_pair, dtype="bfloat16", canonical=True)


@pytest.mark.slow
def test_other_dtypes_and_devices_stay_as_they_are() -> None:
    lm = wrapped(dtype=torch.float32)
    make_exact(lm)
    assert not lm.canonical and not lm.not_canonical
    paths = ChainLM(copy.deepcopy(tiny("llama")).bfloat16())
    with pytest.warns(UserWarning, match="scored path by path"):
        make_exact(paths)
    assert "scored path by path" in paths.not_canonical and not paths.canonical
