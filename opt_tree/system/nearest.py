"""What a mistyped word stands for."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one is likely to stand for, whatever its case; None: it is near none."""
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), by_lower, 1, 0.75)
    return by_lower[found[0]] if found else None
