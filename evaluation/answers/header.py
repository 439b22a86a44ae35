"""What made the answers of a file: settings and sessions, as its header says. What is read of one is checked here."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

Record = dict[str, Any]
_NUMBER = (int, float)
_TEXT = (str, NoneType)
_SETTINGS: dict[str, Any] = {
    **{"temperature": _NUMBER, "sharpening": (*_NUMBER, NoneType), "max_new_token": int, "seed": int},
    **dict.fromkeys(("base_model_path", "method", "target_dtype", "weights", "inflate", "device"), _TEXT),
    **dict.fromkeys(("drafter", "draft_model_path", "ea_model_path", "conv_template", "system_message"), _TEXT),
}
_SESSION: dict[str, Any] = {"environment": dict, "target": str, "options": dict}
_ENVIRONMENT: dict[str, Any] = {"device": str, "threads": int}


def read_header(path: Path) -> Record:
    """Read a header; ValueError for what is none, and where a part of it is not of its type."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings, sessions = found["settings"], found["sessions"]
        if not isinstance(settings, dict):
            raise ValueError("its settings are no object")
        if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
            raise ValueError("its sessions are no list of objects")
        _check(settings, _SETTINGS)
        for session in sessions:
            _check(session, _SESSION)
            _check(session.get("environment", {}), _ENVIRONMENT)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a header of an answer file: {why}") from error
    return {"settings": settings, "sessions": sessions}


def _check(part: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in part and not isinstance(part[name], kind):
            raise ValueError(f"{name} is {part[name]!r:.40}")


def differences(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """The settings of `other` that `one` does not share, in words."""
    keys = [key for key in other if one.get(key) != other[key]]
    return "; ".join(f"{key} {_brief(one.get(key))} {here}, {_brief(other[key])} {there}" for key in keys)


def _brief(value: Any) -> str:
    """A setting as part of one line: a list of all questions or a checksum would fill a screen."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
