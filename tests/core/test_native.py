"""Native code: it grows the trees that numpy grows, bit by bit; and where it cannot be built, numpy grows them."""

import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import prompt, random_tree, tiny, tiny_head
from torch._inductor.exc import InvalidCxxCompiler

from opt_tree.core import native
from opt_tree.core.pool import CandidatePool
from opt_tree.core.probabilities import grouped_log_probs
from opt_tree.core.random import Random
from opt_tree.core.target import Laws, Output
from opt_tree.core.tree import Tree, ancestor_mask
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.pair import load_pair
from opt_tree.drafters import EagleDrafter
from opt_tree.engines import Eager, Forward
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.compiling import use_native_code
from opt_tree.models.forward_layout import Wanted, put, take
from opt_tree.policies import Costs, OptTree, Priced
from opt_tree.policies.priced import KNOTS
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


def test_an_eager_pair_takes_it_where_a_compiler_is_at_hand(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or where nothing can be written, numpy grows the trees and nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("CXX", "no-such-compiler")
        load_pair("demo", dtype="float32")
        assert native.code is None and not unbuilt.exists()
        monkeypatch.delenv("CXX")
        with monkeypatch.context() as patch:
            patch.setenv("OPT_TREE_CACHE", f"{Path(__file__)}/no-folder")
            load_pair("demo", dtype="float32")
            assert native.code is None
        load_pair("demo", dtype="float32")
        assert native.code is not None
        native.code = None
        monkeypatch.setenv("CXX", "no-such-compiler")
        load_pair("demo", dtype="float32")  # what was built needs no compiler any more
        assert native.code is not None


def test_what_the_compiler_refuses_is_said_in_one_line(
    unbuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int wrong(\n")
    monkeypatch.setattr(native, "SOURCES", (source,))
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


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 5),
)
def test_native_code_judges_as_numpy_does(
    built: native.Code, seed: int, rows: int, dtype: torch.dtype, less: int
) -> None:
    """Also where siblings or logits are equal, and where nothing is above 0."""
    tree = random_tree(rows, seed, root=3, vocab=3)
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(size=(rows, 300)) - rng.integers(0, less + 1, (rows, 1)))).to(dtype)
    logits[:, :3] += torch.from_numpy(rng.integers(0, 9, (rows, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "code", built)
        ours = greedy(tree, logits, Random())
        patch.setattr(native, "code", None)
        assert ours == greedy(tree, logits, Random())


class Recorded(Eager):
    """An engine that notes what it is asked for."""

    def __init__(self, eager: Eager, least_rows: int) -> None:
        super().__init__(eager.model, eager.cache)
        self.least_rows, self.forwards = least_rows, []

    def run(self, forward: Forward) -> Output:
        self.forwards.append([forward.ints.tolist(), forward.mask.tolist(), forward.slots is None])
        return super().run(forward)


@pytest.mark.parametrize("buckets", [None, Buckets((4, 8), (32, 64))])
@pytest.mark.parametrize("least_rows", [1, 2])
def test_native_code_lays_out_the_forwards_of_numpy(
    built: native.Code, monkeypatch: pytest.MonkeyPatch, buckets: Buckets | None, least_rows: int
) -> None:
    """Forwards of a prompt, of trees and of layers behind each other; and what is kept of them."""
    asked = []
    for code in (built, None):
        monkeypatch.setattr(native, "code", code)
        lm = CausalLM(tiny("llama"), buckets)
        lm.engine = engine = Recorded(lm.eager, least_rows)
        lm.append(prompt(7))
        for rows in (1, 2, 6):
            tree = random_tree(rows, rows, root=4)
            lm.score(tree)
            lm.commit(tree.path_to(rows - 1).tolist())
        lm.append([3])
        for token, depth, visible in (
            ([5], [1], np.ones((1, 1), dtype=bool)),
            ([6, 7], [2, 2], np.tri(3, dtype=bool)[1:]),
            ([8], [2], np.tri(2, dtype=bool)[1:]),  # in place of the two
        ):
            lm.run(Wanted(np.array(token), np.array(depth), visible, behind=lm.length - 1))
        lm.commit([0, 1])
        asked.append((engine.forwards, lm._tokens, lm.work.tokens))
    assert asked[0] == asked[1] and asked[0][1][-2:] == [5, 8] and len(asked[0][0]) == 8


def test_every_lane_and_every_copy_has_forwards_of_its_own(built: native.Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane's forward waits while those of others are laid out."""
    monkeypatch.setattr(native, "code", built)
    target = CausalLM(tiny("llama"))
    decoder = Decoder(target, EagleDrafter(tiny_head(target.model), target), OptTree(7, 0.0, max_depth=3))
    prompts = [prompt(5 + seed, seed) for seed in range(4)]
    alone = [decoder.generate(one, 12).tokens for one in prompts]
    assert [one.tokens for one in decoder.generate_batch(prompts, 3, 12)] == alone
    one, other = copy.deepcopy(decoder), copy.copy(decoder)
    steps = [one.steps(prompts[0], 12), other.steps(prompts[1], 12)]
    texts: list[list[int]] = [[], []]
    for pair in itertools.zip_longest(*steps):
        for text, step in zip(texts, pair, strict=True):
            text += step.tokens if step else []
    assert [text[:12] for text in texts] == alone[:2]


@pytest.mark.parametrize("states", [torch.randn(5, 3), torch.randn(5, 3).bfloat16(), torch.randn(3, 5).T])
def test_rows_are_taken_and_put_as_torch_does(
    built: native.Code, monkeypatch: pytest.MonkeyPatch, states: torch.Tensor
) -> None:
    for code in (built, None):
        monkeypatch.setattr(native, "code", code)
        for rows in ([4, 0, 0], [1], []):
            assert take(states, rows).equal(states[rows])
        for wrong in ([5], [-1]):
            with pytest.raises(IndexError):
                take(states, wrong)
        into = torch.zeros(7, 3, dtype=states.dtype)
        put(states, into, 2)
        assert into[2:].equal(states) and not into[:2].any()
        put(states, into, 0, first=3)
        assert into[:2].equal(states[3:]) and into[2:].equal(states)
        with pytest.raises(RuntimeError):
            put(states, into, 3)


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
