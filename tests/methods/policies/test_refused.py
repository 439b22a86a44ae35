"""Numbers that no tree can be made of: each is refused where it is given, by its name or its value."""

import math
from collections.abc import Callable

import pytest

from opt_tree import OptTree, Static, TopK
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.policies.acceptance_rates import HALVING, AcceptanceRates
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.methods.policies.jetspec import JetSpecTree
from opt_tree.methods.policies.priced import Priced
from opt_tree.methods.policies.registry import make_policy
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.methods.policies.talon import Talon
from opt_tree.methods.policies.threshold_chain import ThresholdChain

HUGE = 10**9
TOO_MUCH = r"^\w+ must be at most 4096, got \d{9,}$"
COSTS = Costs.straight(1.0, 1.0, 1.0, 1.0, 1.0)
ROW = ((1, 1.0),)

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: make_policy("chains:0", 60), "k must be at least 1, got 0"),
    (lambda: make_policy("delayed:0", 60), "branches must be at least 1, got 0"),
    (lambda: OptTree(nodes=0), "nodes must be at least 1, got 0"),
    (lambda: OptTree(nodes=-3), "nodes must be at least 1, got -3"),
    (lambda: OptTree(nodes=HUGE), TOO_MUCH),
    (lambda: OptTree(threshold=-0.1), "threshold must be 0 or more, got -0.1"),
    (lambda: OptTree(threshold=math.nan), "threshold must be 0 or more, got nan"),
    (lambda: OptTree(max_depth=0), "max_depth must be at least 1, got 0"),
    (lambda: OptTree(max_depth=HUGE), TOO_MUCH),
    (lambda: Eagle2(top_k=0), "0"),
    (lambda: Eagle2(top_k=HUGE), TOO_MUCH),
    (lambda: Eagle2(depth=-1), "-1"),
    (lambda: Eagle2(depth=HUGE), TOO_MUCH),
    (lambda: Eagle2(nodes=0), "0"),
    (lambda: DynamicDepth(threshold=math.nan), "nan"),
    (lambda: DynamicDepth(checks=(3, 0)), r"\(3, 0\)"),
    (lambda: DynamicDepth(top_k=0), "0"),
    (lambda: DynamicDepth(depth=HUGE), TOO_MUCH),
    (lambda: Talon(ratio=1.5), "1.5"),
    (lambda: Talon(nodes=0), "0"),
    (lambda: JetSpecTree(width=0), "0"),
    (lambda: Talon(top_k=HUGE), TOO_MUCH),
    (lambda: ThresholdChain(0), "nodes must be at least 1, got 0"),
    (lambda: ThresholdChain(4, 0.5, 5), "least must lie in 0..nodes, got 5 of 4"),
    (lambda: ThresholdChain(4, 1.5), "threshold must be a probability, got 1.5"),
    (lambda: ThresholdChain(nodes=HUGE), TOO_MUCH),
    (lambda: AcceptanceRates((0.5, 1.5)), "1.5"),
    (lambda: AcceptanceRates(()), "empty"),
    (lambda: sequoia_tree(HALVING, nodes=0), "0"),
    (lambda: sequoia_tree(HALVING, depth=0), "0"),
    (lambda: sequoia_tree(HALVING, depth=HUGE), TOO_MUCH),
    (lambda: greedy_static_tree(AcceptanceRates((0.5,)), 0), "0"),
    (lambda: greedy_static_tree(AcceptanceRates((0.5,)), 3, depth=0), "0"),
    (lambda: AcceptanceRates((0.5,), ((math.nan,),)), "nan"),
    (lambda: Static(((0,), (0,))), "listed twice"),
    (lambda: Static(((0, 0),)), r"path \(0, 0\) is listed without its parent \(0,\)"),
    (lambda: Static(((-1,),)), r"ranks .* got \(-1,\)"),
    (lambda: Static(((),)), r"ranks .* got \(\)"),
    (lambda: Static(((1,),), WithoutReplacement), r"\(1,\) is listed without the sibling"),
    (lambda: Static.chain(HUGE), TOO_MUCH),
    (lambda: Static.kary(2, HUGE), TOO_MUCH),
    (lambda: Static.kary(64, 5), TOO_MUCH),
    (lambda: Static.of_widths(((HUGE,),)), TOO_MUCH),
    (lambda: Sampled(()), ""),
    (lambda: Sampled((2, 0)), ""),
    (lambda: Sampled.chain(HUGE), TOO_MUCH),
    (lambda: Sampled.chains(2, HUGE), TOO_MUCH),
    (lambda: Sampled.kary(HUGE, 1), TOO_MUCH),
    (lambda: Sampled.delayed(0, 2, 0), ""),
    (lambda: Sampled.delayed(1, 0, 1), "branches must be at least 1, got 0"),
    (lambda: Sampled.delayed(-1, 2, 3), "trunk must be at least 0, got -1"),
    (lambda: Sampled.delayed(1, 2, -1), "length must be at least 0, got -1"),
    (lambda: Sampled.delayed(length=HUGE), TOO_MUCH),
    (lambda: DySpec(nodes=0), ""),
    (lambda: DySpec(threshold=1.0), ""),
    (lambda: DySpec(max_depth=HUGE), TOO_MUCH),
    (lambda: Rheo(threshold=math.nan), ""),
    (lambda: Rheo(max_depth=HUGE), TOO_MUCH),
    (lambda: IID(0), ""),
    (lambda: BestAndDraw(0), ""),
    (lambda: WithoutReplacement(2, total=3), ""),
    (lambda: TopK(), "per_node or total"),
    (lambda: TopK(per_node=2, total=3), "per_node or total"),
    (lambda: Costs(((1, 0.0), (2, 1.0)), 1, ROW), "above 0 seconds"),
    (lambda: Costs(((2, 1.0),), 1, ROW), "scoring must begin with 1 row"),
    (lambda: Costs(((1, 1.0), (3, 2.0), (2, 3.0)), 1, ROW), "scoring must rise in rows"),
    (lambda: Costs(((1, 2.0), (1, 3.0)), 1, ROW), "scoring must rise in rows"),
    (lambda: Costs(ROW, 1, ((1, math.nan),)), "drafting must have points of 0 seconds or more"),
    (lambda: Costs(ROW, 1, ()), "drafting must have points"),
    (lambda: Costs(ROW, -1, ROW), "first must be 0 or more, and finite, got -1"),
    (lambda: Priced(COSTS, nodes=0), "nodes must be at least 1, got 0"),
    (lambda: Priced(COSTS, nodes=256), "nodes must be below 256, the rows that costs are known of, got 256"),
    (lambda: Priced(COSTS, max_depth=HUGE), TOO_MUCH),
    (lambda: Auto(COSTS, nodes=300), "nodes must be below 256, the rows that costs are known of, got 300"),
    (lambda: BetaLength(0), "longest must be at least 1, got 0"),
    (lambda: CalibratedLength(0), "nodes"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_no_tree_can_be_made_of_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
