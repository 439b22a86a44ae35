"""The fixed trees of Medusa and EAGLE-1, computed from measured acceptance rates instead of copied."""

import heapq
from itertools import accumulate
from math import inf

from opt_tree.children import TopK
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates, Rates
from opt_tree.methods.policies.registry import Siblings, register
from opt_tree.methods.policies.static import Static
from opt_tree.policy import check_sizes


def greedy_static_tree(rates: AcceptanceRates, nodes: int, depth: int | None = None) -> Static:
    """Add the node of largest acceptance until there are `nodes` (Medusa, arXiv:2401.10774, section 2.3.3).

    A node is worth the product of the rates on the way to it, with each depth's own rates where they were measured, as
    Medusa has them for each head. (Medusa counts a head at every place; rates here are of children whose parent was
    accepted.) The product never grows downwards, so what is added next always has its parent already, and the greedy
    tree is the best of its size: OPT-Tree's argument, with rates in place of draft probabilities, once and for all
    texts. The tree is then drafted in every step, and has fewer nodes than asked for only where no more fit into
    `depth`.

    Medusa's released trees have 63 nodes, and four layers though there are five heads. EAGLE-1's is a list of 25 paths,
    five layers deep (`eagle1_list`); `eagle1` is this rule at its depth.

    Example, the rates (.6, .3, .1) at every depth, five nodes:

              root
             /    \\
           .6      .3
          /  \\      |
        .36  .18   (.18)          of equal nodes the one of lower ranks: (0, 1) before (1, 0)
         |
       .216

    >>> greedy_static_tree(AcceptanceRates((0.6, 0.3, 0.1)), 5).paths
    ((0,), (0, 0), (1,), (0, 0, 0), (0, 1))

    `python -m evaluation.compare --policies medusa` measures rates, and draws these trees.
    """
    check_sizes(nodes=nodes, **({} if depth is None else {"depth": depth}))
    deepest = inf if depth is None else depth
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while waiting and len(paths) <= nodes:  # the root is a path, too, and no node
        value, length, path = heapq.heappop(waiting)
        paths.append(path)
        if length < deepest:
            for rank, rate in enumerate(rates.below(length)):
                heapq.heappush(waiting, (value * rate, length + 1, (*path, rank)))
    return Static.of(paths[1:])


@register("medusa", about="a fixed shape grown greedily from acceptance rates", paper="2401.10774")
def _medusa(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = 4) -> Static:
    if siblings is not TopK:  # drawn siblings come one after another: no rank can be skipped
        rates = AcceptanceRates(_falling(rates.by_rank), tuple(map(_falling, map(rates.below, range(rates.depths)))))
    return Static(greedy_static_tree(rates, nodes, depth).paths, siblings)


@register("eagle1", about="the shape of `medusa`, as deep as EAGLE-1's tree", paper="2401.15077")
def _eagle1(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = 5) -> Static:
    return _medusa(nodes, siblings, rates, depth)


def _falling(rates: Rates) -> Rates:
    """The rates, none above an earlier rank's."""
    return tuple(accumulate(rates, min))
