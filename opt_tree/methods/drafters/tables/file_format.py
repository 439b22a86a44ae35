"""Files of the drafters that look things up: named arrays behind a header, in safetensors' format.

Owns what makes a file trustworthy: it is written whole or not at all, says what it is and for which tokenizer, and is
refused in one line where it is torn, altered or somebody else's. Knows nothing of what the arrays mean.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from opt_tree.errors import one_line
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.system.files import whole

VERSION = 2


class Table(NamedTuple):
    """A header of plain JSON values and arrays by name, as they lie on disk."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short name for "the same tokens have the same ids"."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()


def save_table(path: Path, kind: str, table: Table) -> None:
    """Write a table; whatever lies at `path` is whole at every moment."""
    arrays = {name: np.ascontiguousarray(array) for name, array in table.arrays.items()}
    header = table.header | {"kind": kind, "version": VERSION, "sum": _sum(arrays)}
    with whole(path) as partial:
        save_file(arrays, partial, metadata={"opt_tree": json.dumps(header)})
        partial.chmod(0o644)  # safetensors' files are the owner's alone


def load_table(path: Path, kind: str, vocab: int, tokenizer: str | None = None) -> Table:
    """Load the table of a kind at `path`, for a target of `vocab` logits and the tokenizer of that fingerprint.

    Its header is checked before any of its contents is read. Raises CheckpointError for whatever is wrong with it.
    """
    if not path.is_file():
        raise CheckpointError(f"no {kind} at {path}")
    try:
        with safe_open(path, framework="np") as file:  # refuses what is torn or no safetensors file
            header = json.loads((file.metadata() or {}).get("opt_tree", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: {one_line(error)}") from error
    found = header.get("kind") if isinstance(header, dict) else None
    if found != kind:
        raise CheckpointError(f"{path} is not a {kind} of this library but {found or 'something else'}")
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {header.get('version')}, this library reads {VERSION}: build it anew"
        )
    whole_number(path, header, "vocab", 1, 2**32)
    whole_number(path, header, "sum", 0, 2**32 - 1)
    if not isinstance(header.get("tokenizer", 0), str | None):
        raise CheckpointError(f"{path} is corrupt: its tokenizer is {header.get('tokenizer', 'missing')!r:.40}")
    if header["vocab"] > vocab:
        raise CheckpointError(f"{path} has {header['vocab']} tokens, this target {vocab}: it is another target's")
    if tokenizer is not None and header["tokenizer"] not in (None, tokenizer):
        raise CheckpointError(
            f"{path} was made with another tokenizer (fingerprint {header['tokenizer']}, the target's is {tokenizer})"
        )
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: {one_line(error)}") from error
    if _sum(arrays) != header["sum"]:
        raise CheckpointError(f"{path} is corrupt: its contents do not add up to what its header says")
    return Table(header, arrays)


def whole_number(path: str | Path, header: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """Return a number of a header. Raises CheckpointError where it is missing or none of `least` to `most`."""
    value = header.get(name, "missing")
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(
            f"{path} is corrupt: its {name} is {value!r:.40}, not a whole number of {least} to {most}"
        )
    return value


def _sum(arrays: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), total))
    return total
