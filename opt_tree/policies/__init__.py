"""Tree policies: which nodes to draft, which to verify."""

from opt_tree.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.policies.base import TreePolicy
from opt_tree.policies.costs import Costs
from opt_tree.policies.delayed import Delayed
from opt_tree.policies.dynamic_depth import DynamicDepth
from opt_tree.policies.dyspec import DySpec
from opt_tree.policies.eagle2 import Eagle2
from opt_tree.policies.greedy_static import greedy_static_tree
from opt_tree.policies.opt import OptTree
from opt_tree.policies.priced import Priced
from opt_tree.policies.registry import POLICIES, make_policy, register
from opt_tree.policies.rheo import Rheo
from opt_tree.policies.sampled import Sampled
from opt_tree.policies.sequoia import SequoiaTree
from opt_tree.policies.static import Static
from opt_tree.policies.talon import Talon
from opt_tree.policies.threshold_chain import ThresholdChain

POLICIES.discover(__name__, __path__)

__all__ = [
    "HALVING",
    "POLICIES",
    "AcceptanceRates",
    "Costs",
    "Delayed",
    "DySpec",
    "DynamicDepth",
    "Eagle2",
    "OptTree",
    "Priced",
    "Rheo",
    "Sampled",
    "SequoiaTree",
    "Static",
    "Talon",
    "ThresholdChain",
    "TreePolicy",
    "greedy_static_tree",
    "make_policy",
    "register",
]
