"""What public names say of an argument of a type that they do not take: its name, what it must be, what was given."""

from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any

import numpy as np

_WORDS: dict[type, str] = {
    **dict.fromkeys((Collection, Iterable, Sequence), "a list"),
    **{
        Integral: "a whole number",
        Real: "a number",
        str: "a text",
        np.ndarray: "a numpy array",
        PathLike: "a path",
        NoneType: "None",
    },
}


def require(kinds: type | tuple[type, ...], **given: Any) -> None:
    """Raise TypeError for the first argument that is of none of these kinds."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    for name, value in given.items():
        if not isinstance(value, kinds):
            wanted = " or ".join(_WORDS.get(kind, f"of type {kind.__name__}") for kind in kinds)
            raise TypeError(f"{name} must be {wanted}, got {value!r:.80}")
