"""The cache of rows against plain lists: whatever is written, kept and dropped, in whatever order."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_tree.cache import KVCache, LayerShape

HOST = torch.device("cpu")
SHAPES = [
    LayerShape(2, 3, 3, torch.float64, HOST),
    LayerShape(2, 3, 5, torch.float64, HOST),
    LayerShape(1, 3, 3, torch.float32, HOST),
]


class Lists:
    """A cache, and for each of its layers the keys and values of the committed and pending rows, one by one."""

    def __init__(self) -> None:
        self.cache, self.length, self.written = KVCache(SHAPES), 0, 0
        self.rows: list[list[tuple[float, float]]] = [[] for _ in SHAPES]

    @torch.inference_mode()
    def write(self, rows: int, padding: int, more: int = 0) -> None:
        """Run a forward: padding lies in front and is written behind the rows in use; `more`: keys beyond these."""
        start = len(self.rows[0])
        keys, end = start + rows + more, start + rows + padding
        slots = [*range(start + rows, end), *range(start, start + rows)]
        self.cache.open(rows, keys if more else None, torch.tensor(slots) if padding else None)
        assert self.cache.get_seq_length() == start
        for layer, shape in enumerate(SHAPES):
            numbers = torch.arange(2.0 * len(slots)).view(2, -1) + 1 + self.written
            self.written += 2 * len(slots)
            given = [
                one[None, None, :, None].expand(1, shape.heads, -1, dim).to(shape.dtype)
                for one, dim in zip(numbers, (shape.key_dim, shape.value_dim), strict=True)
            ]
            self.rows[layer] += zip(*numbers[:, padding:].tolist(), strict=True)
            for shown, place in zip(self.cache.update(*given, layer), (0, 1), strict=True):
                assert shown.shape[2] == keys
                assert shown[0, 0, : start + rows, 0].tolist() == [row[place] for row in self.rows[layer]]

    def keep(self, kept: list[int]) -> None:
        self.cache.commit(kept)
        self.rows = [rows[: self.length] + [rows[self.length + row] for row in kept] for rows in self.rows]
        self.length += len(kept)

    def cut(self, length: int) -> None:
        self.cache.truncate(length)
        self.rows, self.length = [rows[:length] for rows in self.rows], length

    def check(self) -> None:
        cache = self.cache
        assert cache.length == self.length and cache.pending == len(self.rows[0]) - self.length
        assert len(cache) == len(SHAPES) and cache
        for place, view in enumerate(cache.views):
            shape, used = SHAPES[place // 2], len(self.rows[0])
            assert view.shape == (1, shape.heads, cache.capacity, (shape.key_dim, shape.value_dim)[place % 2])
            assert view.dtype == shape.dtype and torch.isfinite(view).all()
            expected = torch.tensor([row[place % 2] for row in self.rows[place // 2]])
            assert (view[0, :, :used].double() == expected[None, :, None]).all()


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_rows_are_where_lists_have_them(seed: int) -> None:
    rng, lists = np.random.default_rng(seed), Lists()
    for _ in range(8):
        pending, what = len(lists.rows[0]) - lists.length, rng.integers(6)
        if what < 2 or not pending:
            full = max(lists.cache.capacity - len(lists.rows[0]), 1)  # as many as the storage has room for
            lists.write(*(int(rng.choice(numbers)) for numbers in ([1, 3, 40, 300, full], [0, 0, 5], [0, 2, 9])))
        elif what < 4:
            kept = np.sort(rng.permutation(pending)[: rng.integers(pending + 1)])
            lists.keep((kept if rng.random() < 0.7 else np.arange(len(kept))).tolist())
        elif what == 4:
            lists.cut(int(rng.integers(lists.length + 1)))
        else:
            lists.cache = copy.deepcopy(lists.cache) if rng.random() < 0.5 else pickle.loads(pickle.dumps(lists.cache))
        lists.check()
    lists.cache.reset()
    assert lists.cache.length == lists.cache.pending == 0


@pytest.mark.parametrize("rows", [0, 1, 2, 300])
def test_a_copy_has_a_storage_of_its_own(rows: int) -> None:
    lists = Lists()
    if rows:
        lists.write(rows, 0)
    first, lists.cache = lists.cache, copy.deepcopy(lists.cache)
    lists.check()
    lists.write(1, 0), lists.check()
    assert first.pending == rows and not any(view[:, :, rows:].any() for view in first.views)


def test_storage_grows_by_doubling_and_says_when_it_moves() -> None:
    cache = KVCache(SHAPES)
    assert (cache.capacity, cache.storage_version) == (0, 0) and not cache.views
    seen = []
    for rows in (1, 256, 257, 512, 3000, 100):
        cache.reserve(rows)
        seen.append((cache.capacity, cache.storage_version))
    assert seen == [(256, 1), (256, 1), (512, 2), (512, 2), (3000, 3), (3000, 3)]
    assert not any(view.any() for view in cache.views)


@pytest.mark.parametrize("kept", [[0, 4], [1, 0], [2, 2], [-1], [0, 1, 2, 3, 4]], ids=str)
def test_rows_that_are_not_pending_are_not_kept(kept: list[int]) -> None:
    lists = Lists()
    lists.write(6, 0)
    lists.keep([0, 1])
    lists.write(4, 0)
    with pytest.raises(ValueError, match=rf"cannot keep rows \[{str(kept)[1:-1]}\] of 4 pending ones"):
        lists.cache.commit(kept)
    lists.check()


@pytest.mark.parametrize("length", [-1, 3])
def test_a_context_is_not_cut_to_what_it_is_not(length: int) -> None:
    lists = Lists()
    lists.write(3, 0)
    lists.keep([0, 2])
    with pytest.raises(ValueError, match=f"cannot truncate 2 rows to {length}"):
        lists.cache.truncate(length)
    lists.check()
    assert lists.cache.can_cut(0)
