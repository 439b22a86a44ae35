"""What made the answers of a file: settings and sessions, as its header says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_header(path: Path) -> Record:
    """Read a header; ValueError for what is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings, sessions = found["settings"], found["sessions"]
        if not isinstance(settings, dict):
            raise ValueError("its settings are no object")
        if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
            raise ValueError("its sessions are no list of objects")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a header of an answer file: {why}") from error
    return {"settings": settings, "sessions": sessions}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """The settings of `other` that `one` does not share, in words."""
    keys = [key for key in other if one.get(key) != other[key]]
    return "; ".join(f"{key} {_brief(one.get(key))} {here}, {_brief(other[key])} {there}" for key in keys)


def _brief(value: Any) -> str:
    """A setting as part of one line: a list of all questions or a checksum would fill a screen."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
