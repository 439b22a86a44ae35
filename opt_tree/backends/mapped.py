"""Weights whose numbers lie in a file that is mapped into memory: whether they were written to, and their pages.

safetensors are loaded so: a page is read when it is first needed, and one that is written to becomes this process's
own. Linux says of each page which it is (/proc/self/maps, /proc/self/pagemap). Elsewhere nothing is known to be mapped.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

LEAST = 1 << 20
"""Bytes of a weight from which on its pages are looked at. Smaller ones share theirs with others."""
_PAGE = mmap.PAGESIZE
_FILE, _SWAPPED, _PRESENT = (np.uint64(1 << bit) for bit in (61, 62, 63))
"""Bits of a page in /proc/self/pagemap: of a file and not our own; in the swap; in memory."""


class File(NamedTuple):
    """A file as it was at some time."""

    path: str
    device: int
    inode: int
    size: int
    changed: int
    """When it was last written to, in nanoseconds."""

    def same(self) -> bool:
        """Whether it was not written to since. What was put in its place, or took it away, left it as it was."""
        now = _file(self.path)
        return now is None or now == self or (now.device, now.inode) != (self.device, self.inode)


class Mapped(NamedTuple):
    """A weight in a file that is mapped privately, and what it is known by."""

    file: File
    pages: range
    """The addresses of the pages that are all its own."""
    edges: bytes
    """Its numbers before and behind them."""

    def same(self, tensor: Tensor) -> bool:
        """Whether the tensor is that weight still: nobody has written to its pages, or to the file."""
        return self.file.same() and _edges(tensor) == self.edges and _clean(self.pages)


def mapped(tensor: Tensor) -> Mapped | None:
    """What is known of a weight that lies in a file; None for one that does not, a small one, or a changed one."""
    if (pages := _pages_of(tensor)) is None:
        return None
    address = tensor.data_ptr()
    if (file := _file_of(address, address + tensor.nbytes)) is None:
        return None
    return Mapped(file, pages, _edges(tensor)) if _clean(pages) else None


def release(tensor: Tensor) -> None:
    """Give the pages of a weight that lies in a file back to the system; of any other, nothing.

    Whoever needs them finds them in the file again. Which file it is need not be known: to find that out takes
    milliseconds.
    """
    pages = _pages_of(tensor.detach())
    if pages is not None and _clean(pages):
        address, size = ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages))
        ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)


def _pages_of(tensor: Tensor) -> range | None:
    """The addresses of a weight's pages; None for a small one, and one that does not lie in memory in one piece."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < LEAST:
        return None
    address = tensor.data_ptr()
    return range(-(-address // _PAGE) * _PAGE, (address + tensor.nbytes) // _PAGE * _PAGE)


def _clean(pages: range) -> bool:
    """Whether none of the pages at these addresses is this process's own: those that are in memory are a file's."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as told:
            told.seek(pages.start // _PAGE * 8)
            found = np.frombuffer(told.read(len(pages) // _PAGE * 8), dtype=np.uint64)
    except OSError:
        return False
    here = found[(found & (_SWAPPED | _PRESENT)) != 0]
    return len(found) == len(pages) // _PAGE and bool(((here & _FILE) != 0).all())


def _edges(tensor: Tensor) -> bytes:
    """The bytes of a tensor that lie on pages which it shares."""
    address, size = tensor.data_ptr(), tensor.nbytes
    before, behind = -address % _PAGE, (address + size) % _PAGE
    return ctypes.string_at(address, before) + ctypes.string_at(address + size - behind, behind)


def _file(path: str) -> File | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return File(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _file_of(begin: int, end: int) -> File | None:
    """The file that is mapped privately over these addresses, or None."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        addresses, rights, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(one, 16) for one in addresses.split("-"))
        if first <= begin < last:
            ours = rights.endswith("p") and inode != "0" and path and end <= last
            return _file(path[0]) if ours else None
    return None
