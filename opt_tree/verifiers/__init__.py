"""Verifiers: what survives of a scored tree, and what comes next."""

from opt_tree.verifiers.base import Verdict, Verifier, block_efficiency, check, valid_for
from opt_tree.verifiers.block import block
from opt_tree.verifiers.greedy import greedy
from opt_tree.verifiers.k_seq import k_seq
from opt_tree.verifiers.khisti import khisti
from opt_tree.verifiers.match import match
from opt_tree.verifiers.multi_round import multi_round
from opt_tree.verifiers.naive import naive
from opt_tree.verifiers.rheo import rheo
from opt_tree.verifiers.traversal import traversal
from opt_tree.verifiers.typical import typical
from opt_tree.verifiers.without_replacement import without_replacement

__all__ = [
    "Verdict",
    "Verifier",
    "block",
    "block_efficiency",
    "check",
    "greedy",
    "k_seq",
    "khisti",
    "match",
    "multi_round",
    "naive",
    "rheo",
    "traversal",
    "typical",
    "valid_for",
    "without_replacement",
]
