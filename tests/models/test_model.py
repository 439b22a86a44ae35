"""The core of a model: which rows are run, padded how, and what several texts in one forward are told."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB, causal_logits, padded_to, prompt, random_tree, tiny

from opt_tree import backend as base
from opt_tree import model as core
from opt_tree.backends.batch.kv_lanes import Storage
from opt_tree.backends.batch.merge_tensors import side_by_side
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.backends.packed import Buckets, Packed
from opt_tree.backends.windows import WithWindows
from opt_tree.masks import tree_mask
from opt_tree.model import Model
from opt_tree.target import Forward, causal


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 5), st.integers(0, 6), st.integers(0, 4), st.integers(0, 9))
def test_padding_stands_in_front_and_nobody_sees_it(rows, before, prefix, padding, behind, seed):
    """And each padding row sees the prefix and a slot of its own, so that no row of attention is empty."""
    columns = before + rows
    visible = np.random.default_rng(seed).random((rows, columns)) < 0.5
    padded, keys = rows + padding, prefix + columns + padding + behind
    for device in (torch.device("cpu"), torch.device("meta")):
        if device.type == "cpu":
            mask = tree_mask(visible, prefix, padded, keys)[0, 0].numpy()
            assert (mask[padding:, prefix : prefix + columns] == visible).all() and mask[:, :prefix].all()
            assert not mask[padding:, prefix + columns :].any() and not mask[:padding, prefix : prefix + columns].any()
            assert (mask[:padding, prefix + columns : prefix + columns + padding] == np.eye(padding, dtype=bool)).all()
            assert not mask[:, prefix + columns + padding :].any()
        else:
            assert tree_mask(visible, prefix, padded, keys, device).shape == (1, 1, padded, keys)


@given(st.integers(1, 40))
def test_what_a_text_s_rows_see_takes_little_room(rows):
    assert (causal(rows) == np.tri(rows, dtype=bool)).all()
    assert causal(rows).base is not None and causal(1 << 16).shape == (1 << 16, 1 << 16), "4 GB, were it not a view"


def test_the_parts_of_a_text_are_those_of_its_forward():
    forward = Forward(None, np.arange(9), np.arange(20, 29), causal(9), torch.arange(9.0)[:, None], goes_on=True)
    part = forward.part(4, 7)
    assert part.tokens.tolist() == [4, 5, 6] and part.positions.tolist() == [24, 25, 26] and len(part.features) == 3
    assert (part.visible == np.tri(3, dtype=bool)).all(), "those before are committed by then"
    behind = replace(forward, goes_on=False, visible=np.tri(9, 11, 2, dtype=bool)).part(4, 7)
    assert (behind.visible == np.tri(9, 11, 2, dtype=bool)[4:7, :9]).all(), "those before are pending still"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "backend", [WithHiddenStates, Packed, lambda model: padded_to(Buckets((4, 16), (8, 64)), Packed(model))]
)
def test_the_network_as_it_is_and_packed_and_padded(architecture, backend):
    """A text, a tree behind it, a path kept and a token more, against plain forwards of the whole."""
    network, context = tiny(architecture), prompt(17)
    lm = WithWindows(network, backend(network))
    found = lm.run(lm.text(context, all_logits=True)).logits
    assert (found - causal_logits(network, context)).abs().max() < 1e-9
    tree = random_tree(7, seed=2, root=5)
    rows = lm.run(lm.tree(tree)).logits.clone()
    path = tree.path_to(6)
    for row in (3, 6):
        text = [*context, *tree.tokens[tree.path_to(row)].tolist()]
        assert (rows[row] - causal_logits(network, text)[-1]).abs().max() < 1e-9
    lm.commit(list(path))
    text = [*context, *tree.tokens[path].tolist(), 3]
    assert (lm.run(lm.text([3])).logits[-1] - causal_logits(network, text)[-1]).abs().max() < 1e-9


@pytest.mark.parametrize("buckets", [None, Buckets((4, 16), (8, 64))], ids=["exact", "padded"])
def test_the_last_row_alone_is_one_row_and_the_features_are_all(buckets):
    network = tiny("llama")
    lm = Model(network, padded_to(buckets, Packed(network)))
    lm.watch((0,))
    whole = lm.run(lm.tree(random_tree(5, seed=0, root=1)))
    expected, states = whole.logits[-1:].clone(), whole.features[0].clone()
    found = lm.run(replace(lm.tree(random_tree(5, seed=0, root=1)), last_only=True))
    assert found.logits.shape == (1, VOCAB) and (found.logits - expected).abs().max() < 1e-9
    assert (found.features[0] - states).abs().max() < 1e-9


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_one_forward_stands_between_the_prepare_and_the_finish_of_several_texts(architecture):
    network, lengths = tiny(architecture), (13, 4, 20)
    alone, expected, trees = WithWindows(network, Packed(network)), [], []
    for place, length in enumerate(lengths):
        trees.append(random_tree(3 + 2 * place, seed=place, root=place + 1))
        alone.reset()
        alone.run(alone.text(prompt(length, seed=place)))
        expected.append(alone.run(alone.tree(trees[-1])).logits.clone())
    storage, backend = Storage(alone.cache.shapes, len(lengths)), Packed(network)
    models = [WithWindows(network, backend) for _ in lengths]
    for lm, lane in zip(models, storage.lanes, strict=True):
        lm.cache = lane

    def together(forwards):
        inputs = [forward.model.prepare(forward) for forward in forwards]
        rows, keys = (max(size) for size in zip(*(_sizes(one) for one in inputs), strict=True))
        storage.reserve(keys)
        whole = side_by_side(inputs, rows, keys, storage.slots - 1)
        storage.open(list(range(len(forwards))), keys, whole.numbers[2])
        output = backend.forward(whole, storage)
        logits = [output._replace(logits=output.logits[place : place + 1]) for place in range(len(forwards))]
        return [forward.model.finish(forward, own) for forward, own in zip(forwards, logits, strict=True)]

    with torch.inference_mode():
        together(
            [
                lm.text(prompt(length, seed=place))
                for place, (lm, length) in enumerate(zip(models, lengths, strict=True))
            ]
        )
        assert [lm.length for lm in models] == list(lengths)
        found = together([lm.tree(tree) for lm, tree in zip(models, trees, strict=True)])
    for one, other in zip(found, expected, strict=True):
        assert one.logits.shape == other.shape and (one.logits - other).abs().max() < 1e-9


def _sizes(inputs):
    mask = inputs.mask if isinstance(inputs.mask, torch.Tensor) else next(iter(inputs.mask.values()))
    return mask.shape[2:]


def test_a_tree_drops_what_was_pending_and_says_which_tree_it_is():
    network = tiny("llama")
    lm, tree = Model(network), random_tree(4, seed=1, root=2)
    lm.run(lm.text(prompt(6)))
    lm.run(lm.tree(random_tree(9, seed=0, root=1)))
    forward = lm.tree(tree)
    assert forward.tree is tree
    assert forward.positions.tolist() == (6 + tree.depths).tolist()
    first = lm.run(forward).logits.clone()
    assert lm.cache.pending == 4
    assert torch.equal(lm.run(lm.tree(tree)).logits, first) and lm.cache.pending == 4
    lm.run(lm.text([3]))
    assert lm.cache.pending == 0 and lm.length == 7


def test_the_core_files_name_no_method_and_no_backend_of_a_kind():
    """They are read alone: what is special to weights, devices and drafters stands beside them."""
    kinds = ("canonical", "delta", "snapshot", "quantised", "split_target", "tensor_parallel", "prepacked", "drafters")
    for module in (core, base):
        tree = ast.parse(Path(module.__file__).read_text())
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert names and not [name for name in names if any(kind in name for kind in kinds)]
