"""C++ kernels where nothing can be kept."""

import tempfile
from pathlib import Path

import pytest
import torch

from opt_tree.engines import kernels


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that registers nothing, so that it any process can load it; temporary files have a place."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "nothing.cpp").write_text('extern "C" int nothing() { return 1; }\n')
    return tmp_path / "nothing.cpp"


def test_a_kernel_is_built_for_a_process_that_can_keep_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may be read-only: texts are exact all the same, and nothing is left behind."""
    monkeypatch.setenv("OPT_TREE_CACHE", "/proc/cache")  # where even root makes no folder
    with pytest.warns(
        UserWarning, match=r"nothing\.cpp was built for this process alone: .*/proc/cache.*OPT_TREE_CACHE"
    ):
        assert kernels.load(source, "nothing")
    assert str(tmp_path / "temporary") in " ".join(torch.ops.loaded_libraries)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_nothing_is_built_below_a_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cannot be a folder is a mistake to mend."""
    monkeypatch.setenv("OPT_TREE_CACHE", str(source / "cache"))
    with pytest.raises(kernels.KernelError, match=r"nothing\.cpp does not load: .*cpp/cache"):
        kernels.load(source, "nothing")
    assert not [path for path in torch.ops.loaded_libraries if path.startswith(str(tmp_path))]
