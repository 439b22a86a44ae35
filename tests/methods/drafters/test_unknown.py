"""Rows of -inf: a drafter may know nothing of what follows a node. Then the node has no children."""

import numpy as np
import pytest
import torch
from asking import draft
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableDrafter, hashed_laws

from opt_tree import Random, TopK
from opt_tree.children import Children, LogProbs, log_probs_of
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.drawn import DrawnLayer
from opt_tree.methods.children.draws import probs_of
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.registry import POLICIES, make_policy, takes
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.talon import LayerBest
from opt_tree.policy import OptTree
from opt_tree.pool import CandidatePool, Picked

VOCAB = 7
KINDS: list[Children] = [
    TopK(per_node=2),
    TopK(total=5),
    LayerBest(total=5),
    IID(2),
    WithoutReplacement(per_node=2),
    WithoutReplacement(total=5),
    BestAndDraw(5),
]
TREES = [
    make_policy(name, 6, siblings)
    for name in POLICIES
    for siblings in ((TopK, IID, WithoutReplacement) if takes(name, "siblings") else (TopK,))
]
TREES += [OptTree(6, 0.0, 3), Rheo(6, 0.0, 3), Eagle2(2, 2, 6), Sampled.kary(2, 2, replacement=False)]


def pick(children: Children, log_probs: torch.Tensor, above: np.ndarray, floor: float, seed: int) -> Picked:
    if children.sampled:
        return children.pick(DrawnLayer(log_probs, above, 1, floor), Random(seed))
    return children.pick(LogProbs(log_probs), above, floor)


@pytest.mark.parametrize("children", KINDS, ids=repr)
@pytest.mark.parametrize("floor", [-np.inf, -3.0])
@settings(max_examples=20)
@given(unknown=st.lists(st.booleans(), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_picking_is_as_if_the_unknown_rows_were_not_there(children, floor, unknown, seed):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(unknown), VOCAB)))
    hidden = torch.tensor(unknown)
    log_probs = log_probs_of(scores.masked_fill(hidden[:, None], -torch.inf))
    assert (log_probs[hidden] == -torch.inf).all() and not log_probs.isnan().any()
    above, known = np.linspace(0, -1, len(log_probs)), (~hidden).nonzero().squeeze(1).numpy()
    picked = pick(children, log_probs, above, floor, seed)
    alone = pick(children, log_probs[~hidden], above[known], floor, seed)
    assert picked.tokens.tolist() == alone.tokens.tolist()
    assert picked.path_log_probs.tolist() == alone.path_log_probs.tolist()
    assert picked.rows.tolist() == known[alone.rows].tolist()


@pytest.mark.parametrize("policy", TREES, ids=repr)
@settings(max_examples=6)
@given(unknown=st.sets(st.integers(0, 9)), seed=st.integers(0, 9))
def test_a_node_that_nothing_is_known_about_is_a_leaf(policy, unknown, seed):
    """By the last two tokens of the path: the root among them, and nodes of every depth."""
    laws = hashed_laws(seed, VOCAB)

    def known(path: tuple[int, ...]) -> bool:
        return sum(path[-2:]) % 10 not in unknown

    drafter = TableDrafter(lambda path: laws(path) * known(path))
    tree = draft(drafter, policy, [3, 4], policy.max_depth, random=Random(seed))
    for row, parent in enumerate(tree.parents[1:].tolist(), 1):
        above = (3, 4, *tree.tokens[tree.path_to(parent)[1:]].tolist())
        assert known(above), f"row {row} was drafted below {above}"
    assert np.isfinite(tree.path_log_probs).all()


def test_other_faults_stay_visible():
    """A drafter that answers NaN is broken; it must not pass for one that knows nothing."""
    scores = torch.tensor([[0.0, float("nan")], [-torch.inf, -torch.inf]])
    assert log_probs_of(scores).isnan().any(1).tolist() == [True, False]
    assert probs_of(scores)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("children", [TopK(per_node=2), TopK(total=3), LayerBest(total=3)], ids=repr)
def test_few_tokens_are_picked_like_a_whole_vocabulary(children):
    """A mass below 1 stays what it is; places without a token are passed over."""
    few = LogProbs(torch.tensor([[0.5, 0.2, 0.0], [0.1, 0.3, 0.4]]).log(), torch.tensor([[6, 2, 0], [1, 5, 3]]))
    dense = torch.zeros(2, VOCAB)
    dense.scatter_(1, few.tokens, few.values.exp())
    for floor in (-np.inf, -2.0):
        above = np.linspace(0, -1, 2)
        listed = children.pick(few, above, floor)
        whole = children.pick(LogProbs(dense.log()), above, floor)
        assert sorted(zip(listed.rows, listed.tokens, listed.path_log_probs, strict=True)) == sorted(
            zip(whole.rows, whole.tokens, whole.path_log_probs, strict=True)
        )


@pytest.mark.parametrize("children", [TopK(per_node=2), TopK(total=3)], ids=repr)
def test_an_answer_without_any_column(children):
    pool = CandidatePool(1, children)
    pool.add(LogProbs(torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.long)))
    assert len(pool.newest) == 0 and pool.tree(np.array([0])).nodes == 0
