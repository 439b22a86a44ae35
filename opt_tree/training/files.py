"""What a run leaves on disk for the next one: whatever lies there under its own name is whole.

A run may be killed at any moment; a half-written file or folder must never be taken for a finished one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Lend another name to write a file or a folder under; it gets its own, and replaces what had it, at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two commands may fill one cache
    yield partial
    if path.is_dir():
        shutil.rmtree(path)
    partial.replace(path)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run that was written to its end, or None; the Trainer writes its state last."""
    checkpoints = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(checkpoints, key=lambda checkpoint: int(checkpoint.name.partition("-")[2]), default=None)
