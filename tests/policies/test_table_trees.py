"""OPT-Tree over a table, node by node: the tree of the loop, layer by layer."""

import numpy as np
import pytest
import torch
from drafters.test_store import documents
from table_models import TableDrafter, hashed_laws
from tiny_models import VOCAB, prompt

from opt_tree import OptTree
from opt_tree.core.continuations import GrowsOverContinuations
from opt_tree.core.target import Output
from opt_tree.decoding.draft import draft
from opt_tree.drafters import (
    Grafted,
    NGramDrafter,
    Sharpened,
    Store,
    StoreDrafter,
    TokenRecycling,
)
from opt_tree.policies import Eagle2
from opt_tree.training.fitting.store import Recipe, build


class Layered(OptTree):
    """The same policy for whoever does not look inside: it takes the loop."""


def tables():
    store = Store(build(documents(prompt(600, seed=3, vocab=9), prompt(300, seed=4)), Recipe(VOCAB, order=3)))
    yield NGramDrafter((3.1,))
    yield NGramDrafter((4.3, 2.1, 1.3, 0.7))
    yield StoreDrafter(store)
    yield StoreDrafter(store, weight=0)
    yield StoreDrafter(store, (0.3, 0.2, 0.1))
    yield TokenRecycling(VOCAB, (0.41, 0.23, 0.11, 0.0, 0.02))


def drafters():
    yield from tables()
    for depth, table in enumerate(tables()):
        cells = (None, 16)[depth % 2]
        yield Grafted(TableDrafter(hashed_laws(depth, VOCAB, cells)), table, 1 + depth % 3)


def begin(drafter, text, seed=0):
    """Begin a prompt after a prefill of random logits, which recycling learns from."""
    logits = 2 * torch.randn(max(len(text) - 1, 0), VOCAB, generator=torch.Generator().manual_seed(seed))
    drafter.reset(text, Output(logits) if len(logits) else None)


def drawn(tree):
    return tree.tokens.tolist(), tree.parents.tolist()


@pytest.mark.parametrize(
    ("nodes", "limit", "threshold"),
    [(1, 9, 0.0), (2, 2, 0.02), (7, 9, 0.0), (7, 1, 0.1), (24, 9, 0.02), (24, 2, 0.0), (60, 9, 0.0), (60, 9, 0.3)],
)
def test_the_tree_is_the_loops(nodes, limit, threshold):
    sizes, depths = set(), set()
    for seed in range(3):
        text = prompt(90, seed=seed, vocab=9)
        for drafter in drafters():
            for end in (1, 2, 20, 90):
                begin(drafter, text[:end], seed)
                quick = draft(drafter, OptTree(nodes, threshold, limit), text[:end], limit)
                loops = draft(drafter, Layered(nodes, threshold, limit), text[:end], limit)
                assert drawn(quick) == drawn(loops)
                assert quick.path_log_probs == pytest.approx(loops.path_log_probs, abs=1e-12)
                sizes.add(quick.nodes)
                depths.add(quick.depths.max())
    assert nodes in sizes or nodes > 9
    assert max(depths) > min(limit - 1, nodes // 7, 3)


def test_of_equals_the_one_that_the_loop_drafts_first_is_taken():
    """Always 1, and then half the time 1 or 2: paths of 1, 1/2, 1/2, 1/2, 1/2, ... of every length."""
    text = [1, 1, 2, 1, 3, 4, 3, 5, 4, 5, 5, 3]
    model = TableDrafter(hashed_laws(0, 6, cells=4))
    for table in (NGramDrafter((0.0,)), *(Grafted(model, NGramDrafter((0.0,)), depth) for depth in (1, 2, 3))):
        for end in range(2, len(text)):
            table.reset(text[:end], None)
            for nodes in (1, 2, 3, 5, 8, 13, 19):
                for threshold in (0.0, 0.01):
                    quick, loops = (
                        draft(table, kind(nodes, threshold, 8), text[:end], 8) for kind in (OptTree, Layered)
                    )
                    assert drawn(quick) == drawn(loops)


def test_asked_below_nodes_of_the_tree_only():
    drafter, asked = NGramDrafter((2.0, 1.0)), []
    text = prompt(200, seed=2, vocab=7)
    drafter.reset(text, None)
    law = drafter.law
    drafter.law = lambda tail: (asked.append(tail), law(tail))[1]
    tree = draft(drafter, OptTree(12, 0.0, 3), text, 3)
    assert tree.nodes == 12 and len(asked) == (tree.draft_rows >= 0).sum() < 13
    assert sorted(tree.draft_rows[tree.draft_rows >= 0]) == list(range(len(asked)))
    assert (tree.draft_rows[tree.depths == 3] == -1).all() and (tree.depths == 3).any()
    for row in np.flatnonzero(tree.draft_rows >= 0).tolist():
        path = [*text, *tree.tokens[tree.path_to(row)[1:]].tolist()]
        assert asked[tree.draft_rows[row]] == tuple(path[-2:])


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_a_models_rows_come_first(threshold):
    text, model = prompt(200, seed=2, vocab=5), TableDrafter(hashed_laws(1, 5))
    drafter = Grafted(model, NGramDrafter((2.0, 1.0)), 2)
    drafter.reset(text, None)
    rows, loops = (draft(drafter, kind(12, threshold, 8), text, 8).draft_rows for kind in (OptTree, Layered))
    own = 1 + len(model.expanded[-1][0])
    assert (rows >= own).any()
    assert np.where(rows < own, rows, -1).tolist() == np.where(loops < own, loops, -1).tolist()


def test_whatever_else_takes_the_loop():
    table, model = NGramDrafter(), TableDrafter(hashed_laws(1, VOCAB))
    assert table.continuations().first == 0
    assert Grafted(model, table, 2).continuations().first == 2
    assert model.continuations() is None is Sharpened(model, 0.5).continuations()
    assert isinstance(OptTree(3), GrowsOverContinuations)
    assert not isinstance(Layered(3), GrowsOverContinuations)  # it may expand in another way
    assert not isinstance(Eagle2(nodes=3), GrowsOverContinuations)
