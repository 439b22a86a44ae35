"""The cache against a naive one: a list of rows per layer, from which rows are picked one by one."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_tree.backends.batch.kv_lanes import Storage
from opt_tree.cache import KVCache, LayerShape

CPU = torch.device("cpu")
SHAPES = [
    LayerShape(2, 4, 4, torch.float64, CPU),
    LayerShape(2, 4, 3, torch.float64, CPU),
    LayerShape(1, 4, 4, torch.float64, CPU),
    LayerShape(2, 4, 4, torch.float32, CPU),
]


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    """The storage is made of inference tensors: only a forward in inference mode may write them."""
    with torch.inference_mode():
        yield


class NaiveCache:
    """What KVCache promises, said row by row: `rows[layer]` lists (key, value) of the committed and pending rows."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in SHAPES]
        self.length = 0

    def commit(self, kept: list[int]) -> None:
        self.rows = [rows[: self.length] + [rows[self.length + offset] for offset in kept] for rows in self.rows]
        self.length += len(kept)

    def truncate(self, length: int) -> None:
        self.rows = [rows[:length] for rows in self.rows]
        self.length = length


class Caches:
    """The cache and the naive one, which do the same."""

    def __init__(self, seed: int = 0) -> None:
        self.cache, self.naive, self.generator = KVCache(SHAPES), NaiveCache(), torch.Generator().manual_seed(seed)

    def write(self, rows: int, padded: bool = False) -> None:
        write(self.cache, self.naive, rows, self.generator, padded)

    def commit(self, kept: list[int]) -> None:
        self.cache.commit(kept)
        self.naive.commit(kept)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.naive.truncate(length)

    def assert_same_rows(self) -> None:
        for layer in range(len(SHAPES)):
            assert_rows(self.cache.views[2 * layer : 2 * layer + 2], self.naive.rows[layer])


def write(cache: KVCache, naive: NaiveCache, rows: int, generator: torch.Generator, padded: bool) -> None:
    """One forward of `rows` rows through both caches; what the model would attend to is compared on the way."""
    start = cache.length + cache.pending
    slots = rows + 3 if padded else rows
    cache.open(rows, start + slots + 5 if padded else None, torch.arange(start, start + slots) if padded else None)
    for layer, shape in enumerate(SHAPES):
        new = [
            torch.randn(1, shape.heads, slots, dim, generator=generator, dtype=shape.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        ]
        naive.rows[layer] += [(new[0][:, :, row], new[1][:, :, row]) for row in range(rows)]
        read = cache.update(*new, layer)
        assert_rows(read, naive.rows[layer])
        assert read[0].shape[2] == read[1].shape[2] == (start + slots + 5 if padded else start + rows)


def assert_rows(read: tuple[torch.Tensor, torch.Tensor], expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for kind in range(2 if expected else 0):
        rows = torch.stack([row[kind] for row in expected], 2)
        assert torch.equal(read[kind][:, :, : len(expected)], rows)


write_op = st.tuples(st.just("write"), st.sampled_from([1, 2, 5, 9, 150]), st.booleans())
commit_op = st.tuples(st.just("commit"), st.integers(0, 2**9 - 1), st.just(False))
truncate_op = st.tuples(st.just("truncate"), st.integers(0, 100), st.just(False))


@given(st.lists(st.one_of(write_op, write_op, commit_op, truncate_op), max_size=14))
def test_any_sequence_of_forwards_commits_and_truncations_equals_a_list_of_rows(operations):
    caches = Caches()
    cache, naive = caches.cache, caches.naive
    for kind, number, padded in operations:
        if kind == "write":
            caches.write(number, padded)
        elif kind == "commit":
            caches.commit([offset for offset in range(cache.pending) if number >> offset % 9 & 1])
        else:
            caches.truncate(number % (cache.length + 1))
        assert cache.length == naive.length
        assert cache.length + cache.pending == len(naive.rows[0])
        if cache.capacity:
            caches.assert_same_rows()


def test_storage_grows_with_need_by_doubling_and_is_never_uninitialised():
    cache = KVCache(SHAPES[:1])
    assert cache.capacity == 0
    cache.reserve(10)
    first = cache.capacity
    cache.reserve(first)
    assert cache.capacity == first
    cache.reserve(first + 1)
    assert cache.capacity == 2 * first
    cache.reserve(5 * first)
    assert cache.capacity == 5 * first
    assert all((storage == 0).all() for storage in cache._groups)


@pytest.mark.parametrize("allocation", [0, 2])
def test_a_cache_that_cannot_grow_stays_as_it_was(allocation, monkeypatch):
    """Out of memory in any of its tensors: the text after a long one finds the rows, the views and the capacity."""
    caches = Caches()
    cache = caches.cache
    caches.write(9)
    caches.commit([*range(9)])
    before, left = (cache.capacity, cache.storage_version, cache.views), [allocation]
    zeros = torch.zeros

    def full(*size: int, **more: object) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError
        return zeros(*size, **more)

    with monkeypatch.context() as little:
        little.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.open(5000)
    assert (cache.capacity, cache.storage_version) == before[:2] and cache.pending == 0
    assert all(found is known for found, known in zip(cache.views, before[2], strict=True))
    caches.write(400)
    caches.commit([0, 7])
    caches.assert_same_rows()


def test_lanes_that_cannot_grow_stay_as_they_were(monkeypatch):
    storage = Storage(SHAPES, 2)
    storage.reserve(10)
    slots, views, zeros = storage.slots, storage.views(range(2)), torch.zeros

    def full(size: tuple[int, ...], **more: object) -> torch.Tensor:
        if more["dtype"] == torch.float32:
            raise torch.OutOfMemoryError
        return zeros(size, **more)

    with monkeypatch.context() as little:
        little.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            storage.reserve(1000)
    assert storage.slots == slots and [lane.capacity for lane in storage.lanes] == [slots - 1] * 2
    assert [view.shape for view in storage.views(range(2))] == [view.shape for view in views]
    storage.reserve(1000)
    assert storage.slots == 1001 and all(view.shape[2] == 1001 for view in storage.views(range(2)))


def test_layers_of_one_shape_share_a_tensor_and_others_get_their_own():
    cache = KVCache(SHAPES)
    cache.reserve(1)
    # Keys and values of the first layer and keys of the second; values of the second; the third; the fourth.
    assert sorted(len(storage) for storage in cache._groups) == [1, 2, 2, 3]
    assert len(cache) == 4 and bool(KVCache([]))


@pytest.mark.parametrize("kept", [[3], [0, 0], [1, 0], [-1], [-1, 0], [0, 1, 2, 3]])
def test_rows_that_are_not_pending_cannot_be_kept(kept):
    caches = Caches(1)
    caches.write(4)
    caches.commit([0])
    caches.write(3)
    with pytest.raises(ValueError, match="pending"):
        caches.cache.commit(kept)
    assert (caches.cache.length, caches.cache.pending) == (1, 3)


@pytest.mark.parametrize("length", [-1, 5])
def test_truncating_to_rows_that_do_not_exist_is_refused(length):
    caches = Caches(1)
    caches.write(6)
    caches.commit([0, 1, 2, 3])
    with pytest.raises(ValueError, match=f"truncate 4 rows to {length}"):
        caches.cache.truncate(length)


def test_reset_forgets_the_rows_and_keeps_the_storage():
    caches = Caches(1)
    cache = caches.cache
    caches.write(6)
    caches.commit([0, 1])
    version, capacity = cache.storage_version, cache.capacity
    cache.reset()
    assert (cache.length, cache.pending, cache.capacity) == (0, 0, capacity)
    assert cache.storage_version == version


def test_every_move_of_the_storage_is_counted():
    """Whoever captured addresses, as a CUDA graph does, must not replay them afterwards."""
    cache = KVCache(SHAPES)
    versions, addresses = [], []
    for rows in (10, 200, 300, 301, 2000):
        cache.reserve(rows)
        versions.append(cache.storage_version)
        addresses.append(cache._groups[0].data_ptr())
    moved = [a != b for a, b in itertools.pairwise(addresses)]
    assert [a != b for a, b in itertools.pairwise(versions)] == moved == [False, True, False, True]
