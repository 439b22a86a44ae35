"""Sequoia: the fixed tree that is best for given acceptance rates, by dynamic programming (arXiv:2402.12374)."""

import numpy as np
from jaxtyping import Int
from numpy.lib.stride_tricks import sliding_window_view

from opt_tree.children import TopK
from opt_tree.errors import require
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.registry import DEPTH, Siblings, register
from opt_tree.methods.policies.static import Static
from opt_tree.policy import check_sizes


def sequoia_tree(rates: AcceptanceRates, nodes: int = 60, depth: int = 8, siblings: Siblings = TopK) -> Static:
    """The tree of at most `nodes` nodes and `depth` layers with the largest F(T) (arXiv:2402.12374, Alg. 1 and 4).

    F(T) is the sum over all nodes, the root included, of the product of the rates on the way to them: the expected
    number of tokens a step if a child's acceptance depends on its rank alone (Def. 3.1 to 3.3, Prop. 3.4): 1 more than
    `rates.expected_accepted(tree.paths)`. With one child more at a time,

        best[m][l][0] = 1 for m = 1                                   a root alone; l is the number of layers left
        best[m][l][b] = max over s of best[m - s][l][b - 1] + rates[b - 1] * max over c of best[s][l - 1][c]

    where m counts the root, b its children, and s the nodes given to the b-th child's own tree. Rates `by_depth` are
    the paper's two-dimensional variant, for drafters that grow worse with depth. Unlike `greedy_static_tree`, a rank is
    never used without the ranks before it, as siblings that are drawn one after the other demand; with falling rates
    the two agree. There are fewer nodes where no more fit into `depth`, or add nothing. The paper's hardware-aware
    search chooses `nodes` and `depth` by measuring both models. `siblings` says how siblings are picked: `TopK` for
    `greedy` and `match`; a sampled kind for a verifier of it. Example, rates (.6, .3, .1), five nodes, two layers:

               root
              /    \\
           .6       .3              F = 1 + .6 + .3 + .36 + .18 + .18; a third child of the root would add .1 only
          /  \\      |
        .36  .18   .18

    >>> rates = AcceptanceRates((0.6, 0.3, 0.1))
    >>> tree = sequoia_tree(rates, nodes=5, depth=2)
    >>> tree.paths
    ((0,), (0, 0), (0, 1), (1,), (1, 0))
    >>> round(1 + rates.expected_accepted(tree.paths), 2)
    2.62

    `python -m evaluation.compare --policies sequoia` measures rates, and draws these trees.
    """
    require(AcceptanceRates, rates=rates)
    check_sizes(nodes=nodes, depth=depth)
    return Static(tuple(_best_paths(rates, nodes, depth)), siblings)


def _best_paths(rates: AcceptanceRates, nodes: int, depth: int) -> list[tuple[int, ...]]:
    """The dynamic programme of `sequoia_tree`, O(nodes ** 2 * depth * ranks), and the way back through it."""
    sizes = np.arange(nodes + 2)  # nodes of a subtree, its root included; 0 is never used
    too_few = np.full(nodes + 1, -np.inf)
    alone = np.where(sizes == 1, 1.0, -np.inf)
    below = alone
    layers: list[tuple[Int[np.ndarray, " sizes"], list[Int[np.ndarray, " sizes"]]]] = []
    for parent in reversed(range(min(depth, nodes))):
        value, best, width, taken = alone, alone, np.zeros_like(sizes), []
        for children, rate in enumerate(rates.below(parent)[:nodes], 1):
            gain = np.where(below > 0, rate * np.maximum(below, 0), -np.inf)
            # [m, s]: the newest child's tree takes s of m nodes and leaves value[m - s] to the rest.
            totals = sliding_window_view(np.concatenate([too_few, value]), nodes + 2)[:, ::-1] + gain
            taken.append(totals.argmax(1))
            value = totals[sizes, taken[-1]]
            width = np.where(value > best, children, width)
            best = np.maximum(value, best)
        if not rates.by_depth and (best == below).all():
            break  # another layer adds nothing to any size, nor would one more
        layers.append((width, taken))
        below = best
    paths: list[tuple[int, ...]] = []

    def walk(path: tuple[int, ...], size: int, layer: int) -> None:
        if layer < 0:
            return
        width, taken = layers[layer]
        shares = []
        for children in range(int(width[size]), 0, -1):
            shares.append(int(taken[children - 1][size]))
            size -= shares[-1]
        for rank, share in enumerate(reversed(shares)):
            paths.append((*path, rank))
            walk(paths[-1], share, layer - 1)

    walk((), int(below.argmax()), len(layers) - 1)
    return paths


@register("sequoia", about="the best fixed shape for measured acceptance rates", paper="2402.12374")
def _at_budget(nodes: int, siblings: Siblings, rates: AcceptanceRates, depth: int = DEPTH) -> Static:
    return sequoia_tree(rates, nodes, depth, siblings)
