"""What lies under its own name is whole, whatever happens while it is written."""

import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from full_disk import full_after
from safetensors.torch import save_file

from opt_tree.system.files import check_writable, shutil, whole, write_text


def test_what_has_its_own_name_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "final"
    for text in ("first", "second"):
        with whole(folder) as partial:
            partial.mkdir()
            (partial / text).touch()
            (partial / "config.json").touch()
    assert {path.name for path in folder.iterdir()} == {"second", "config.json"}
    with pytest.raises(KeyboardInterrupt), whole(folder) as partial:
        partial.mkdir()
        raise KeyboardInterrupt
    assert {path.name for path in folder.iterdir()} == {"second", "config.json"}
    (folder / "pictures").mkdir()
    with pytest.raises(ValueError, match="which would be deleted: name a new folder"), whole(folder):
        raise AssertionError("asked before anything is made")
    with pytest.raises(OSError, match=r"No space.*a.npz"), whole(tmp_path / "a.npz") as partial:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.glob("*.partial"))
    with whole(tmp_path / "a.npz") as partial:
        partial.write_text("whole")
        assert not list(tmp_path.glob("*.npz"))
    assert (tmp_path / "a.npz").read_text() == "whole"


def test_a_full_disk_is_said_whatever_library_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0))

    def torch_saves(partial: Path) -> None:
        with open("/dev/full", "wb") as full:
            torch.save({"weight": torch.zeros(1 << 20)}, full)

    def safetensors_saves(partial: Path) -> None:
        with full_after(1000):
            save_file({"weight": torch.zeros(1 << 20)}, partial)

    def text_is_written(partial: Path) -> None:
        partial.symlink_to("/dev/full")
        partial.write_text("x" * 100_000)

    for write in (torch_saves, safetensors_saves, text_is_written):
        with (
            pytest.raises(OSError, match=r"(No space left on device|File too large): '.*/model'"),
            whole(tmp_path / "model") as partial,
        ):
            write(partial)
        assert not list(tmp_path.iterdir()), write
    with pytest.raises(RuntimeError, match="another thing"), whole(tmp_path / "model"):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1))
        raise RuntimeError("another thing")


def test_links_modes_and_devices_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "said")
    assert os.read(reader, 9) == b"said" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    write_text(tmp_path / ("long" * 63), "a name that leaves no room for a longer one")


def test_where_nothing_can_be_written_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "file", "kept")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "file")
    check_writable(tmp_path / "new" / "folder", folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for path, folder, why in (
        (tmp_path, False, f"{tmp_path} is a folder"),
        (tmp_path / "file", True, "file is a file"),
        (tmp_path / "file" / "below", False, f"{tmp_path}/file is a file"),
    ):
        with pytest.raises(OSError, match=f"cannot write to {path}: .*{why}"):
            check_writable(path, folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(PermissionError, match=f"{tmp_path} is read-only"):
        check_writable(tmp_path / "file")
