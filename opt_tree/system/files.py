"""The one way to write a file or a folder: whatever lies under its own name is whole.

A run may be killed, and a disk may be full, at any moment; what is half-written must never be taken for finished.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Lend another name to write a file or a folder under; it gets its own, and replaces what had it, at the end.

    Nothing is left where writing fails, and the OSError names `path`. A link stays one; a device is written to itself.
    """
    check_replaceable(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path  # /dev/stdout, /dev/null, a pipe
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name[-200:]}.{os.getpid()}.partial")  # two commands may write one file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            shutil.copymode(path, partial)
        partial.replace(path)
    except Exception as error:
        if (number := _of_the_system(error, path)) is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _of_the_system(error: Exception, path: Path) -> int | None:
    """Return the system's number for an error while the partial file was written; None for any other error.

    safetensors says it in its message. torch does not: there the disk is looked at.
    """
    if isinstance(error, OSError):
        return error.errno if error.filename is None or ".partial" in str(error.filename) else None
    if told := re.search(r"os error (\d+)", str(error)):
        return int(told[1])
    full = isinstance(error, RuntimeError) and not shutil.disk_usage(path.parent).free
    return errno.ENOSPC if full else None


def write_text(path: Path, text: str) -> None:
    """Write a text as one file."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_replaceable(path: Path) -> None:
    """Raise ValueError for a folder that holds anything but one model: replacing it would delete what is there."""
    if not path.is_dir():
        return
    inside = {found.name: found.is_dir() for found in path.iterdir()}
    ours = inside.keys() & {"config.json", "tokenizer_config.json"} and not any(inside.values())
    if inside and not ours:
        raise ValueError(f"{path} holds other things ({min(inside)}, ...), which would be deleted: name a new folder")


def check_writable(path: Path, folder: bool = False) -> None:
    """Raise OSError, with the path in it, unless a file (or a folder) can be written there; leave nothing behind."""
    if path.exists() and path.is_dir() != folder:
        raise OSError(f"cannot write to {path}: {path} is {'a file' if folder else 'a folder'}")
    for beside in {path, path if folder else path.absolute().parent}:
        there = next(part for part in (beside, *beside.absolute().parents) if part.exists())
        if there != path and not there.is_dir():
            raise OSError(f"cannot write to {path}: {there} is a file")
        if not os.access(there, os.W_OK):
            raise PermissionError(f"cannot write to {path}: {there} is read-only")
