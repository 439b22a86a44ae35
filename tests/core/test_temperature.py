"""`Temperature` by its definition, row by row as well; and `TopK` by its own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_laws
from torch import Tensor

from opt_tree.children import LogProbs, TopK
from opt_tree.sampling import LazyLogits, Temperature
from opt_tree.tree import Tree

CONTEXT = [3, 5, 3, 1]
TREE = Tree.of([1, 5, 3, 5, 7, 3], [-1, 0, 0, 1, 1, 2])
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def logits_of(dtype: torch.dtype) -> Tensor:
    return (torch.randn(len(TREE), 12, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1, 1.7])
def test_logits_are_divided_in_float32_at_least(dtype: torch.dtype, temperature: float) -> None:
    """All rows at once, or each when it is asked for: the same numbers, and the model's own are left alone."""
    logits, sampling = logits_of(dtype), Temperature(temperature)
    wide = logits.to(torch.promote_types(dtype, torch.float32)) / temperature
    together, lazy = sampling.process(logits, TREE, CONTEXT), sampling.processed(logits, TREE, CONTEXT)
    assert together.dtype == wide.dtype and torch.equal(together, wide) and torch.equal(sampling.warp(logits), wide)
    assert isinstance(lazy, LazyLogits) and lazy.shape == together.shape and len(lazy) == len(together)
    for row in (5, 0, 3, 5):
        assert torch.equal(lazy[row], together[row])
    assert torch.equal(logits, logits_of(dtype)), "written over"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_temperature_0_logits_pass_through(dtype: torch.dtype) -> None:
    logits, sampling = logits_of(dtype), Temperature()
    assert sampling.greedy and not Temperature(1e-9).greedy
    assert sampling.process(logits, TREE, CONTEXT) is sampling.processed(logits, TREE, CONTEXT) is logits
    assert torch.equal(sampling.warp(logits), logits) and sampling.warp(logits).dtype.itemsize >= 4


def test_a_row_is_processed_once_and_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    warped, warp = [], Temperature.warp
    monkeypatch.setattr(Temperature, "warp", lambda self, rows: warped.append(rows) or warp(self, rows))
    lazy = Temperature(0.5).processed(logits_of(torch.float32), TREE, CONTEXT)
    assert not warped
    assert lazy[4] is lazy[4] and [len(rows) for rows in warped] == [1]


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_why_nothing_can_be_drawn(fault: float) -> None:
    logits = logits_of(torch.float32)
    assert Temperature(1.0).why_none(logits, TREE, CONTEXT, 2) == "its probability is 0"
    logits[2, 7] = fault
    assert Temperature(1.0).why_none(logits, TREE, CONTEXT, 1) == "its probability is 0"
    assert "the model's logits are not numbers" in Temperature(1.0).why_none(logits, TREE, CONTEXT, 2)


@pytest.mark.parametrize("number", [-0.5, float("nan"), float("inf"), 10**400], ids=["below", "nan", "inf", "huge"])
def test_bad_temperatures_are_named(number: float) -> None:
    with pytest.raises(ValueError, match=f"temperature must be 0 .* got {number}"):
        Temperature(number)


# ---- children


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12), st.sampled_from([None, 2, 3]), st.booleans())
def test_top_k_keeps_the_best_above_the_floor(seed, width, total, cells, first):
    """`total`: the best of all rows together, those at or below the floor optional; never one of probability 0."""
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        laws = np.log(np.stack([hashed_laws(seed, 4, cells)((row,)) for row in range(width)]))
    above = np.log(rng.random(width))
    floor = -np.inf if first else float(np.log(rng.random()))
    picked = TopK(total=total).pick(LogProbs(torch.from_numpy(laws)), above, floor)
    values, tokens, rows = picked.path_log_probs, picked.tokens, picked.rows
    everything = laws + above[:, None]
    assert values.tolist() == everything[rows, tokens].tolist()
    assert len({*zip(rows.tolist(), tokens.tolist(), strict=True)}) == len(values) <= total
    assert (values > -np.inf).all()
    wanted = sorted((v for v in everything.flatten().tolist() if v > floor), reverse=True)[:total]
    got = sorted((v for v in values.tolist() if v > floor), reverse=True)
    assert got == pytest.approx(wanted, abs=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6))
def test_top_k_per_node_ranks_every_row(seed: int, width: int, per_node: int) -> None:
    laws = torch.from_numpy(np.stack([hashed_laws(seed, 5)((row,)) for row in range(width)])).log()
    above = -torch.arange(width, dtype=torch.float64)
    picked = TopK(per_node=per_node).pick(LogProbs(laws), above.numpy(), -np.inf)
    values, tokens, rows = picked.path_log_probs, picked.tokens, picked.rows
    keep = min(per_node, 5)
    assert rows.tolist() == [row for row in range(width) for _ in range(keep)]
    assert tokens.reshape(width, keep).tolist() == laws.argsort(-1, descending=True)[:, :keep].tolist()
    assert values.tolist() == (laws[rows, tokens] + above[rows]).tolist()
