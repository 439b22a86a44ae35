"""Trees whose shape is fixed beforehand: chains, k-ary trees, any list of paths, and the empty tree."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice, product
from numbers import Integral

import numpy as np
from jaxtyping import Int

from opt_tree.children import Children, TopK
from opt_tree.errors import require
from opt_tree.methods.policies.registry import DEPTH, Siblings, register
from opt_tree.policy import TreePolicy, check_sizes
from opt_tree.pool import CandidatePool

TOKEN_RECYCLING = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)
"""How many children each node of Token Recycling's tree has (arXiv:2408.08696), layer by layer: its official repository
calls it "2.2.2". 80 nodes, six layers."""
EAGLE_1 = ((4,), (3, 2, 2, 1), (3, 2, 2, 1, 0, 0, 0, 0), (3, 0, 0, 0, 0, 0, 0, 0), (2, 0, 0))
"""The same of EAGLE-1's tree (arXiv:2401.15077): `mc_sim_7b_63` of its official repository. 25 nodes, five layers."""


@dataclass(frozen=True)
class Static(TreePolicy):
    """A tree given by its paths; a path lists the ranks of its tokens among their siblings, best = 0.

    `Static(((0,), (1,), (0, 0)))` drafts the two best tokens and, below the best, its best:

          root
         /    \\
        0      1
        |
        0
    """

    paths: tuple[tuple[int, ...], ...]
    siblings: Callable[[int], Children] = TopK
    """How that many siblings are picked; sampled ones (`IID`, `WithoutReplacement`) rank as they are drawn."""

    def __post_init__(self) -> None:
        require(Sequence, paths=self.paths)
        check_sizes(0, nodes=len(self.paths))
        for path in self.paths:
            require(Sequence, path=path)
            for rank in path:
                require(Integral, rank=rank)
        known = set(self.paths)
        if len(known) != len(self.paths):
            raise ValueError("a path is listed twice")
        for path in self.paths:
            if not path or min(path) < 0:
                raise ValueError(f"a path lists the ranks of its tokens, 0 or more each; got {path}")
            if path[:-1] and path[:-1] not in known:
                raise ValueError(f"path {path} is listed without its parent {path[:-1]}")
            if self.children.sampled and path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(f"path {path} is listed without the sibling that is drawn before it")

    @classmethod
    def chain(cls, length: int) -> "Static":
        """One path of the best tokens: classic speculative decoding."""
        check_sizes(0, length=length)
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def kary(cls, arity: int, depth: int) -> "Static":
        """Every node has its `arity` best children, `depth` layers deep."""
        check_sizes(0, arity=arity, depth=depth)
        check_sizes(0, nodes=sum(arity**d for d in range(1, depth + 1)))
        return cls(tuple(path for d in range(1, depth + 1) for path in product(range(arity), repeat=d)))

    @classmethod
    def of_widths(cls, widths: Iterable[Iterable[int]]) -> "Static":
        """A tree from the number of children of each node, layer by layer, the root's layer first.

        >>> Static.of_widths(((2,), (1, 0))).paths
        ((0,), (1,), (0, 0))
        """
        paths: list[tuple[int, ...]] = []
        layer: list[tuple[int, ...]] = [()]
        for counts in widths:
            check_sizes(0, nodes=sum(counts := tuple(counts)))
            layer = [(*path, rank) for path, count in zip(layer, counts, strict=True) for rank in range(count)]
            paths += layer
        return cls(tuple(paths))

    @classmethod
    def empty(cls) -> "Static":
        """No draft at all: plain decoding through the same loop, the honest baseline."""
        return cls(())

    @classmethod
    def of(cls, paths: Iterable[Iterable[int]]) -> "Static":
        """A tree from any nested lists of ranks."""
        return cls(tuple(tuple(path) for path in paths))

    @property
    def max_depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def children(self) -> Children:
        return self.siblings(self._width)

    @property
    def _width(self) -> int:
        """Siblings that are picked below every expanded node; at least one, even where nothing is drafted."""
        return 1 + max((path[-1] for path in self.paths), default=0)

    @cached_property
    def _next(self) -> Int[np.ndarray, "places ranks"]:
        """`_next[i, r]`: the place (1 + index in `paths`; the root is 0) of the r-th child of place i, or -1."""
        place = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        table = np.full((len(place) + 1, self._width), -1)  # the last row answers for place -1
        for path, i in place.items():
            if path:
                table[place[path[:-1]], path[-1]] = i
        return table

    def _places(self, pool: CandidatePool) -> Int[np.ndarray, " pool"]:
        """Where each candidate stands in the tree, -1 for none. Candidates are stored rank after rank."""
        places = np.zeros(len(pool.tokens), dtype=np.int64)
        for depth in range(1, pool.depth + 1):
            rows = (pool.depths == depth).nonzero()[0]
            parents = pool.parents[rows]
            ranks = np.arange(len(rows)) - np.searchsorted(parents, parents)
            places[rows] = self._next[places[parents], ranks]
        return places

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        newest = pool.newest
        places = self._places(pool)[newest]
        return newest[(self._next[places] >= 0).any(-1)]

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return (self._places(pool) >= 0).nonzero()[0]


@register("plain", about="the empty tree: plain decoding")
def _plain(nodes: int) -> Static:
    return Static.empty()


@register("chain", about="one path: classic speculative decoding", paper="2211.17192")
def _chain(nodes: int, siblings: Siblings) -> Static:
    return Static(Static.chain(min(nodes, DEPTH)).paths, siblings)


@register("kary", about="every node has k children, breadth first until the budget is spent")
def _kary(nodes: int, siblings: Siblings, k: int = 2) -> Static:
    layers = (product(range(k), repeat=depth) for depth in count(1))
    return Static(tuple(islice(chain.from_iterable(layers), nodes)), siblings)


@register("binary", about="every node has two children, breadth first until the budget is spent")
def _binary(nodes: int, siblings: Siblings) -> Static:
    return _kary(nodes, siblings)


@register("recycling_tree", about="Token Recycling's fixed tree of 80 nodes, or the first of them", paper="2408.08696")
def _recycling_tree(nodes: int, siblings: Siblings) -> Static:
    return Static(Static.of_widths(TOKEN_RECYCLING).paths[:nodes], siblings)


@register("eagle1_list", about="EAGLE-1's released tree of 25 nodes, or the first of them", paper="2401.15077")
def _eagle1_list(nodes: int, siblings: Siblings) -> Static:
    return Static(Static.of_widths(EAGLE_1).paths[:nodes], siblings)
