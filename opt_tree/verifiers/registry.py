"""Verifiers by name: `@register` stands above each in its file."""

from typing import Any

from opt_tree.core.registry import Method, Registry
from opt_tree.verifiers.base import Verifier


def _of_object(name: str, made: Any) -> Verifier:
    if not isinstance(made, Verifier):
        raise ValueError(f"{name} is no verifier: @valid_for(...) says what kinds of children a function is exact for")
    return made


VERIFIERS = Registry("verifier", Method[Verifier], _of_object)
"""Every verifier of this folder; `VERIFIERS["block"].make` is the function."""
register = VERIFIERS.register
