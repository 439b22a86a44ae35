"""Masks against their definition, slot by slot."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_tree.masks import additive, tree_mask


def sees(visible: np.ndarray, prefix: int, padding: int, row: int, slot: int) -> bool:
    """Whether a row of a padded forward sees a slot: the prefix, what it may see behind it, or a pad row's own slot."""
    behind = slot - prefix
    if behind < 0:
        return True
    if row < padding:
        return behind == visible.shape[1] + row
    return behind < visible.shape[1] and bool(visible[row - padding, behind])


@given(*(st.integers(least, most) for least, most in ((0, 10_000), (1, 5), (0, 4), (0, 6), (0, 3), (0, 3))))
def test_a_row_sees_the_prefix_and_what_it_may(
    seed: int, rows: int, before: int, prefix: int, padding: int, more: int
) -> None:
    """`before`: pending columns of earlier forwards; `more`: keys that are read beyond all slots in use."""
    visible = np.random.default_rng(seed).random((rows, before + rows)) < 0.5
    padded, keys = rows + padding, prefix + before + rows + padding + more
    if padding == more == 0:
        keys = prefix + before + rows
    mask = tree_mask(visible, prefix, padded, keys)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, padded, keys)
    expected = [[sees(visible, prefix, padding, row, slot) for slot in range(keys)] for row in range(padded)]
    assert mask[0, 0].tolist() == expected
    assert tree_mask(visible, prefix, padded, keys, torch.device("meta")).shape == mask.shape, "as on a device"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hidden_keys_get_the_least_finite_number(dtype: torch.dtype) -> None:
    """Of the dtype and of float32: attention may be computed in either, and -inf would make a row of NaN."""
    added = additive(torch.tensor([[True, False]]), dtype)
    assert added.dtype == dtype and torch.isfinite(added.float()).all() and torch.isfinite(added).all()
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    assert added.tolist() == [[0, least]]
