"""Whether a model has room on the disk and in memory, asked before anything is fetched or loaded.

Owns the estimates, which are least ones: what they refuse cannot work.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

import psutil
import torch

_BYTES = {"int8": 1.0, "int4": 0.6}
"""A number, by the weights' name: four bits, and two numbers of half precision a group of 32."""


class NoRoomError(ValueError):
    """Too little disk or memory; the message has what is needed and what there is."""


def least_memory(numbers: int, weights: str | None, bytes_each: float = 2) -> int:
    """Bytes that so many weights take at least: quantised, or of so many bytes each."""
    return round(numbers * (bytes_each if weights is None else _BYTES[weights]))


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Raise NoRoomError where the disk of a folder has fewer free bytes than are needed."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise NoRoomError(
            f"{what} needs {needed / 1e9:.1f} GB of disk in {folder}, and {free / 1e9:.1f} GB are free; OPT_TREE_CACHE "
            "names another folder"
        )


def check_memory(needed: int, what: str) -> None:
    """Raise NoRoomError where fewer bytes of memory are free than are needed."""
    if (free := psutil.virtual_memory().available) < needed:
        raise NoRoomError(f"{what} needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free")


def check_weights_fit(folder: str, dtype: str | torch.dtype, weights: str | None) -> None:
    """Raise NoRoomError where memory cannot hold the safetensors of a folder in this dtype, or quantised."""
    needed = 0
    for _, numbers, size in _tensors(folder):
        each = dtype.itemsize if isinstance(dtype, torch.dtype) else size / max(numbers, 1)
        needed += least_memory(numbers, weights, each)
    check_memory(needed, folder)


def stored_as(folder: str) -> set[str]:
    """The dtypes, by safetensors' names ("BF16"), of the tensors of a folder; none where it has no safetensors."""
    return {dtype for dtype, *_ in _tensors(folder)}


def _tensors(folder: str) -> Iterator[tuple[str, int, int]]:
    """The dtype of each tensor in the safetensors of a folder, its numbers and bytes; nothing of a damaged file."""
    for file in Path(folder).glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(length)) if length <= file.stat().st_size else {}
            yield from [
                (str(about["dtype"]), prod(about["shape"]), about["data_offsets"][1] - about["data_offsets"][0])
                for name, about in header.items()
                if name != "__metadata__"
            ]
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            continue  # whoever loads it says what is wrong
