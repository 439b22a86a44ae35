"""Methods in a file of one's own: FILE.py:NAME goes wherever a method's name goes.

Owns how such a name is read and how its file is loaded. What in it makes a method, each family says.
"""

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from opt_tree.errors import one_line

_NAME = re.compile(r"([^:+,]+\.py):([A-Za-z_]\w*)")


def split_name(spec: str) -> tuple[str, str] | None:
    """Split what begins with FILE.py:NAME into that and what follows behind a colon; None for any other text.

    split_name("mine.py:Trunk:24:0.3") == ("mine.py:Trunk", "24:0.3")
    """
    if not (found := _NAME.match(spec)) or spec[found.end() :][:1] not in ("", ":"):
        return None
    return found[0], spec[found.end() + 1 :]


def object_of(name: str) -> Any:
    """Return the object that FILE.py:NAME names. Raises ValueError, in one line, where there is none."""
    file, _, attribute = name.rpartition(":")
    module = load_file(Path(file))
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(f"{file} has no {attribute}; it has {', '.join(own) or 'nothing of its own'}")
    return getattr(module, attribute)


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own, once. ValueError, with the line, where that fails."""
    where = path.expanduser().resolve()
    name = f"{where.stem}_{hashlib.sha256(str(where).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not where.is_file():
        raise ValueError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(where)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
        raise ValueError(f"{path}, line {line}: {one_line(error)}") from error
    return module


def files_in(specs: Iterable[str]) -> list[str]:
    """Return the files of one's own that specs name, those inside of combinations, too."""
    return sorted({found[1] for spec in specs for found in _NAME.finditer(spec)})


def digests(specs: Iterable[str]) -> dict[str, str]:
    """Return what the files that specs name hold, as a checksum of each: two versions of one file are told apart."""
    return {file: hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()[:12] for file in files_in(specs)}
