"""Pools: what is kept, what a frontier may see, and which selections are trees.

The reference is a plain list of every child ever offered, with its branch; nothing is pruned there.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_laws, log_rows

from opt_tree.children import LogProbs, TopK
from opt_tree.pool import CandidatePool, Frontier

Branch = tuple[int, ...]
ROOT = 7


@dataclass
class Grown:
    """A pool after some layers, with what a bookkeeper without cleverness wrote down."""

    pool: CandidatePool
    offered: dict[Branch, float]
    """Every child of every expanded node and its log-probability."""
    expanded: list[Branch]
    """In the order of their draft rows; the root is draft row 0."""

    def branch(self, row: int) -> Branch:
        """The tokens below the root on the way to a pool row."""
        tokens: list[int] = []
        while row:
            tokens.append(int(self.pool.tokens[row]))
            row = int(self.pool.parents[row])
        return tuple(tokens[::-1])


def grow(seed: int, vocab: int, children: TopK, layers: int, cells: int | None, best: int | None) -> Grown:
    """Expand random newest nodes, `layers` times; with `best`, only nodes among the `best` best, as policies do."""
    laws, rng = hashed_laws(seed, vocab, cells), np.random.default_rng(seed)
    pool = CandidatePool(ROOT, children)
    grown = Grown(pool, {}, [()])
    frontier: list[Branch] = [()]
    for layer in range(layers):
        law = log_rows(laws, frontier)
        for branch, row in zip(frontier, law.tolist(), strict=True):
            above = grown.offered.get(branch, 0.0)
            grown.offered |= {(*branch, token): above + value for token, value in enumerate(row) if value > -np.inf}
        pool.add(LogProbs(law))
        open_rows = pool.newest if best is None else np.intersect1d(pool.newest, pool.best(best))
        rows = open_rows[rng.random(len(open_rows)) < 0.7] if best is None else open_rows
        if layer == layers - 1 or not len(rows):
            break
        view = pool.frontier(rows)
        check_frontier(grown, rows, view)
        frontier = [grown.branch(row) for row in rows]
        grown.expanded += frontier
    return grown


def check_frontier(grown: Grown, rows: np.ndarray, view: Frontier) -> None:
    """A frontier names its nodes by draft rows, and each sees itself and its ancestors, nothing else."""
    branches = [grown.branch(row) for row in rows]
    everyone = grown.expanded[1:] + branches  # column k - 1 is draft row k
    assert view.tokens.tolist() == [branch[-1] for branch in branches]
    assert view.depths.tolist() == [len(branch) for branch in branches]
    assert [(grown.expanded + branches)[parent] for parent in view.parents] == [branch[:-1] for branch in branches]
    assert view.visible.tolist() == [[branch[: len(other)] == other for other in everyone] for branch in branches]


kinds = st.sampled_from([TopK(per_node=n) for n in (1, 2, 9)] + [TopK(total=n) for n in (1, 4, 9)])
seeds = st.integers(0, 10_000)
cells = st.sampled_from([None, 1, 2, 4])


@given(seeds, st.integers(2, 4), kinds, st.integers(1, 5), cells)
def test_a_pool_keeps_branches_with_their_values(seed, vocab, children, layers, cells):
    grown = grow(seed, vocab, children, layers, cells, None)
    pool = grown.pool
    assert pool.tokens[0] == ROOT and pool.parents[0] == -1 and pool.path_log_probs[0] == 0
    branches = [grown.branch(row) for row in range(len(pool.tokens))]
    assert len(set(branches)) == len(branches)
    for row in range(1, len(branches)):
        assert pool.parents[row] < row and pool.path_log_probs[row] <= pool.path_log_probs[pool.parents[row]]
        assert pool.depths[row] == len(branches[row])
        assert pool.path_log_probs[row] == pytest.approx(grown.offered[branches[row]], abs=1e-12)
    assert pool.newest.tolist() == list(range(pool.layer, len(branches)))
    numbered = {branch: number for number, branch in enumerate(grown.expanded)}
    assert pool.draft_rows.tolist() == [numbered.get(branch, -1) for branch in branches]


def test_a_pool_outgrows_its_first_storage() -> None:
    """84 expanded nodes and 340 candidates; `grow` checks what each frontier sees."""
    pool = grow(0, 4, TopK(per_node=4), 4, None, 1000).pool
    assert len(pool.tokens) == 341 and pool.draft_rows.max() == 84


@given(seeds, st.integers(2, 4), st.integers(1, 9), st.integers(1, 5), cells)
def test_the_best_candidates_are_those_of_an_unpruned_pool(seed, vocab, total, layers, cells):
    grown = grow(seed, vocab, TopK(total=total), layers, cells, total)
    best = grown.pool.best(total)
    values = sorted(grown.offered.values(), reverse=True)[:total]
    assert best[0] == 0
    assert grown.pool.path_log_probs[best[1:]] == pytest.approx(np.array(values), abs=1e-12)


@given(seeds, st.integers(2, 4), kinds, st.integers(1, 5), cells, st.integers(1, 12))
def test_every_number_of_best_candidates_is_a_tree(seed, vocab, children, layers, cells, nodes):
    grown = grow(seed, vocab, children, layers, cells, None)
    pool = grown.pool
    rows = pool.best(nodes)
    tree = pool.tree(rows)  # raises for an orphan
    assert len(tree) == min(nodes + 1, len(pool.tokens))
    chosen = np.sort(rows)
    assert tree.tokens.tolist() == pool.tokens[chosen].tolist()
    assert tree.path_log_probs.tolist() == pool.path_log_probs[chosen].tolist()
    assert tree.draft_rows.tolist() == pool.draft_rows[chosen].tolist()
    assert tree.depths.tolist() == pool.depths[chosen].tolist()
    branches = [tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(len(tree))]
    assert branches == [grown.branch(row) for row in chosen]


@given(seeds, st.integers(2, 3), st.integers(1, 4), st.integers(1, 6))
def test_the_gain_is_what_the_newest_layer_adds_to_the_best(seed: int, vocab: int, layers: int, nodes: int) -> None:
    pool = grow(seed, vocab, TopK(per_node=vocab), layers, None, 100).pool
    early = pool.path_log_probs[1 : pool.layer]
    before, now = (sum(sorted(np.exp(values), reverse=True)[:nodes]) for values in (early, pool.path_log_probs[1:]))
    assert pool.tree(pool.best(nodes)).expected_accepted == pytest.approx(now, abs=1e-12)
    assert pool.gain(nodes) == pytest.approx(now - before, abs=1e-12)


def test_a_child_rounded_above_its_parent_is_lowered_to_it() -> None:
    """Rounding in a drafter's narrow dtype must not break the order that makes selections trees."""
    pool = CandidatePool(ROOT, TopK(per_node=1))
    pool.add(LogProbs(torch.tensor([[-1.0]], dtype=torch.float64)))
    pool.frontier(pool.newest)
    pool.add(LogProbs(torch.tensor([[1e-9]], dtype=torch.float64)))
    assert pool.path_log_probs.tolist() == [0, -1, -1]
    assert pool.best(1).tolist() == [0, 1]


def test_deep_products_do_not_underflow() -> None:
    """1e-30 a layer is 0 as a float32 product from the second layer on; the order of candidates must survive."""
    pool = CandidatePool(ROOT, TopK(per_node=2))
    for _ in range(20):
        pool.add(LogProbs(torch.tensor([[-60.0, -69.0]], dtype=torch.float32)))
        pool.frontier(pool.newest[:1])
    assert np.isfinite(pool.path_log_probs).all()
    assert pool.path_log_probs[-1] == pytest.approx(-60 * 19 - 69)
    assert pool.tree(pool.best(5)).depths.tolist() == [0, 1, 1, 2, 2, 3]


def test_selecting_what_is_no_tree_is_refused() -> None:
    pool = CandidatePool(ROOT, TopK(per_node=1))
    pool.add(LogProbs(torch.tensor([[0.0]])))
    pool.frontier(pool.newest)
    pool.add(LogProbs(torch.tensor([[0.0]])))
    with pytest.raises(ValueError, match="candidate 2 was selected without its parent 1"):
        pool.tree(np.array([0, 2]))
    for wrong in (np.array([0, 9]), np.array([0, 1 << 40])):
        with pytest.raises(IndexError):
            pool.tree(wrong)


@given(
    seeds,
    st.integers(1, 5),
    st.sampled_from([2, 255, 256, 300, 1500]),
    st.sampled_from([1, 4, 60, 200]),
    st.booleans(),
    st.sampled_from([None, 3]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_host_picks_the_children_that_a_device_would(seed, width, vocab, total, full, cells, dtype):
    """The best `total` of a layer, found through a bound on the host; `full`: the pool has a floor already."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(width, vocab)) if cells is None else rng.integers(0, cells, (width, vocab)).astype(float)
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[:, 0] = 0
    log_probs = torch.from_numpy(scores).log_softmax(-1).to(dtype)
    above = np.sort(-rng.random(width))[::-1].copy()
    floor = -np.inf
    if full:
        everything = np.sort((log_probs.double().numpy() + above[:, None]).ravel())
        floor = float(everything[-min(total // 2 + 1, len(everything))])
    answer, children = LogProbs(log_probs), TopK(total=total)
    with pytest.MonkeyPatch.context() as patch:
        ours = children.pick(answer, above, floor)
        patch.setattr("opt_tree.children.on_host", lambda tensor: False)
        theirs = children.pick(answer, above, floor)
    # The floor is a child's own value here: whether that child is above it is a matter of rounding.
    above_it = [sorted(x for x in one.path_log_probs.tolist() if x > floor + 1e-5) for one in (ours, theirs)]
    assert above_it[0] == above_it[1]
    assert len(ours.path_log_probs) <= total and (ours.path_log_probs > floor - 1e-6).all()
    for picked in (ours, theirs):
        named = [*zip(picked.rows, picked.tokens, strict=True)]
        assert named == sorted({*named}), "in the order of nodes and tokens: equal ones rank in the order of storage"
        values = log_probs.numpy()[picked.rows, picked.tokens] + above[picked.rows].astype(log_probs.numpy().dtype)
        assert values.tolist() == picked.path_log_probs.tolist()


@given(seeds, st.sampled_from([TopK(per_node=3), TopK(total=1), TopK(total=7)]))
def test_children_are_picked_from_the_best_that_a_model_named(seed: int, children: TopK) -> None:
    """Of each node as many as may be wanted, with their tokens; where it named fewer, from its whole distributions."""
    rng, columns = np.random.default_rng(seed), 20
    whole = LogProbs(torch.from_numpy(rng.normal(size=(3, columns))).log_softmax(-1))
    above = np.sort(-rng.random(3))[::-1].copy()
    for named in (7, 2):
        best = LogProbs(*whole.values.topk(named), lambda: whole)
        expected, picked = children.pick(whole, above, -4.0), children.pick(best, above, -4.0)
        rows = [sorted(zip(one.rows, one.tokens, one.path_log_probs, strict=True)) for one in (expected, picked)]
        assert rows[0] == rows[1] and len(rows[0]) > 0
