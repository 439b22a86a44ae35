"""Errors in one line: of an argument's type, of a model that cannot decode a tree, of another library."""

from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any

import numpy as np

_WORDS: dict[type, str] = dict.fromkeys((Collection, Iterable, Sequence, list), "a list") | {
    bool: "True or False",
    Integral: "a whole number",
    Real: "a number",
    str: "a text",
    dict: "a dictionary",
    np.ndarray: "a numpy array",
    PathLike: "a path",
    NoneType: "None",
}


def require(kinds: type | tuple[type, ...], **given: Any) -> None:
    """Raise TypeError for the first argument that is of none of these kinds."""
    for name, value in given.items():
        if not isinstance(value, kinds):
            several = kinds if isinstance(kinds, tuple) else (kinds,)
            wanted = " or ".join(_WORDS.get(kind, f"of type {kind.__name__}") for kind in several)
            raise TypeError(f"{name} must be {wanted}, got {value!r:.80}")


class UnsupportedModelError(ValueError):
    """The model cannot decode a tree exactly; the message says why."""


def one_line(error: BaseException) -> str:
    """An error of somebody else's as part of one line: its kind, and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def counted(count: int, word: str) -> str:
    """So many of what a word names: 1 thread, 2 threads."""
    return f"{count} {word}{'' if count == 1 else 's'}"
