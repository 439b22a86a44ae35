"""Trees: depths, ancestors, E(A) and paths, each against a walk along the parents."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_tree.tree import Tree, fetch, send


@st.composite
def parent_arrays(draw: st.DrawFn) -> list[int]:
    """Any rooted tree of up to 20 rows in topological order, deep and wide ones alike."""
    rows = draw(st.integers(1, 20))
    reach = draw(st.sampled_from([1, 3, 20]))  # how far back a parent may lie: 1 gives chains
    return [-1] + [draw(st.integers(max(0, row - reach), row - 1)) for row in range(1, rows)]


def grow(parents: list[int], log_probs: np.ndarray | None = None) -> Tree:
    rows = len(parents)
    values = np.zeros(rows) if log_probs is None else log_probs
    return Tree(np.arange(100, 100 + rows), np.array(parents), values, np.full(rows, -1))


def walk(parents: list[int], row: int) -> list[int]:
    """The rows from the root to `row`, by walking up."""
    path = [row]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path[::-1]


@given(parent_arrays())
def test_a_tree_is_what_a_walk_along_the_parents_finds(parents: list[int]) -> None:
    tree = grow(parents)
    assert len(tree) == len(parents) == tree.nodes + 1
    for row in range(len(parents)):
        path = walk(parents, row)
        assert tree.depths[row] == len(path) - 1
        assert tree.ancestors[row].nonzero()[0].tolist() == path  # ancestors lie before a row, so the order is theirs
        assert tree.path_to(row).tolist() == path


def test_expected_accepted_leaves_the_root_out_and_is_summed_in_double_precision() -> None:
    values = np.log(np.array([1.0] + [1e-4] * 10_000)).astype(np.float32)
    wide = grow([-1] + [0] * 10_000, values)
    assert wide.expected_accepted == pytest.approx(10_000 * np.exp(float(values[1])), rel=1e-12)
    tree = grow([-1, 0, 0, 1], np.log([1.0, 0.5, 0.25, 0.125]))
    assert tree.expected_accepted == pytest.approx(0.875, abs=1e-15)
    assert grow([-1]).expected_accepted == 0


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([0, 0], id="the root has a parent"),
        pytest.param([-1, -1], id="two roots"),
        pytest.param([-1, 1], id="its own parent"),
        pytest.param([-1, 2, 0], id="a parent behind its child"),
        pytest.param([-1, 0, -2], id="no such row"),
    ],
)
def test_rows_out_of_order_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="topological") as error:
        grow(parents)
    assert str(parents) in str(error.value)


@pytest.mark.parametrize("host", [True, False])
def test_fetch_copies_several_tensors_in_one_read(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a device: whatever their shapes and dtypes, in the order in which they were given."""
    monkeypatch.setattr("opt_tree.tree.on_host", lambda tensor: host)
    given = [
        torch.tensor([[True, False, True]]),
        torch.arange(6).view(2, 3).T,
        torch.zeros(0, 2, dtype=torch.float16),
        torch.tensor([0.5, -1.0, 3.0], dtype=torch.float32),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    for count in range(1, len(given) + 1):
        for array, tensor in zip(fetch(*given[:count]), given, strict=False):
            assert array.dtype == tensor.numpy().dtype and array.shape == tensor.shape
            assert array.tolist() == tensor.tolist()


def test_send_casts_and_on_the_host_shares() -> None:
    array, host = np.array([1, 2]), torch.device("cpu")
    assert send(array, host, torch.half).dtype == torch.half
    assert send(array, host).data_ptr() == torch.from_numpy(array).data_ptr()


def test_fetch_copies_to_numpy() -> None:
    numbers, flags = fetch(torch.tensor([1, 2]), torch.tensor([True]))
    assert numbers.tolist() == [1, 2] and flags.dtype == bool
