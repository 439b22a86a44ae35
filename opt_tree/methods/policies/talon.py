"""Talon: layers as wide as the drafter is unsure, until the budget is spent (arXiv:2601.07353)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.children import TopK
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class LayerBest(TopK):
    """The `total` most probable children of a whole layer, whatever the pool already holds."""

    @property
    def budget(self) -> int | None:
        """All of them: a later layer is not compared with the earlier ones."""
        return None


@dataclass(frozen=True)
class Talon(TreePolicy):
    """Spend the budget layer by layer on what is not much less likely than the layer's best (arXiv:2601.07353, Alg. 2).

    The first layer is plain: the root's `top_k` best tokens, whatever their probabilities (eq. 5), since small drafters
    are overconfident. Of every further layer S, all children of the nodes kept in the layer before (eq. 3), those are
    kept whose path probability is at least `ratio` times the best one of S (mu * m_d, eq. 4), the best ones where the
    budget does not suffice for all. Drafting ends when `nodes` nodes are kept: deep and narrow where the drafter is
    sure, shallow and wide where it is not. Each layer keeps one node at least, so there are at most `nodes` of them.

    Example, top_k = 2, ratio = .3, nodes = 7, the distributions of `Eagle2`'s; what stands in brackets was not kept:

                 root
               /      \\
            .6          .3             plain top 2, five nodes left
           /  \\        /  \\
        .42  (.12)   .21  (.06)        at least .3 * .42 = .126: three left
        /  \\         /  \\
     .294 (.084)  .147 (.042)          at least .0882: one left
       |            |
     .206        (.103)                at least .0617, but the budget is for one

        pair = load_pair("demo")
        answer = Decoder(pair.target, pair.drafter, Talon(0.03, 30)).generate(pair.encode("Why is the sky blue?"))
        [int(step.tree.depths.max()) for step in answer.steps]
    """

    ratio: float = 0.03
    """The paper's mu: a node is kept if its path probability is at least this fraction of its layer's best."""
    nodes: int = 60
    """Drafted nodes sent to the target, root excluded; all of them are used unless `max_depth` ends it. The paper's 60
    count the root."""
    top_k: int = 10
    """Width of the first layer."""
    max_depth: int = 60
    """Layers drafted at most. The paper has no limit beside the budget; nor do these defaults, a node a layer."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must lie in [0, 1], got {self.ratio}")
        check_sizes(nodes=self.nodes, top_k=self.top_k, max_depth=self.max_depth)

    @property
    def children(self) -> LayerBest:
        # A layer never keeps more than the whole budget.
        return LayerBest(total=self.nodes)

    def _layers(self, pool: CandidatePool) -> list[Int[np.ndarray, " kept"]]:
        """The kept pool rows of every layer. All rows of a layer have kept parents: no others were expanded."""
        log_ratio = math.log(self.ratio) if self.ratio else -math.inf
        layers, left = [], self.nodes
        for depth in range(1, pool.depth + 1):
            rows = (pool.depths == depth).nonzero()[0]
            if not len(rows):
                break  # the drafter knew nothing there
            values = pool.path_log_probs[rows]
            order = np.argsort(-values, kind="stable")
            unlikely = values[order] < values[order[0]] + log_ratio
            order = order[: self.top_k] if depth == 1 else order[~unlikely]
            layers.append(np.sort(rows[order[:left]]))
            left -= len(layers[-1])
        return layers

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        if not len(pool.newest):
            return None
        layers = self._layers(pool)
        return layers[-1] if sum(map(len, layers)) < self.nodes else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.concatenate([[0], *self._layers(pool)])


@register("talon", about="layer by layer whatever is not much less likely than the layer's best", paper="2601.07353")
def _at_budget(nodes: int, ratio: float = Talon.ratio, max_depth: int = DEPTH) -> Talon:
    return Talon(ratio, nodes, max_depth=max_depth)
