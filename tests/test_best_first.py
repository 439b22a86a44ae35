"""OPT-Tree over a table, node by node: the tree of the loop, layer by layer."""

import numpy as np
import pytest
from models import VOCAB, prompt
from test_store import documents

from opt_tree import OptTree
from opt_tree.best_first import best_first
from opt_tree.decode import draft
from opt_tree.drafters import NGramDrafter, Store, StoreDrafter, TokenRecycling
from opt_tree.training.store import Recipe, build


class Layered(OptTree):
    """The same policy for whoever does not look inside: it takes the loop."""


def drafters():
    store = Store(build(documents(prompt(600, seed=3, vocab=9), prompt(300, seed=4)), Recipe(VOCAB, order=3)))
    yield NGramDrafter((3.1,))
    yield NGramDrafter((4.3, 2.1, 1.3, 0.7))
    yield StoreDrafter(store)
    yield StoreDrafter(store, weight=0)
    yield StoreDrafter(store, (0.3, 0.2, 0.1))


@pytest.mark.parametrize("nodes", [1, 2, 7, 24, 60])
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_the_tree_is_the_loops(nodes, limit):
    sizes = set()
    for seed in range(4):
        text = prompt(90, seed=seed, vocab=9)
        for drafter in drafters():
            for end in (1, 2, 20, 90):
                drafter.reset(text[:end], None)
                quick = draft(drafter, OptTree(nodes, 0.0, limit), text[:end], limit)
                loops = draft(drafter, Layered(nodes, 0.0, limit), text[:end], limit)
                assert quick.tokens.tolist() == loops.tokens.tolist()
                assert quick.parents.tolist() == loops.parents.tolist()
                assert quick.path_log_probs == pytest.approx(loops.path_log_probs, abs=1e-12)
                sizes.add(quick.nodes)
    assert nodes in sizes or nodes > 9


def test_of_equals_the_one_that_the_loop_drafts_first_is_taken():
    """Always 1, and then half the time 1 or 2: paths of 1, 1/2, 1/2, 1/2, 1/2, ... of every length."""
    drafter = NGramDrafter((0.0,))
    text = [1, 1, 2, 1, 3, 4, 3, 5, 4, 5, 5, 3]
    for end in range(2, len(text)):
        drafter.reset(text[:end], None)
        for nodes in range(1, 20):
            quick, loops = (draft(drafter, kind(nodes, 0.0, 8), text[:end], 8) for kind in (OptTree, Layered))
            assert (quick.tokens.tolist(), quick.parents.tolist()) == (loops.tokens.tolist(), loops.parents.tolist())


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


def test_whatever_else_takes_the_loop():
    table, context = NGramDrafter(), [1, 2, 1]
    table.reset(context, None)
    assert best_first(table, OptTree(3, 0.0), context, 4) is not None
    assert best_first(table, OptTree(3, 0.1), context, 4) is None
    assert best_first(table, Layered(3, 0.0), context, 4) is None
    assert best_first(TokenRecycling(9), OptTree(3, 0.0), context, 4) is None
