"""The policies that are compared: OPT-Tree by size and threshold, and every tree at equal nodes and equal layers."""

from experiments.real_pair.taken import Way
from opt_tree import OptTree, Static, TreePolicy
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.methods.policies.registry import make_policy
from opt_tree.methods.policies.sequoia import sequoia_tree

SIZES = (8, 16, 25, 60, 140, 500)
THRESHOLDS = (0.05, 0.2, 0.5)
EQUAL = ((25, 5), (60, 6), (60, 10))
"""Nodes and layers at which trees are compared: EAGLE-1's, EAGLE-2's, and OPT-Tree's published commands'."""
CHAINS = (6, 10)
DEEP = 20
"""Layers for a tree that is not to be cut by them."""
NAMED_ONLY = ("opt 500",)
"""Policies that are run where `--only` names them: their drafting takes as long as that of all others."""


def all_ways(rates: AcceptanceRates, temperature: float) -> dict[str, Way]:
    """Return every policy by its name: tree, nodes, layers at most, threshold where it is not 0."""
    bare: dict[str, TreePolicy] = {f"opt {nodes}": OptTree(nodes, 0) for nodes in SIZES}
    bare |= {f"opt 60 at {threshold}": OptTree(60, threshold) for threshold in THRESHOLDS}
    for nodes, layers in EQUAL:
        bare[f"opt {nodes}/{layers}"] = OptTree(nodes, 0, layers)
        bare[f"eagle2 {nodes}/{layers}"] = Eagle2(10, layers - 1, nodes)
        bare[f"sequoia {nodes}/{layers}"] = sequoia_tree(rates, nodes, layers)
        bare[f"medusa {nodes}/{layers}"] = greedy_static_tree(rates, nodes, layers)
    bare[f"opt 60/{DEEP}"] = OptTree(60, 0, DEEP)
    bare["eagle1_list 25/5"] = make_policy("eagle1_list", 25)
    bare |= {f"binary {nodes}": make_policy("binary", nodes) for nodes in (25, 60)}
    for length in CHAINS:
        bare |= {f"chain {length}": Static.chain(length), f"opt {length}/{length}": OptTree(length, 0, length)}
    fitted = {name: bare[name] for name in ("opt 60", "opt 60 at 0.2", "opt 60 at 0.5", "opt 60/6", "eagle2 60/6")}
    del bare["opt 60/10"]  # "opt 60" is the same
    return {name: Way(policy) for name, policy in bare.items()} | {
        f"{name}, fitted": Way(policy, temperature) for name, policy in fitted.items()
    }
