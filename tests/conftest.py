"""What the tests share: drafters and targets without a model, and shape checks on the annotated calls of the library.

Laws are functions of the whole token path (context and branch), so nothing here needs a network, a file or a GPU.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import shapes
import torch
from hypothesis import settings
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

# Before the first import of transformers: asking an unreachable Hub for a wrong path costs half a minute of retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# Whatever the user has compiled is not for the tests, and nothing is built for all of them: no folder can be there.
os.environ["OPT_TREE_CACHE"] = os.path.join(os.path.abspath(__file__), "no-packages")
# Before the first import of opt_tree: from here on calls into it are checked, shapes included.
shapes.install()

import opt_tree  # noqa: E402
from opt_tree.core.pool import Frontier  # noqa: E402
from opt_tree.core.step import Outcome  # noqa: E402
from opt_tree.core.target import Output, Target, Work  # noqa: E402

# tqdm's own lock is shared with forked children: one that is killed while it draws would keep it for ever.
tqdm.set_lock(threading.RLock())
torch.set_num_threads(1)
settings.register_profile("opt_tree", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("opt_tree")

Laws = Callable[[tuple[int, ...]], np.ndarray]
"""From a token path, the context first, to the probabilities of the token behind it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device, skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def shared_models_stay_as_they_are() -> Iterator[None]:
    """Fail the file that changed a tiny model which all tests of the process share: others would fail in its place."""
    yield
    models = sys.modules.get("tiny_models")
    changed = models.changed_models() if models else []
    assert not changed, f"a test of this file changed what all tests share: {', '.join(changed)}. Copy it first"


def hashed_laws(seed: int, vocab: int, cells: int | None = None) -> Laws:
    """Pseudo-random laws, fixed by (seed, path). With `cells`, multiples of 1 / cells: zeros and exact ties abound."""

    @functools.cache
    def law(path: tuple[int, ...]) -> np.ndarray:
        # The length keeps (0,) and (0, 0) apart: numpy's seeds ignore trailing zeros.
        rng = np.random.default_rng((seed, len(path), *path))
        if cells is None:
            return rng.dirichlet(np.full(vocab, 0.7))
        return np.bincount(rng.integers(vocab, size=cells), minlength=vocab) / cells

    return law


def written_laws(table: Mapping[tuple[int, ...], tuple[float, ...]]) -> Laws:
    """Laws by hand: the entry of the longest suffix of the path that the table knows; () answers for everything."""

    def law(path: tuple[int, ...]) -> np.ndarray:
        return np.array(next(table[path[i:]] for i in range(len(path) + 1) if path[i:] in table))

    return law


def log_rows(laws: Laws, paths: list[tuple[int, ...]]) -> Float[Tensor, "rows vocab"]:
    """The logarithms of the laws behind each path, in float64; a probability of 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.stack([laws(path) for path in paths])))


class TableDrafter(opt_tree.Drafter):
    """Drafts from laws given as a function of the token path; `expanded` lists what it was asked to expand."""

    def __init__(self, laws: Laws) -> None:
        self.laws = laws
        self.forwards = self.tokens = 0
        self.expanded: list[list[tuple[int, ...]]] = []
        """Branches below the root, one list a layer, of the current step."""
        self._paths: list[tuple[int, ...]] = []

    def reset(self, prompt: list[int], output: Output | None) -> None:
        self._paths = []

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"]:
        self._base = len(context)
        self._paths, self.expanded = [tuple(context)], []
        return self._answer(self._paths)

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"]:
        # By draft rows alone, as a drafter with a cache does it: a wrong parent gives the law of a wrong path.
        paths = [
            (*self._paths[parent], token)
            for parent, token in zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        ]
        self._paths += paths
        self.expanded.append([path[self._base :] for path in paths])
        return self._answer(paths)

    def observe(self, outcome: Outcome) -> None:
        self._paths = []

    @property
    def work(self) -> Work:
        return Work(self.forwards, self.tokens)

    def _answer(self, paths: list[tuple[int, ...]]) -> Float[Tensor, "rows vocab"]:
        self.forwards += 1
        self.tokens += len(paths)
        return log_rows(self.laws, paths)


class TableTarget(Target):
    """A target without a model: its logits are the logarithms of the laws, at every row of a tree."""

    def __init__(self, laws: Laws, vocab: int, max_context: int = 1 << 20) -> None:
        self.laws, self.name, self.vocab, self.max_context = laws, "a table", vocab, max_context
        self._context: list[int] = []
        self._scored: list[int] = []

    def reset(self) -> None:
        super().reset()
        self._context = []

    def append(self, tokens: list[int], all_logits: bool = False) -> Output:
        begin = len(self._context) + 1 if all_logits else len(self._context) + len(tokens)
        self._context += tokens
        return Output(log_rows(self.laws, [tuple(self._context[:end]) for end in range(begin, len(self._context) + 1)]))

    def score(self, tree: opt_tree.Tree) -> Output:
        self.work += Work(forwards=1, tokens=len(tree))
        self._scored = tree.tokens.tolist()
        branches = [tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))]
        return Output(log_rows(self.laws, [(*self._context, *branch) for branch in branches]))

    def commit(self, path: list[int]) -> None:
        self._context += [self._scored[row] for row in path]
