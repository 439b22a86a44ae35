"""Drafters that name a few tokens of each node: the emitted law is the target's, and drawn children are refused."""

import pytest
from enumeration import LAWS, assert_lossless
from table_models import TableDrafter, TableTarget, hashed_laws

from opt_tree import Decoder, OptTree
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.combined.rasd import Rasd
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round

# Tables alone, and joined with a model of the given laws; `keep=False`, so that every outcome meets the same table.
TABLES = {
    "token recycling": lambda model: TokenRecycling(3, keep=False),
}
JOINED = {
    "1 forward": lambda model: Grafted(TableDrafter(model), TokenRecycling(3, keep=False), 1),
    "3 forwards": lambda model: Grafted(TableDrafter(model), TokenRecycling(3, keep=False), 3),
    "rasd": lambda model: Rasd(TableDrafter(model), TokenRecycling(3, keep=False), 3),
    "copying": lambda model: Copying(TableDrafter(model)),
}
MAKERS = TABLES | JOINED
CASES = [(name, laws) for name in TABLES for laws in ("random", "zeros", "disjoint")]
CASES += [(name, laws) for name in JOINED for laws in ("random", "zeros", "certain drafter")]


@pytest.mark.parametrize(("name", "laws"), CASES)
def test_the_emitted_law_is_the_targets(name, laws):
    target, model = LAWS[laws]
    decoder = Decoder(TableTarget(target, 3), MAKERS[name](model), OptTree(4, 0.0, 2))
    assert_lossless(decoder, target)
    assert next(decoder.steps([0, 1, 0], 3)).tree.nodes > 0


@pytest.mark.parametrize("make", [*MAKERS.values(), lambda model: NGramDrafter()], ids=[*MAKERS, "n-grams"])
def test_drawn_children_are_refused(make):
    drafter = make(hashed_laws(2, 3))
    with pytest.raises(TypeError, match=f"{type(drafter).__name__} names a few tokens of each node only"):
        Decoder(TableTarget(hashed_laws(1, 3), 3), drafter, Sampled.chains(2, 2), multi_round)
