"""Tree policies: which nodes to draft, which to verify."""

from opt_tree.policies.base import TreePolicy
from opt_tree.policies.opt import OptTree
from opt_tree.policies.static import Static

__all__ = ["OptTree", "Static", "TreePolicy"]
