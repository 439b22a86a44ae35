"""What every test runs under, and the fixtures that several folders share."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread for each worker and for the processes that tests begin: two workers fill the two cores of a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before the first import of transformers: asking an unreachable Hub for a wrong path costs half a minute of retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# Whatever the user has compiled is not for the tests, and nothing is built for all of them: no folder can be there.
os.environ["OPT_TREE_CACHE"] = os.path.join(os.path.abspath(__file__), "no-packages")

LONGEST = ("backends/test_pretended_cuda.py", "backends/test_compiled.py", "test_shapes.py", "test_examples.py")
"""The files that are begun first, so that all workers end together."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":  # xdist's controller runs no test
        import process

        process.prepare()


def quick_cells(item: pytest.Item) -> tuple[str, ...]:
    """Of a grid: the cells that stand for all of it in the quick tier."""
    return tuple(cell for marker in item.iter_markers("quick") for cell in marker.args)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    unknown = {(item.nodeid.split("[")[0], cell) for item in items for cell in quick_cells(item)}
    for item in items:
        if cells := quick_cells(item):
            family, _, own = item.nodeid[:-1].partition("[")
            unknown.discard((family, own))
            if own not in cells:
                item.add_marker(pytest.mark.slow)
    if unknown and not any("::" in asked for asked in config.args):
        raise pytest.UsageError(f"quick cells that are none: {sorted(unknown)}")

    items.sort(key=lambda item: next((at for at, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
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


@pytest.fixture(autouse=True, scope="module")
def models_of_a_kind_are_probed_once_a_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the same place in whatever order files are run. Files about the probe say `PROBED_EVERY_TIME = True`."""
    import probes

    every = getattr(request.module, "PROBED_EVERY_TIME", False)
    with contextlib.nullcontext() if every else probes.one_for_each_kind_of_model():
        yield


@pytest.fixture(autouse=True, scope="module")
def what_a_file_leaves_is_looked_through_once() -> Iterator[None]:
    """What stays behind a file, such as an imported compiler, is no garbage of the next one's."""
    yield
    gc.collect()
    gc.freeze()


def kernels(factory: pytest.TempPathFactory) -> str:
    """Where kernels are built: one folder for all workers of a run, and for the runs that its tests begin."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    return os.environ.setdefault("KERNELS_OF_THE_RUN", str(folder))


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The canonical attention kernel, built once for the tests that name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPT_TREE_CACHE", kernels(tmp_path_factory))
        from opt_tree.backends.canonical import load_kernel

        load_kernel()


@pytest.fixture(scope="session")
def quantised_kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernel of quantised layers, built once for the tests that name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPT_TREE_CACHE", kernels(tmp_path_factory))
        from opt_tree.backends.quantised import load_kernel

        load_kernel()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile nothing: a package is a note, its call the exported program. Lists what was "compiled"."""
    import fake_packages

    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    return fake_packages.install(monkeypatch)
