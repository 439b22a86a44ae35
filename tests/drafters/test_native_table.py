"""A table in native code: the trees that Python grows over it, of every text; and nothing is read but what is there."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from conftest import TableDrafter, hashed_laws
from core.test_native import built  # noqa: F401
from decoding.test_table_trees import drawn
from drafters.test_ngram import outcome_of
from drafters.test_store import documents
from tiny_models import VOCAB, prompt

from opt_tree import OptTree, load_pair
from opt_tree.core import native
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.draft import draft
from opt_tree.decoding.table_trees import looked_up
from opt_tree.drafters import Grafted, NGramDrafter, Store, StoreDrafter
from opt_tree.drafters.tables.file_format import Table, load_table, save_table
from opt_tree.drafters.tables.store import FILE
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.training.fitting.store import Recipe, build


def store(vocab=VOCAB, order=3):
    return Store(build(documents(prompt(600, seed=3, vocab=9), prompt(300, seed=4)), Recipe(vocab, order=order)))


def tables():
    yield NGramDrafter((3.1,))
    yield NGramDrafter((4.3, 2.1, 1.3, 0.7))
    yield NGramDrafter((0.0, 0.0))
    yield StoreDrafter(store())
    yield StoreDrafter(store(300_000), weight=0)
    yield StoreDrafter(store(), (0.3, 0.2, 0.1), 0.37)
    yield StoreDrafter(store(), longest=True)


def drafters():
    yield from tables()
    for number, table in enumerate(tables()):
        yield Grafted(TableDrafter(hashed_laws(number, VOCAB, (None, 16)[number % 2])), table, 1 + number % 3)


@pytest.fixture
def both(built, monkeypatch):  # noqa: F811
    """Draft by native code and by Python, and compare; returned is the tree."""

    def trees(drafter, policy, text, limit=9):
        found = []
        for code in (built, None):
            monkeypatch.setattr(native, "code", code)
            below = looked_up(drafter, policy, text)
            assert (below.native is not None) == (code is not None)
            found.append(draft(drafter, policy, text, limit))
        quick, slow = found
        assert drawn(quick) == drawn(slow)
        assert quick.draft_rows.tolist() == slow.draft_rows.tolist()
        assert quick.depths.tolist() == slow.depths.tolist()
        assert quick.path_log_probs == pytest.approx(slow.path_log_probs, abs=1e-12)
        assert (quick.ancestors == slow.ancestors).all()
        return quick

    return trees


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("nodes", [1, 7, 60])
def test_the_tree_is_pythons(both, nodes, threshold):
    sizes = set()
    for drafter in drafters():
        for seed, limit in ((0, 1), (1, 2), (2, 9)):
            text = prompt(90, seed=seed, vocab=9)
            for end in (1, 2, 20, 90):
                drafter.reset(text[:end], None)
                sizes.add(both(drafter, OptTree(nodes, threshold, limit), text[:end], limit).nodes)
    assert nodes in sizes and len(sizes) > min(nodes, 3) - 1


def test_of_equals_it_takes_the_one_that_python_takes(both):
    text = [1, 1, 2, 1, 3, 4, 3, 5, 4, 5, 5, 3]
    model = TableDrafter(hashed_laws(0, 6, cells=4))
    for table in (NGramDrafter((0.0,)), *(Grafted(model, NGramDrafter((0.0,)), depth) for depth in (1, 2, 3))):
        for end, nodes, threshold in itertools.product(range(2, len(text)), range(1, 20, 3), (0.0, 0.01)):
            table.reset(text[:end], None)
            both(table, OptTree(nodes, threshold, 8), text[:end], 8)


def test_real_prompts(both):
    pair = load_pair("demo", "store:demo")
    for message in ("Write a function that adds two numbers.", "Who was Ada Lovelace? " * 20):
        text = pair.encode(message)
        pair.drafter.reset(text, None)
        for nodes, threshold in ((8, 0.0), (12, 0.05), (60, 0.0)):
            assert both(pair.drafter, OptTree(nodes, threshold), text).nodes >= min(nodes, 8)


def test_it_counts_as_the_text_grows(both):
    """And the one is asked after the other, in any order."""
    text = prompt(200, seed=5, vocab=7)
    for drafter in tables():
        for start in (2, 50):  # another prompt: nothing is left of the one before
            drafter.reset(text[:start], None)
            for end in range(start, start + 60, 3):
                both(drafter, OptTree(9, 0.0), text[:end])
                drafter.observe(outcome_of(text[end : end + 3]))
    drafter = NGramDrafter()
    drafter.reset(text, None)
    known = both(drafter, OptTree(9, 0.0), text)
    drafter.reset([8, 6], None)
    assert known.nodes > 0 == both(drafter, OptTree(9, 0.0), [8, 6]).nodes


def test_a_copy_counts_on_by_itself(both):
    text = prompt(100, seed=6, vocab=7)
    drafter = StoreDrafter(store())
    drafter.reset(text, None)
    before = drawn(both(drafter, OptTree(12, 0.0), text))
    other, third = copy.deepcopy(drafter), pickle.loads(pickle.dumps(NGramDrafter()))
    other.observe(outcome_of([text[-1], 8] * 20))
    longer = [*text, *[text[-1], 8] * 20]
    both(other, OptTree(12, 0.0), longer)
    assert drawn(both(other, OptTree(12, 0.0), text)) != before == drawn(both(drafter, OptTree(12, 0.0), text))
    third.reset(text, None)
    both(third, OptTree(12, 0.0), text)


def test_a_text_is_decoded_as_python_decodes_it(built, monkeypatch):  # noqa: F811
    pair = load_pair("demo", "graft:1:lm:demo+store:demo", dtype="float32")
    decoder = Decoder(pair.target, pair.drafter, OptTree(8, 0.02))
    text, found = pair.encode("Count from one to ten, twice."), []
    for code in (built, None):
        monkeypatch.setattr(native, "code", code)
        made = decoder.generate(text, 24)
        found.append((made.tokens, made.accept_lengths, [drawn(step.tree) for step in made.steps]))
    assert found[0] == found[1]


def test_who_changes_the_law_is_asked(built, monkeypatch):  # noqa: F811
    """A subclass is asked by Python; so is a tree for which much room would have to be made."""

    class Own(StoreDrafter):
        def rows(self, tail):
            return ()

    monkeypatch.setattr(native, "code", built)
    assert looked_up(Own(store()), OptTree(3), [1]).native is None
    assert looked_up(NGramDrafter(), OptTree(3), [1]).native is not None
    assert looked_up(NGramDrafter(), OptTree(100_000), [1]).native is None


def odd(**arrays):
    header, sound = build(documents(prompt(300, vocab=9)), Recipe(VOCAB, order=3))
    return Table(header, sound | arrays)


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    arrays = odd().arrays
    for name, array in arrays.items():
        for wrong in (array[:-1], array[:0], array[None], array.astype(np.int64), array.astype(np.float32), array[::2]):
            save_table(tmp_path / FILE, "store", odd(**{name: wrong}))
            with pytest.raises(CheckpointError, match=f"{tmp_path.name}: .* its arrays do not fit each other"):
                Store.load(tmp_path, VOCAB)
    header, _ = odd()
    for wrong in (Table(header | {"bits": 65}, arrays), Table(header | {"bits": 0}, arrays), Table(header, {})):
        with pytest.raises(CheckpointError):
            Store(wrong)


@pytest.mark.parametrize("wide", [False, True])
def test_whatever_the_arrays_say_nothing_else_is_read(built, monkeypatch, wide):  # noqa: F811
    """Ends before beginnings, beginnings behind the end, keys in no order, tokens of nobody's, the same one twice."""
    monkeypatch.setattr(native, "code", built)
    random, text = np.random.default_rng(0), prompt(60, vocab=9)
    sound, trees = odd().arrays, []
    for turn in range(40):
        changed = {}
        for name in ("keys", "first", "totals", "tokens", "counts"):
            array = sound[name].astype(np.uint64) if wide else sound[name].copy()
            where = random.random(len(array)) < (0.0, 0.3, 1.0)[turn % 3]
            most = np.iinfo(array.dtype).max
            array[where] = random.integers(0, most, where.sum(), array.dtype, endpoint=True)
            changed[name] = np.sort(array) if name == "keys" and turn % 2 else array
        drafter = StoreDrafter(Store(odd(**changed)))
        drafter.reset(text, None)
        trees.append(draft(drafter, OptTree(30, 0.0), text, 9))
        assert ((trees[-1].tokens >= 0) & (trees[-1].tokens < VOCAB)).all()
    assert any(tree.nodes > 9 for tree in trees)


def test_a_token_twice_is_one_child(both):
    tokens = odd().arrays["tokens"].copy()
    tokens[:] = 5
    drafter = StoreDrafter(Store(odd(tokens=tokens)))
    drafter.reset(prompt(9, vocab=9), None)
    assert both(drafter, OptTree(4, 0.0), prompt(9, vocab=9)).tokens.tolist().count(5) > 2


def test_arrays_that_begin_anywhere(both, tmp_path):
    header, arrays = odd()
    shifted = {}
    for name, array in arrays.items():
        room = np.zeros(array.nbytes + 1, np.uint8)
        room[1:] = np.frombuffer(array.tobytes(), np.uint8)
        shifted[name] = room[1:].view(array.dtype)
        assert array.itemsize == 1 or not shifted[name].flags.aligned
    save_table(tmp_path / FILE, "store", Table(header, arrays))
    text = prompt(60, vocab=9)
    trees = []
    for table in (Table(header, shifted), load_table(tmp_path / FILE, "store", VOCAB)):
        drafter = StoreDrafter(Store(table))
        drafter.reset(text, None)
        trees.append(drawn(both(drafter, OptTree(20, 0.0), text)))
    assert trees[0] == trees[1]
