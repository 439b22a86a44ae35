"""Verifiers: what survives of a scored tree, and what comes next."""

from opt_tree.verifiers.base import Verdict, Verifier, valid_for
from opt_tree.verifiers.greedy import greedy
from opt_tree.verifiers.match import match

__all__ = ["Verdict", "Verifier", "greedy", "match", "valid_for"]
