"""C++ kernels where nothing can be kept, and where somebody else may have put one."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opt_tree.backends import kernels
from opt_tree.backends.package_cache import Package, package_of, processor


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


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners and modes")
@pytest.mark.parametrize(
    ("what", "mode", "why"),
    [
        ("cache", 0o1777, "cache may be written to by everybody (mode 1777)"),
        ("above", 0o777, "above may be written to by everybody (mode 777)"),
        ("folder", 0o775, "may be written to by its group (gid 12345, mode 775)"),
        ("file", 0o666, "nothing.so may be written to by everybody (mode 666)"),
        ("about", 0o666, "about.json may be written to by everybody (mode 666)"),
        ("file", None, "nothing.so belongs to another user (uid 12345, this process is "),
        ("cache", None, "cache belongs to another user (uid 12345, this process is "),
    ],
)
def test_no_code_is_loaded_from_where_others_may_write(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mode: int | None, why: str
) -> None:
    """A library with a matching digest lies there, and running it would be noticed: it is no library."""
    package = kept(source, tmp_path, monkeypatch)
    places = {"above": tmp_path / "above", "cache": package.folder.parent, "folder": package.folder}
    places |= {"file": package.file, "about": package.folder / "about.json"}
    if mode is not None:
        places[what].chmod(mode)
    stat = os.stat

    def pretended(path: Any, **options: Any) -> os.stat_result:
        found = list(stat(path, **options))
        if path == places[what]:
            found[5] = 12345  # its group; nobody's here
            found[4] = found[4] if mode is not None else 12345
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", pretended)
    with pytest.raises(PermissionError) as refused:
        package.checked_file()
    assert f"{why}" in str(refused.value) and "of your own" in str(refused.value)
    with pytest.warns(UserWarning, match=r"built for this process alone: .*, and what is kept there is run: OPT_TREE"):
        assert kernels.load(source, "nothing")
    assert str(package.file) not in torch.ops.loaded_libraries


def test_what_changed_hands_since_it_was_made_is_not_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at once more when it is loaded."""
    package = kept(source, tmp_path, monkeypatch)
    monkeypatch.setattr(type(package), "ensure", lambda self, make: self.file.chmod(0o666))
    with pytest.warns(UserWarning, match=r"nothing\.so may be written to by everybody \(mode 666\)"):
        assert kernels.load(source, "nothing")
    assert str(package.file) not in torch.ops.loaded_libraries


def test_what_only_its_owner_may_write_to_is_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask was when it was kept; and below a sticky folder, as /tmp is."""
    package = kept(source, tmp_path, monkeypatch)
    (tmp_path / "above").chmod(0o1777)
    assert package.checked_file() == package.file
    monkeypatch.setattr(torch.ops, "load_library", (loaded := []).append)
    assert kernels.load(source, "nothing") and loaded == [str(package.file)]
    package.folder.chmod(0o770)  # the group is the caller's alone
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=["me"]))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    assert package.checked_file() == package.file
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=["me", "other"]))
    with pytest.raises(PermissionError, match="by its group"):
        package.checked_file()


def kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package of the kernel, made under a umask that takes nothing away: its library is a note."""
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "above" / "cache"))
    facts = {"source": source.read_text(), "options": kernels.OPTIONS, "torch": torch.__version__}
    package = package_of(facts | {"processor": processor()}, "nothing.so")
    (tmp_path / "made.so").write_text("no library")
    before = os.umask(0)
    try:
        package.ensure(lambda: package.write(tmp_path / "made.so", {}))
    finally:
        os.umask(before)
    return package
