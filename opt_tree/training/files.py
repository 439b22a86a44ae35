"""What a run leaves on disk for the next one: whatever lies there under its own name is whole.

A run may be killed at any moment; a half-written file or folder must never be taken for a finished one.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Lend another name to write a file or a folder under; it gets its own, and replaces what had it, at the end."""
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two commands may fill one cache
    try:
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write that fails does not say where
        raise
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raise ValueError for a folder that holds anything but one model: replacing it would delete what is there."""
    if not path.is_dir():
        return
    inside = {found.name: found.is_dir() for found in path.iterdir()}
    ours = inside.keys() & {"config.json", "tokenizer_config.json"} and not any(inside.values())
    if inside and not ours:
        raise ValueError(f"{path} holds other things ({min(inside)}, ...), which would be deleted: name a new folder")


def check_writable(folder: Path) -> None:
    """Raise OSError unless `folder` is one that can be written to, or can be made."""
    there = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"cannot write to {folder}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise PermissionError(f"cannot write to {folder}: {there} is read-only")


def write_checkpoint(
    config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a config and tensors as one folder, floating-point ones in `dtype`."""
    cast = {name: t.to(dtype if t.is_floating_point() else t.dtype).contiguous() for name, t in tensors.items()}
    with whole(folder) as partial:
        partial.mkdir()
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(cast, partial / "model.safetensors", metadata={"format": "pt"})


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run that was written to its end, or None; the Trainer writes its state last."""
    checkpoints = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(checkpoints, key=lambda checkpoint: int(checkpoint.name.partition("-")[2]), default=None)
