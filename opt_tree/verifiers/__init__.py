"""Verifiers: what survives of a scored tree, and what comes next."""

from opt_tree.verifiers.base import Verdict, Verifier, block_efficiency, check, check_temperature, valid_for
from opt_tree.verifiers.block_verification import block
from opt_tree.verifiers.greedy_walk import greedy
from opt_tree.verifiers.importance_weighted import khisti
from opt_tree.verifiers.k_sequential import k_seq
from opt_tree.verifiers.multi_round_rejection import multi_round
from opt_tree.verifiers.multipath_block_verification import multipath_block
from opt_tree.verifiers.naive_tree import naive
from opt_tree.verifiers.recursive_rejection import without_replacement
from opt_tree.verifiers.registry import VERIFIERS, register
from opt_tree.verifiers.rheo_sampling import rheo
from opt_tree.verifiers.sample_and_match import match
from opt_tree.verifiers.traversal_verification import traversal
from opt_tree.verifiers.typical_acceptance import typical

VERIFIERS.discover(__name__, __path__)

__all__ = [
    "VERIFIERS",
    "Verdict",
    "Verifier",
    "block",
    "block_efficiency",
    "check",
    "check_temperature",
    "greedy",
    "k_seq",
    "khisti",
    "match",
    "multi_round",
    "multipath_block",
    "naive",
    "register",
    "rheo",
    "traversal",
    "typical",
    "valid_for",
    "without_replacement",
]
