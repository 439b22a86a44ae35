"""Verifiers by name: `@register` stands above each in its file."""

from typing import Any

from opt_tree.methods.registry import Method, Registry
from opt_tree.verify import Verifier, greedy, match


def _of_object(name: str, made: Any) -> Verifier:
    if not isinstance(made, Verifier):
        raise ValueError(f"{name} is no verifier: @valid_for(...) says what kinds of children a function is exact for")
    return made


VERIFIERS = Registry("verifier", Method[Verifier], _of_object, __package__)
"""Every verifier; `VERIFIERS["block"].make` is the function."""
register = VERIFIERS.register

# Those of the core, which knows no names.
register(
    "greedy", about="keeps the path that agrees with the target's argmax; judges at temperature 0", paper="2406.17276"
)(greedy)
register(
    "match",
    about="draws the target's token at every node and follows the draws; exact for every tree",
    paper="2305.09781",
)(match)
