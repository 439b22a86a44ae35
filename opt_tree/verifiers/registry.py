"""Verifiers by name: `@register` stands above each in its file."""

from opt_tree.core.registry import Registry
from opt_tree.verifiers.base import Verifier

VERIFIERS: Registry[Verifier] = Registry("verifier")
"""Every verifier of this folder; `VERIFIERS["block"].make` is the function."""
register = VERIFIERS.register
