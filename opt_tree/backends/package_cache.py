"""Where compiled bodies are kept: one folder a package in the user's cache, found by everything that decides its code.

Owns keys, files and their integrity; it never compiles and never runs anything. A package is written beside its place
and renamed into it, so that nobody sees half of one; its digest is compared before it is loaded. A package is code that
runs in this process: it is taken from no place that another user may write to.
"""

import hashlib
import inspect
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn

from opt_tree.backends.owned_files import ANOTHER, check_ours
from opt_tree.backends.snapshot import adapters_of
from opt_tree.system.files import write_text

_PACKAGE = Path(__file__).parent.parent
_BODY = [_PACKAGE / name for name in ("backends/body.py", "backends/grouped_attention.py", "masks.py", "backend.py")]


def cache_folder() -> Path:
    """The folder of all packages: $OPT_TREE_CACHE, else opt_tree below $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("OPT_TREE_CACHE")
    if named:
        return Path(named)
    home = os.path.expanduser("~").replace("~", "/nonexistent")  # Debian's name for the home of who has none
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "opt_tree"


@dataclass(frozen=True)
class Package:
    """One compiled body, there or not: a folder with `body.pt2` and `about.json`; or what else is built and kept."""

    folder: Path
    name: str = "body.pt2"

    @property
    def file(self) -> Path:
        return self.folder / self.name

    def checked_file(self) -> Path:
        """The file, to be loaded now. Raises PermissionError where somebody else could have put it there."""
        check_ours(self.folder, (self.name, "about.json"))
        return self.file

    def about(self) -> dict[str, Any] | None:
        """What was noted when it was made; None where there is no package, or a damaged one."""
        try:
            about = json.loads((self.folder / "about.json").read_text())
            return about if about["sha256"] == file_digest(self.file) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def ensure(self, make: Callable[[], None]) -> None:
        """Have it made where there is none. Another process that makes the same one is waited for.

        Raises PermissionError where somebody else may write, as `checked_file` does.
        """
        check_ours(self.folder, (self.name, "about.json"))
        if self.about() is None:
            with locked(self.folder):
                if self.about() is None:
                    make()

    def write(self, made: Path, about: dict[str, Any]) -> None:
        """Move the file `made` into its place, with what there is to say about it."""
        with replaced(self.folder) as fresh:
            shutil.move(made, fresh / self.file.name)
            (fresh / self.file.name).chmod(0o755)  # a compiler leaves it as the umask says
            noted = about | {"sha256": file_digest(fresh / self.file.name)}
            write_text(fresh / "about.json", json.dumps(noted, indent=1))
            (fresh / "about.json").chmod(0o644)

    def remove(self) -> None:
        """Drop what is there, whole or damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold off other processes that would make the same folder; they find it when they get their turn."""
    try:
        _make_cache(folder.parent)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    except OSError as error:
        raise OSError(f"{error}; {ANOTHER}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a fresh folder that takes the place of `folder` at the end: nobody sees half of one. Called in `locked`."""
    _make_cache(folder.parent)
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _make_cache(folder: Path) -> None:
    """Have a folder of the cache, which nobody else may write to, whatever the umask."""
    for path in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        path.mkdir(mode=0o755, exist_ok=True)


def package_of(facts: dict[str, Any], name: str = "body.pt2") -> Package:
    """The package for these facts; whatever changes one of them makes another package."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return Package(cache_folder().resolve() / hashlib.sha256(text.encode()).hexdigest()[:32], name)


def remembered(facts: dict[str, Any]) -> str | None:
    """What was found out once about these facts, where it was."""
    try:
        return package_of(facts).folder.with_suffix(".txt").read_text()
    except OSError:
        return None


def remember(facts: dict[str, Any], found: str) -> None:
    """Keep what was found out about these facts; a warning where that cannot be: it is found out again next time."""
    place = package_of(facts).folder.with_suffix(".txt")
    try:
        write_text(place, found)
    except OSError as error:
        warnings.warn(f"what was measured here cannot be kept, and is measured again next time: {error}", stacklevel=3)


def facts_of(model: Any, weights: str | None = None) -> dict[str, Any]:
    """All that decides what a compiled model computes and where it runs: weights, config, code, versions, processor.

    `weights`: what stands for them, where it is known; else their digest, for which all are read.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    adapters = [state for module in model.modules() if (state := adapters_of(module))]
    return {
        "weights": weights_digest(model) if weights is None else weights,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": config | {"attention": model.config.get_text_config()._attn_implementation},
        "code": _code_digest([type(model), *{type(module) for module in model.modules()}]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "threads": torch.get_num_threads(),  # loops are compiled for a number of them
        **({"adapters": adapters} if adapters else {}),
        **({"scaling": scaling} if any(scaling := getattr(model, "scaling", ())) else {}),  # a head's
    }


def weights_digest(model: nn.Module, told: Callable[[Tensor], Any] | None = None) -> str:
    """A digest of every weight and buffer: names, dtypes, shapes and bytes. About a second a gigabyte.

    `told`: what stands for a tensor's bytes.
    """
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None:  # a head borrows the target's
        tensors += [(f"output.{name}", one) for name, one in (*output.named_parameters(), *output.named_buffers())]
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update((told or bytes_of)(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, for a digest."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _code_digest(classes: Iterable[type]) -> str:
    """A digest of the source files that a forward is traced through: the model's, its layers', and the body."""
    files = {inspect.getsourcefile(kind) for kind in classes} | {str(file) for file in _BODY}
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file and "site-packages/torch/" not in file):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def processor() -> str:
    """What the compiler is told of this processor, as far as it shows: code for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = sorted({line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features")})
    except OSError:
        told = [platform.processor()]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} {hashlib.sha256(' '.join(told).encode()).hexdigest()[:16]}"


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
