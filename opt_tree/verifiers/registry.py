"""Verifiers by name: `@register` stands above each in its file."""

from opt_tree.core.registry import Method, Registry
from opt_tree.verifiers.base import Verifier

VERIFIERS = Registry("verifier", Method[Verifier])
"""Every verifier of this folder; `VERIFIERS["block"].make` is the function."""
register = VERIFIERS.register
