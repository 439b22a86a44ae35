"""Drafters by name: what a spec stands for, what is embedded, and what is wrong with a wrong one."""

import pytest

from opt_tree import CausalLMDrafter, CheckpointError, EagleDrafter, load_drafter, load_pair
from opt_tree.methods.drafters.around import described, settings_of
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.combined.rasd import Rasd
from opt_tree.methods.drafters.registry import DrafterOptions, parse_spec
from opt_tree.methods.drafters.tables.store import StoreDrafter


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", "eagle:demo", dtype="float32")


def load(spec, pair, **options):
    return load_drafter(spec, pair.target, DrafterOptions(pair.tokenizer, **options))


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        ("demo", "lm", "demo"),
        ("lm:demo", "lm", "demo"),
        ("eagle:demo", "eagle", "demo"),
        ("JackFram/llama-68m", "lm", "JackFram/llama-68m"),
        ("./some:folder/x", "lm", "./some:folder/x"),
        ("eagle:yuhuili/EAGLE-llama2-chat-7B", "eagle", "yuhuili/EAGLE-llama2-chat-7B"),
    ],
)
def test_a_spec_is_a_kind_and_a_path(text, kind, path):
    assert parse_spec(text) == (kind, path)
    assert str(parse_spec(text)) == f"{kind}:{path}"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("egale:demo", "unknown kind of drafter 'egale' in 'egale:demo'; there are copy, dflash, dspark, eagle"),
        ("eagle", "'eagle' does not say where it lies: eagle:PATH, or eagle:demo"),
        ("lm:", "'lm:' does not say where it lies"),
        ("eagle:./nowhere", "nowhere"),
        ("lm:./nowhere", "no model folder at ./nowhere"),
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


@pytest.mark.parametrize(
    "note",
    [
        '{"spec": "{here}"}',
        '{"spec": "copy:{here}"}',
        '{"spec": "graft:lm:demo+{here}"}',
        "[" * 100_000,
    ],
    ids=["itself", "a copy of itself", "a part of itself", "nested"],
)
def test_a_note_that_has_no_end_is_one_line(note, tmp_path):
    """A folder may name what lies in it, and no folder with a note: two could name each other for ever."""
    (tmp_path / "drafter.json").write_text(note)
    with pytest.raises(CheckpointError, match=r"drafter\.json does not say what drafts: \w+: ") as refusal:
        parse_spec(str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("spec", ["x" * 5000, "x" * 300, "x" * 300 + ":y", "copy:" * 100 + "demo"])
def test_a_spec_that_can_name_nothing_is_one_line(spec):
    with pytest.raises(CheckpointError, match=rf"is no drafter: {len(spec)} letters name neither files nor kinds"):
        parse_spec(spec)


def test_what_is_embedded_says_what_it_is(pair):
    assert pair.drafter.temperature != 1 and isinstance(pair.drafter, EagleDrafter)
    assert described(pair.drafter).startswith("EAGLE head demo: 2.8 M parameters, ")
    assert described(pair.drafter).endswith(f", sharpened by temperature {pair.drafter.temperature:.2f}")
    assert set(settings_of(pair.drafter)) == {"draft_dtype", "sharpening"}
    model = load("lm:demo", pair, bare=True)
    assert isinstance(model, CausalLMDrafter) and model.bare is model
    assert described(model) == "draft model demo: 1.4 M parameters, float32"
    assert settings_of(model) == {"draft_dtype": "float32"}
    assert load("store:demo", pair).store.nbytes < 4e6
    with pytest.raises(CheckpointError, match="a drafter or an EAGLE head, not both"):
        load_pair("demo", "demo", eagle="demo")


@pytest.mark.slow
def test_a_graft_by_name(pair):
    drafter = load("graft:2:eagle:demo+store:demo", pair)
    assert isinstance(drafter, Grafted) and drafter.depth == 2
    assert drafter.drafter.temperature != 1 and isinstance(drafter.drafter, EagleDrafter)
    assert isinstance(drafter.table, StoreDrafter) and drafter.features == (-1,)
    fused = load("rasd:lm:demo+store:demo", pair)
    assert isinstance(fused, Rasd) and set(fused.retrieval.beta) == {0.0}
    assert load("graft:1:lm:demo+recycling", pair).reads_logits


def test_another_targets_store_is_refused(pair, monkeypatch):
    monkeypatch.setattr("opt_tree.methods.drafters.tables.store.fingerprint", lambda tokenizer: "beef")
    with pytest.raises(CheckpointError, match="made with another tokenizer"):
        load("store:demo", pair)
