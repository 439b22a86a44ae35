"""Native code: it grows the trees that numpy grows, bit by bit; and where it cannot be built, numpy grows them."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.exc import InvalidCxxCompiler

from opt_tree import native
from opt_tree.compiling import use_native_code
from opt_tree.policies import Costs, OptTree, Priced
from opt_tree.policies.priced import KNOTS
from opt_tree.pool import CandidatePool
from opt_tree.probabilities import grouped_log_probs
from opt_tree.random import Random
from opt_tree.target import Laws
from opt_tree.tree import Tree, ancestor_mask
from opt_tree.verifiers import greedy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> native.Code:
    """The calls of the native code, built once for these tests."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setenv("OPT_TREE_CACHE", str(tmp_path_factory.mktemp("packages")))
        patch.setattr(native, "code", None)
        use_native_code()
        assert native.code is not None
        return native.code


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which nothing was built yet: the folder of its packages."""
    monkeypatch.setattr(native, "code", None)
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def laws(rng: np.random.Generator, frontier: int, vocab: int, kind: str, dtype: torch.dtype) -> Laws:
    """What a drafter may say: of all tokens in groups or not, of a reduced vocabulary, of a few tokens each."""
    scores = rng.normal(size=(frontier, vocab)) * 3
    if rng.random() < 0.5:
        scores = np.round(scores / 3)  # equals abound
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[:, 0] = 0
    log_probs, peaks = grouped_log_probs(torch.from_numpy(scores), torch.ones((), dtype=dtype), vocab)
    if rng.random() < 0.2:
        log_probs[0], peaks[0] = -torch.inf, -torch.inf  # nothing is known there
    columns = log_probs.shape[1]
    if kind == "reduced":
        return Laws(log_probs, torch.from_numpy(np.sort(rng.permutation(2 * columns)[:columns])), peaks)
    if kind == "few":
        return Laws(log_probs, torch.from_numpy(np.stack([rng.permutation(columns) for _ in range(frontier)])))
    return Laws(log_probs, None, peaks if kind == "grouped" else None)


def grown(
    seed: int, policy: OptTree | Priced, vocab: int, kind: str, dtype: torch.dtype, code: native.Code | None
) -> list[list[Any]]:
    """All numbers of a pool that a policy has grown, of its frontiers and of its tree."""
    rng, seen = np.random.default_rng(seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "code", code)
        pool, rows = CandidatePool(5, policy.children), np.array([0])
        while rows is not None and pool.depth < policy.max_depth:
            before = len(pool.tokens)
            pool.add(laws(rng, len(rows), vocab, kind, dtype))
            assert pool.layer == before
            rows = policy.expand(pool)
            seen += [] if rows is None else [array.tolist() for array in pool.frontier(rows)]
        tree = pool.tree(policy.select(pool))
    assert tree.depths.tolist() == Tree(tree.tokens, tree.parents, tree.path_log_probs, tree.draft_rows).depths.tolist()
    assert (tree.ancestors == ancestor_mask(tree.parents)).all()
    arrays = (pool.tokens, pool.parents, pool.depths, pool.draft_rows, pool.path_log_probs, pool.reach)
    return [*seen, *([*array] for array in (*arrays, tree.tokens, tree.parents, tree.path_log_probs, tree.draft_rows))]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 9, 60, 200]),
    st.sampled_from([2, 31, 256, 300, 1500]),
    st.sampled_from(["whole", "grouped", "reduced", "few"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_native_code_grows_the_tree_of_numpy(
    built: native.Code, seed: int, nodes: int, vocab: int, kind: str, dtype: torch.dtype
) -> None:
    policy = OptTree(nodes, 0.0, max_depth=6)
    assert grown(seed, policy, vocab, kind, dtype, built) == grown(seed, policy, vocab, kind, dtype, None)


CLIFFS = Costs(((1, 5e-3), (3, 5.1e-3), (6, 6e-3), (7, 9e-3), (20, 12e-3)), 1e-3, ((1, 2e-4), (4, 3e-4), (5, 9e-4)))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 9, 60]),
    st.sampled_from([0.0, 30.0, 100.0, 400.0, 3000.0]),
    st.data(),
)
def test_native_code_finds_the_rows_that_pay_as_numpy_does(
    built: native.Code, seed: int, nodes: int, rate: float, data: st.DataObject
) -> None:
    trust = tuple(data.draw(st.lists(st.floats(-6, 0), min_size=len(KNOTS), max_size=len(KNOTS)).map(sorted)))
    carry = data.draw(st.sampled_from([(), (0.0,), (0.9, 0.6, 0.3)]))

    def tree(code: native.Code | None) -> list[list[Any]]:
        return grown(seed, Priced(CLIFFS, nodes, 6, rate, 50, trust, carry), 300, "grouped", torch.float32, code)

    assert tree(built) == tree(None)


def test_prices_of_too_few_rows_are_left_to_numpy(built: native.Code) -> None:
    paying = native.Paying(built, (np.array([-60.0, 0.0]), np.array([-60.0, 0.0])))
    paths = np.array([0.0, -0.1, -0.2, -0.3])
    assert paying.nodes(paths, 3, np.zeros(3)) is None
    assert paying.layer(paths, (1, -np.inf, 2), (1.0, 0.0), (np.zeros(2),) * 3) is None
    assert paying.layer(paths, (1, -0.3, 2), (1.0, 0.0), (np.zeros(3),) * 3).tolist() == [1, 2]
    assert paying.layer(paths, (4, -np.inf, 2), (1.0, 0.0), (np.zeros(3),) * 3).tolist() == []
    assert paying.nodes(paths, 2, np.zeros(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "log_probs", [torch.zeros(2, 64), torch.zeros(1, 128)[:, ::2], torch.zeros(1, 64, dtype=torch.float16)]
)
def test_what_it_is_not_made_for_is_left_to_numpy(built: native.Code, log_probs: torch.Tensor) -> None:
    """Among it an answer about other nodes than were asked about, which numpy refuses."""
    assert native.Growing(built, best=3).grow(Laws(log_probs), 1) is None


def test_without_a_compiler_numpy_grows_the_trees(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise InvalidCxxCompiler("g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", absent)
    with pytest.warns(
        UserWarning, match=r"^trees grow by numpy, .*: there is no C\+\+ compiler on this machine"
    ) as told:
        use_native_code()
    assert len(told) == 1 and native.code is None
    pool = CandidatePool(5, OptTree(3).children)
    pool.add(torch.tensor([[0.5, 0.2, 0.3]]).log())
    assert pool.tokens.tolist() == [5, 0, 1, 2]


def test_what_the_compiler_refuses_is_said_in_one_line(
    unbuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int wrong(\n")
    monkeypatch.setattr(native, "SOURCE", source)
    with pytest.warns(UserWarning, match=r"wrong\.cpp:1:.* error: ") as told:
        use_native_code()
    assert len(told) == 1 and "\n" not in str(told[0].message) and native.code is None


def test_only_what_was_built_is_taken_unless_it_is_to_be_made(unbuilt: Path) -> None:
    use_native_code(make=False)
    assert native.code is None and not unbuilt.exists()
    use_native_code()
    native.code = None
    (package,) = (folder for folder in unbuilt.iterdir() if folder.is_dir())
    use_native_code(make=False)
    assert native.code is not None
    native.code = None
    (package / "native.so").unlink()  # what is loaded is not written over
    (package / "native.so").write_bytes(b"damaged")
    use_native_code(make=False)
    assert native.code is None
    use_native_code()
    assert native.code is not None


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_native_code_judges_as_numpy_does(built: native.Code, seed: int, dtype: torch.dtype) -> None:
    """Also where equals are the greatest, and where nothing is above 0."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(size=(4, 300)) - rng.integers(0, 5, (4, 1)))).to(dtype)
    chain = Tree(np.array([0, *logits.argmax(1)[:3]]), np.arange(4) - 1, np.zeros(4), np.arange(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "code", built)
        ours = greedy(chain, logits, Random())
        patch.setattr(native, "code", None)
        assert ours == greedy(chain, logits, Random()) and len(ours.path) == 4


def test_what_is_no_tree_is_refused_all_the_same(built: native.Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "code", built)
    pool = CandidatePool(5, OptTree(2).children)
    for _ in range(2):
        pool.add(torch.tensor([[0.0]]))
        pool.frontier(pool.newest)
    with pytest.raises(ValueError, match="candidate 2 was selected without its parent 1"):
        pool.tree(np.array([0, 2]))
    for wrong in (np.array([0, 9]), np.array([0, 1 << 40])):
        with pytest.raises(IndexError):
            pool.tree(wrong)
        with pytest.raises(IndexError):
            pool.frontier(wrong)
