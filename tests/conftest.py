"""What the tests share: drafters and targets without a model.

Laws are functions of the whole token path (context and branch), so nothing here needs a network, a file or a GPU.
"""

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

# What imports and collection make stays: looking through it for garbage takes as long as a third of them.
gc.disable()
# Before the first import of transformers: asking an unreachable Hub for a wrong path costs half a minute of retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# Whatever the user has compiled is not for the tests, and nothing is built for all of them: no folder can be there.
os.environ["OPT_TREE_CACHE"] = os.path.join(os.path.abspath(__file__), "no-packages")
# Before the first import of opt_tree: what is imported from here on is checked at every call, shapes included.
if os.environ.get("CHECK_SHAPES"):
    import shapes

    shapes.install()

import opt_tree  # noqa: E402
from opt_tree.core.pool import Frontier  # noqa: E402
from opt_tree.core.target import Output, Target, Work  # noqa: E402
from opt_tree.decoding import enumeration  # noqa: E402
from opt_tree.decoding.enumeration import Laws, hashed_laws, log_rows  # noqa: E402, F401
from opt_tree.engines import compiled as aot  # noqa: E402
from opt_tree.engines import quantised  # noqa: E402
from opt_tree.engines.body import Body  # noqa: E402
from opt_tree.engines.canonical import load_kernel  # noqa: E402

# tqdm's own lock is shared with forked children: one that is killed while it draws would keep it for ever.
tqdm.set_lock(threading.RLock())
torch.set_num_threads(1)
settings.register_profile("opt_tree", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("opt_tree")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device, skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def shared_models_stay_as_they_are() -> Iterator[None]:
    """Fail the file that changed a tiny model which all tests of the process share: others would fail in its place."""
    yield
    models = sys.modules.get("tiny_models")
    changed = models.changed_models() if models else []
    assert not changed, f"a test of this file changed what all tests share: {', '.join(changed)}. Copy it first"


def kernels(factory: pytest.TempPathFactory) -> Path:
    """Where kernels are built: one folder for all workers of a run."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The canonical attention kernel, built once for the tests that name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPT_TREE_CACHE", str(kernels(tmp_path_factory)))
        load_kernel()


@pytest.fixture(scope="session")
def quantised_kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernel of quantised layers, built once for the tests that name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPT_TREE_CACHE", str(kernels(tmp_path_factory)))
        quantised.load_kernel()


def written_laws(table: Mapping[tuple[int, ...], tuple[float, ...]]) -> Laws:
    """Laws by hand: the entry of the longest suffix of the path that the table knows; () answers for everything."""

    def law(path: tuple[int, ...]) -> np.ndarray:
        return np.array(next(table[path[i:]] for i in range(len(path) + 1) if path[i:] in table))

    return law


class TableDrafter(enumeration.TableDrafter):
    """Drafts from laws given as a function of the token path; `expanded` lists what it was asked to expand."""

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws)
        self.forwards = self.tokens = 0
        self.expanded: list[list[tuple[int, ...]]] = []
        """Branches below the root, one list a layer, of the current step."""

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"]:
        self._base, self.expanded = len(context), []
        return self._counted(super().root(context))

    def expand(self, frontier: Frontier) -> Float[Tensor, "frontier vocab"]:
        answer = self._counted(super().expand(frontier))
        self.expanded.append([path[self._base :] for path in self._paths[-len(answer) :]])
        return answer

    @property
    def work(self) -> Work:
        return Work(self.forwards, self.tokens)

    def _counted(self, answer: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        self.forwards += 1
        self.tokens += len(answer)
        return answer


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


_EXPORTED: dict[tuple[Any, ...], torch.export.ExportedProgram] = {}
"""The programs of the tiny models that all tests share."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compile nothing: a package is a note, its call the exported program. Lists what was "compiled".

    What all tests share is exported once.
    """
    import tiny_models

    made: list[str] = []
    export = aot.export
    programs: dict[str, Any] = {}
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))

    def compile_nothing(program: torch.export.ExportedProgram, file: Path, options: dict[str, Any]) -> None:
        laws = any("scale" in str(name) for name in program.graph_signature.user_inputs)
        if aot.APART not in options:
            assert options == (aot.OPTIONS | aot.TIMED if laws else aot.OPTIONS), "drafters' products are timed"
        made.append(str(file))
        programs[made[-1]] = program
        file.write_text(made[-1])

    def load(file: Path, shared: dict[str, Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        program = programs[file.read_text()]
        graph = program.module()

        def call(flat: list[Tensor]) -> list[Tensor]:
            inputs, _ = torch.utils._pytree.tree_unflatten(flat, program.call_spec.in_spec)
            return list(graph(*inputs))

        return call

    def export_once(body: Body, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
        asked = body.model, body.layers, body.columns
        if all(body.model is not model for model, _ in tiny_models._SHARED.values()):
            return export(body, inputs)
        if asked not in _EXPORTED:
            _EXPORTED[asked] = export(body, inputs)
        return _EXPORTED[asked]

    monkeypatch.setattr(aot, "export", export_once)
    monkeypatch.setattr(aot, "_compile", compile_nothing)
    monkeypatch.setattr(aot, "_load", load)
    yield made
