"""Trees through Mamba-2 layers: every row as if its path were the text, taken as `generate` takes it."""

import copy
import functools
import pickle

import pytest
import torch
from sweep_architectures import VOCAB, built, noisy
from tiny_models import causal_logits, prompt, random_tree
from transformers.models.mamba2 import modeling_mamba2

from opt_tree import CausalLM, Decoder, OptTree, Static, Tree, custom_generate, generate_batch
from opt_tree.backends import state_space
from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_rows import Levels
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.models.capabilities import cache_name
from opt_tree.models.chain_lm import wrap

TYPES = ["mamba2", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"]
LIMITED = {"nemotron_h", "zamba2"}
"""These hold the time step above a limit where several tokens run at once."""
LONG, SHORT, NEW_TOKENS = 29, 2, 12
"""Prompts that are longer and shorter than the convolution."""
HEADS, GROUPS, WIDE, SIZE = 4, 2, 3, 5
"""Heads and groups of heads; sizes of a value and of a key."""


@functools.cache
def model_of(name):
    """A small model. A limit of 0.5 is one that most time steps are below."""
    model = built(name)
    for module in model.modules():
        if name in LIMITED and hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.5, float("inf"))
    return model


@functools.cache
def target(name):
    return wrap(model_of(name))


@functools.cache
def drafter(name):
    return model_drafter(wrap(noisy(model_of(name))))


def generated(model, ids, new_tokens=NEW_TOKENS, **options):
    ids = torch.tensor([ids])
    options |= {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def text_of(model, ids, new_tokens=NEW_TOKENS):
    return generated(model, ids, new_tokens)[0, len(ids) :].tolist()


class Scan:
    """A layer of random numbers, and the state that its definition leaves."""

    def __init__(self, dtype, limits=False):
        self.random, self.dtype = torch.Generator().manual_seed(3), dtype
        self.cache = RecurrentCache([], {0: 4}, limits)
        self.state = torch.zeros(1, HEADS, WIDE, SIZE, dtype=torch.promote_types(dtype, torch.float32))
        self.decay, self.skip, self.bias = -self.normal(HEADS).float().exp(), self.normal(HEADS), self.normal(HEADS)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def rows(self, count):
        shapes = (HEADS, WIDE), (HEADS,), (GROUPS, SIZE), (GROUPS, SIZE)
        return [self.normal(count, *shape) for shape in shapes]

    def scan(self, rows, visible, limit=state_space.NO_LIMIT):
        x, dt, b, c = (part[None] for part in rows)
        self.cache.see(visible, torch.device("cpu"))
        self.cache.convolve(0, self.normal(1, 2, len(visible)), self.normal(2, 4))
        self.cache.pending += len(visible)
        options = {"D": self.skip, "dt_bias": self.bias, "dt_softplus": True, "dt_limit": limit}
        return state_space.scan(self.cache, 0, x, dt, self.decay, b, c, **options)[0][0]

    def along(self, path, rows):
        """transformers' form of one row, a row after the other: what the last one reads, and the state behind it."""
        state, (x, dt, b, c) = self.state.clone(), rows
        for row in path:
            one = slice(row, row + 1)
            out = modeling_mamba2.mamba2_selective_state_update(
                state,
                x[one],
                dt[one, :, None].expand(-1, -1, WIDE),
                self.decay[:, None, None].expand(-1, WIDE, SIZE),
                b[one],
                c[one],
                self.skip[:, None].expand(-1, WIDE),
                dt_bias=self.bias[:, None].expand(-1, WIDE),
                dt_softplus=True,
            )
        return out[0], state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_scan_along_every_path(dtype):
    """Trees in one forward and layer by layer, paths committed to a leaf and to a fork: against the definition.

    In half precision to the last bit: whatever else is in the tree, and however it came.
    """
    scan = Scan(dtype)
    off = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 0.0)  # transformers decays in float32
    for seed, splits in enumerate(([14], [2, 5, 7], [1, 13])):
        tree, rows, start, found = random_tree(14, seed, root=0), scan.rows(14), 0, []
        for end in (sum(splits[: place + 1]) for place in range(len(splits))):
            found.append(scan.scan([part[start:end] for part in rows], tree.ancestors[start:end, :end]))
            start = end
        for row, out in enumerate(torch.cat(found)):
            expected, _ = scan.along(tree.path_to(row), rows)
            assert (out - expected).abs().max() <= off
        leaf = int(tree.depths.argmax())
        leaf = leaf if seed else int(tree.parents[leaf])
        kept = tree.path_to(leaf).tolist()
        _, scan.state = scan.along(kept, rows)
        scan.cache.commit(kept)
        assert (scan.cache._layers[0].state.mT - scan.state[0]).abs().max() <= off


def test_rows_of_a_text_are_a_chunk_in_any_dtype():
    """Also in bfloat16, where rows of a tree are not: as transformers' form for many rows, within the limit."""
    scan, limit = Scan(torch.bfloat16, limits=True), (0.5, 2.0)
    for count in (7, 1, 5):
        rows = scan.rows(count)
        x, dt, b, c = (part[None] for part in rows)
        options = {"D": scan.skip, "dt_bias": scan.bias, "dt_softplus": True, "dt_limit": limit}
        state = {"initial_states": scan.state, "return_final_states": True}
        expected, scan.state = modeling_mamba2.mamba2_chunk_scan(x, dt, scan.decay, b, c, 4, **options, **state)
        scan.cache.text, scan.cache.limited = True, count
        out = scan.scan(rows, torch.ones(count, count).tril().bool().numpy(), limit)
        assert out.dtype == torch.float32 and (out - expected[0]).abs().max() < 1e-5
        scan.cache.commit(list(range(count)))
        assert (scan.cache._layers[0].state.mT - scan.state[0]).abs().max() < 1e-5


def test_rows_by_their_depth():
    for seed in range(5):
        tree = random_tree(13, seed, root=0)
        levels = Levels.of(tree.parents, torch.device("cpu"))
        assert levels.rows[levels.back].tolist() == list(range(13))
        above = [-1]
        for depth, (rows, places) in enumerate(
            zip(levels.rows.split(levels.sizes), levels.above.split(levels.sizes), strict=True)
        ):
            rows = rows.tolist()
            assert rows == (tree.depths == depth).nonzero()[0].tolist()
            assert tree.parents[rows].tolist() == [above[place] for place in places]
            above = rows


@pytest.mark.quick("mamba2-2")
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_tree_are_those_of_its_chains(name, length):
    """Node by node, also behind paths that were kept, to a leaf or not; the last text against transformers, too."""
    lm, context = target(name), prompt(length, vocab=VOCAB)
    assert isinstance(lm, CausalLM) and lm.recurrent
    lm.reset()
    lm.append(context)
    for seed, size in enumerate((12, 60) if length == LONG else (30, 12)):
        tree = random_tree(size, seed, root=seed + 1, vocab=VOCAB)
        logits = lm.score(tree).logits.clone()
        for leaf in set(range(size)) - set(tree.parents.tolist()):
            path = tree.path_to(leaf)
            chain = lm.score(Tree.of(tree.tokens[path].tolist(), range(-1, len(path) - 1))).logits
            assert (logits[path] - chain).abs().max() < 1e-6
        lm.score(tree)
        kept = tree.path_to(size - 1)[: None if seed else 2]
        lm.commit(kept.tolist())
        context = [*context, *tree.tokens[kept].tolist()]
    if name not in LIMITED:
        assert (logits[kept] - causal_logits(lm.model, context)[-len(kept) :]).abs().max() < 1e-4


@pytest.mark.quick("mamba2")
@pytest.mark.parametrize("name", TYPES)
def test_texts_are_those_of_transformers(name):
    prompts = [prompt(LONG, vocab=VOCAB - 1), prompt(SHORT, seed=1, vocab=VOCAB - 1)]
    expected = [text_of(model_of(name), ids) for ids in prompts]
    decoder = Decoder(target(name), drafter(name), OptTree(12, 0.0, 4))
    results = generate_batch(decoder, prompts, max_new_tokens=NEW_TOKENS)
    assert [result.tokens for result in results] == expected
    steps = [step for result in results for step in result.steps]
    assert sum(step.accepted for step in steps) > 3, "the drafter should sometimes be right"
    if name != "nemotron_h":  # whose noisy copy is always right under some seeds of some versions of transformers
        assert any(step.accepted < step.tree.depths.max() for step in steps), "and sometimes wrong"
    plain = Decoder(target(name), None, Static.empty())
    assert plain.generate(prompts[0], NEW_TOKENS).tokens == expected[0]
    options = {"custom_generate": custom_generate(decoder), "return_dict_in_generate": True}
    found = generated(model_of(name), prompts[0], **options)
    assert found.sequences[0, LONG:].tolist() == expected[0]
    past = {cache_name(model_of(name)): found.past_key_values}
    with torch.no_grad():
        place = torch.tensor([[LONG + NEW_TOKENS - 1]])
        logits = model_of(name)(found.sequences[:, -1:], position_ids=place, **past).logits[0, -1]
    if name not in LIMITED:
        assert (logits - causal_logits(model_of(name), found.sequences[0].tolist())[-1]).abs().max() < 1e-4


def test_the_prompt_alone_is_limited_and_that_with_its_last_token(monkeypatch):
    """Prompts of one token, and of several forwards; a text that goes on from an earlier one begins anew."""
    model, lm, plain = model_of("zamba2"), target("zamba2"), Decoder(target("zamba2"), None, Static.empty())
    ids = prompt(19, seed=2, vocab=VOCAB - 1)
    expected = text_of(model, ids, 8)
    assert plain.generate(ids[:1], 8).tokens == text_of(model, ids[:1], 8)
    with monkeypatch.context() as patched:
        patched.setattr("opt_tree.model.PREFILL", 5)
        assert plain.generate(ids, 8).tokens == expected
    longer = [*ids, *expected, 5, 6]
    again = plain.generate(longer, 8, reuse=True)
    assert not again.reused and again.tokens == text_of(model, longer, 8)
    lm.reset()
    lm.append(ids)
    rows = [lm.score(Tree.of(ids[:2], [-1, 0])).logits.clone() for _ in range(2)]
    assert torch.equal(*rows), "it was scored and dropped, so its root is the prompt's last token again"
    lm.commit([0])
    assert (lm.score(Tree.of(ids[1:2], [-1])).logits - rows[0][1]).abs().max() < 1e-6
    whole = causal_logits(model, [*ids, *ids[:2]])
    assert (rows[0][0] - whole[-2]).abs().max() < 1e-4 and (rows[0][1] - whole[-1]).abs().max() > 1e-2


def test_turns_go_on_and_so_do_copies():
    lm, ids = target("bamba"), prompt(SHORT, vocab=VOCAB)
    decoder = Decoder(lm, drafter("bamba"), OptTree(12, 0.0, 4))
    longer = [*ids, *decoder.generate(ids, NEW_TOKENS).tokens, 5, 6]
    again = decoder.generate(longer, NEW_TOKENS, reuse=True)
    assert again.reused and again.tokens == text_of(lm.model, longer)
    tree = random_tree(7, 0, root=1, vocab=VOCAB)
    expected = lm.score(tree).logits.clone()
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert torch.equal(twin.score(tree).logits, expected)


@pytest.mark.quick("mamba2", "zamba2")
@pytest.mark.parametrize("name", TYPES)
def test_the_tree_changes_no_text_in_float32(name):
    lm, ids = CausalLM(copy.deepcopy(model_of(name)).float()), prompt(LONG, seed=4, vocab=VOCAB)
    drafted = Decoder(lm, drafter(name), OptTree(12, 0.0, 4)).generate(ids, 8)
    assert drafted.tokens == Decoder(lm, None, Static.empty()).generate(ids, 8).tokens
    assert any(step.accepted for step in drafted.steps)


@pytest.mark.quick("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tree_changes_no_bit_in_half_precision(dtype, monkeypatch):
    """Where a product of matrices has the same bits for any number of rows: here it is taken a row at a time."""
    linear = torch.nn.functional.linear

    def by_row(rows, *weights):
        flat = rows.reshape(-1, 1, rows.shape[-1])
        return torch.cat([linear(row, *weights) for row in flat]).view(*rows.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    lm, ids = CausalLM(copy.deepcopy(model_of("mamba2")).to(dtype)), prompt(LONG, vocab=VOCAB)
    lm.pack(False)
    lm.append(ids)
    tree = random_tree(20, 1, root=1, vocab=VOCAB)
    rows = lm.score(tree).logits.clone()
    path = tree.path_to(19)
    for row in path:
        assert torch.equal(lm.score(Tree.of([int(tree.tokens[row])], [-1])).logits[0], rows[row])
        lm.commit([0])
    plain = Decoder(lm, None, Static.empty()).generate(ids, NEW_TOKENS)
    assert Decoder(lm, drafter("mamba2"), OptTree(12, 0.0, 4)).generate(ids, NEW_TOKENS).tokens == plain.tokens
