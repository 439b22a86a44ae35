"""What a drafter weighs and how long it was trained, by its spec: the folders of its parts say both."""

from pathlib import Path
from typing import Any

from opt_tree.drafters.registry import folders_of
from opt_tree.models.checkpoints import read_minutes

WEIGHTS = (".safetensors", ".bin", ".pt")


def footprint(spec: str) -> dict[str, Any]:
    """Bytes on disk and minutes of training, over all parts; None where a part that has weights does not say.

    A table that learns as it goes weighs nothing and was trained for no time.
    """
    folders = folders_of(spec)
    minutes = [read_minutes(folder) for folder in folders]
    sizes = [_bytes(Path(folder)) for folder in folders]
    return {
        "weights_bytes": None if None in sizes else sum(size or 0 for size in sizes),
        "training_minutes": None if None in minutes else sum(minute or 0.0 for minute in minutes),
    }


def _bytes(folder: Path) -> int | None:
    """Of the files with weights in a folder; None for what is not a folder here."""
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHTS)
