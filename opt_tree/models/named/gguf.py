"""A GGUF file as a folder that transformers loads at once: bfloat16 safetensors, tokenizer, what it was made from.

Owns the conversion and the folders in the user's cache. transformers reads GGUF itself, but slowly, so it is done once.
"""

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from opt_tree.backends.package_cache import cache_folder, file_digest, locked, replaced
from opt_tree.errors import one_line
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.models.named import dequantised
from opt_tree.models.named.dequantised import read_once
from opt_tree.system.files import write_text

ABOUT = "about.json"
SOURCE = "source.gguf"
"""A GGUF file beside what was made of it: other engines read it."""
_WEIGHTS = "model.safetensors"


def place_of(name: str) -> Path:
    """The folder in the user's cache for a model of this name, there or not."""
    return cache_folder() / "models" / name


def about(folder: Path) -> dict[str, Any] | None:
    """What was noted when the folder was made; None where there is none, or where its weights are others now."""
    try:
        noted = json.loads((folder / ABOUT).read_text())
        stat = (folder / _WEIGHTS).stat()
        whole = stat.st_size == noted["bytes"]
        # A file that nobody has touched since its digest was noted is not read again: that takes a second a gigabyte.
        if whole and "weights_sha256" in noted and noted.get("weights_stat") != _stat(folder / _WEIGHTS):
            whole = _digest(folder / _WEIGHTS, stat.st_mtime_ns) == noted["weights_sha256"]
        return noted if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.lru_cache(maxsize=8)
def _digest(file: Path, changed: int) -> str:
    """The SHA-256 of a file that was last changed then: read once a process, in half a second a gigabyte."""
    return file_digest(file)


def _stat(file: Path) -> list[int]:
    """What of a file changes when it is written to, or is another's copy."""
    stat = file.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def gguf_folder(file: Path) -> Path:
    """The converted copy of a GGUF file, made if it is not there. A file that has changed is another one."""
    if not file.is_file():
        raise CheckpointError(f"no GGUF file at {file}")
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = place_of(f"gguf-{file.stem[:40]}-{key}")
    with locked(folder):
        if about(folder) is None:
            remove_left(folder)
            make(folder, file, {"source": str(file.resolve()), "sha256": file_digest(file)})
    return folder


def remove_left(folder: Path, but: Path | None = None) -> None:
    """Remove what a process that was killed left beside a folder, gigabytes maybe; whoever calls has its lock.

    `but`: what stays there.
    """
    for left in folder.parent.glob(f"{folder.name}.*"):
        if left.is_dir() and left != but:
            shutil.rmtree(left, ignore_errors=True)


def make(
    folder: Path,
    source: Path,
    facts: dict[str, Any],
    check: Callable[[Any], None] | None = None,
    keep: str | None = None,
) -> None:
    """Write `source`, a GGUF file or a folder, to `folder` in bfloat16; `check` may refuse its config.

    `keep`: "copy" or "move" a GGUF file beside it. It may lie in the folder, which is replaced at the end.
    """
    with replaced(folder) as fresh:
        _save(source, fresh, check)
        weights = fresh / _WEIGHTS
        noted = facts | {"bytes": weights.stat().st_size, "weights_sha256": file_digest(weights)}
        noted["weights_stat"] = _stat(weights)
        noted["transformers"] = transformers.__version__
        write_text(fresh / ABOUT, json.dumps(noted, indent=1))
        fresh.chmod(0o755)
        if keep and source.is_file():
            (shutil.move if keep == "move" else shutil.copyfile)(source, fresh / SOURCE)


def _save(source: Path, fresh: Path, check: Callable[[Any], None] | None) -> None:
    """Write a GGUF file or a folder that transformers loads; whatever is wrong with the source is one line.

    A GGUF file is read in a folder in which it is alone: transformers takes a tokenizer that lies beside it for its
    own.
    """
    if source.is_file():
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{source} is no GGUF file")
    try:
        with tempfile.TemporaryDirectory(prefix=f"{fresh.name}.", dir=fresh.parent) as alone, read_once():
            if source.is_dir():
                _load_and_save(str(source), fresh, check)
            else:
                (Path(alone) / SOURCE).symlink_to(source.resolve())
                if not dequantised.save(alone, SOURCE, fresh, _WEIGHTS, check or (lambda config: None)):
                    _load_and_save(alone, fresh, check, gguf_file=SOURCE)
                AutoTokenizer.from_pretrained(alone, gguf_file=SOURCE).save_pretrained(fresh)
    except CheckpointError as error:
        raise CheckpointError(f"{source} {error}") from error
    except Exception as error:  # the reader of a damaged file fails in whatever way its bytes lead it
        raise CheckpointError(f"transformers cannot load {source}: {one_line(error)}") from error
    (fresh / _WEIGHTS).chmod(0o644)  # safetensors' files are the owner's alone


def _load_and_save(folder: str, fresh: Path, check: Callable[[Any], None] | None, **file: str) -> None:
    """The same by loading the model with transformers."""
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if file else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **file, **unpacked
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"lacks {len(missing)} of the model's weights, {missing[0]} among them")
    if check is not None:
        check(model.config)
    model.save_pretrained(fresh, max_shard_size="1TB")
    if not file:
        AutoTokenizer.from_pretrained(folder).save_pretrained(fresh)
