"""Drafters that look up, by name: the specs, the embedded store, and what is wrong with a wrong one."""

import pytest

from opt_tree import load_pair
from opt_tree.drafters import (
    EagleDrafter,
    Grafted,
    NGramDrafter,
    Rasd,
    Sharpened,
    StoreDrafter,
    TokenRecycling,
    load_drafter,
)
from opt_tree.drafters.registry import DrafterOptions
from opt_tree.models.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", dtype="float32")


def load(spec, pair):
    return load_drafter(spec, pair.target, DrafterOptions(pair.tokenizer))


@pytest.mark.parametrize(
    "spec, kind",
    [
        ("ngram", NGramDrafter),
        ("store:demo", StoreDrafter),
        ("recycling", TokenRecycling),
    ],
)
def test_tables_by_name(spec, kind, pair):
    assert isinstance(load(spec, pair), kind)


def test_a_graft_by_name(pair):
    drafter = load("graft:2:eagle:demo+store:demo", pair)
    assert isinstance(drafter, Grafted) and drafter.depth == 2
    assert isinstance(drafter.drafter, Sharpened) and isinstance(drafter.drafter.drafter, EagleDrafter)
    assert isinstance(drafter.table, StoreDrafter) and drafter.features == (-1,)
    fused = load("rasd:lm:demo+store:demo", pair)
    assert isinstance(fused, Rasd) and set(fused.retrieval.beta) == {0.0}
    assert load("graft:1:lm:demo+recycling", pair).logits


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ("graft:eagle:demo+store:demo", "graft:DEPTH:SPEC.SPEC"),
        ("graft:0:lm:demo+ngram", "at least one layer, got depth 0"),
        ("graft:1:lm:demo", "names a model and a table"),
        ("graft:1:ngram+lm:demo", "lm:demo is no table"),
        ("rasd:lm:demo", "names a model and a table"),
        ("graft:1:lm:demo+store:/nowhere", "no store at /nowhere"),
        ("store", "store:PATH, or store:demo"),
        ("ngram:somewhere", "reads no files"),
    ],
)
def test_a_wrong_spec_is_one_line(spec, complaint, pair):
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        load(spec, pair)
    assert "\n" not in str(refusal.value)


def test_another_targets_store_is_refused(pair, monkeypatch):
    monkeypatch.setattr("opt_tree.drafters.tables.store.fingerprint", lambda tokenizer: "beef")
    with pytest.raises(CheckpointError, match="made with another tokenizer"):
        load("store:demo", pair)


def test_the_embedded_store_is_small(pair):
    assert load("store:demo", pair).store.nbytes < 4e6
