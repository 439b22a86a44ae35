"""How policies grow their trees on tensors: OPT-Tree's, EAGLE-2's and DDD's, and trees that are given.

Owns what `expand` and `select` are there, and how a layer's children are picked. Knows nothing of models.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backends.tensor_pool import Expanded, Selected, TensorChildren, TensorFrontier, TensorLayer, TensorPool
from opt_tree.tree import send


class Growth(ABC):
    """How one policy grows its trees on tensors. Begun anew for each tree (`begin`)."""

    nodes: int
    """Nodes of a tree at most."""
    widest: int
    """Nodes of a frontier at most."""
    stops = False
    """Whether its trees often end before their last layer, by the numbers."""

    def room(self, limit: int) -> int:
        """How many nodes are expanded at most in a tree of so many layers."""
        return (limit - 1) * self.widest

    def begin(self, device: torch.device) -> None:  # noqa: B027 - most have nothing to begin
        """Begin a tree."""

    def layer(
        self,
        front: TensorFrontier,
        values: Float[Tensor, "frontier columns"],
        vocabulary: tuple[Int[Tensor, "*frontier columns"] | None, Bool[Tensor, " vocab"] | None],
        depth: int,
        last: bool,
    ) -> tuple[TensorLayer, TensorFrontier | None]:
        """Return the candidates below a frontier, and what is drafted below next; None: nothing, whatever the numbers.

        Arguments:
            values: what the drafter says of the frontier.
            vocabulary: the tokens of its columns, of every row the same or each its own (None: their numbers), and the
                tokens at which the text ends; nothing below them goes into the tree.
            depth: of the candidates.
            last: nothing is drafted below them.
        """
        # Rows that are not there have no children.
        above, (names, ends) = torch.where(front.live, front.paths, -math.inf).to(values.dtype), vocabulary
        paths, columns, rows = self.pick(values, above)
        tokens = columns
        if names is not None:
            tokens = names[columns] if names.ndim == 1 else names[rows, columns]
        # A child never exceeds its parent, whatever the rounding.
        paths, over = torch.minimum(paths.double(), front.paths[rows]), front.over[rows]
        none, expanded = torch.zeros_like(tokens), None if last else self.expand(paths, depth)
        if expanded is None:
            return TensorLayer(tokens, front.rows[rows], paths, over, none.bool(), none), None
        places, live = expanded
        slots = front.slots + torch.arange(len(places), device=places.device)
        marks = none.bool().scatter(0, places, live), none.scatter(0, places, slots)
        below, ended = tokens[places], over[places]
        if ends is not None:
            ended = ended | ends[below]
        own = front.first + places, live, paths[places], ended, below, rows[places]
        counts = front.first + len(tokens), front.slots + len(places)
        return TensorLayer(tokens, front.rows[rows], paths, over, *marks), TensorFrontier(*own, *counts)

    @abstractmethod
    def pick(self, log_probs: Float[Tensor, "frontier columns"], above: Float[Tensor, " frontier"]) -> TensorChildren:
        """Return the children of a layer. `above`: path log-probabilities of its nodes; -inf: they have none."""

    @abstractmethod
    def expand(self, paths: Float[Tensor, " children"], depth: int) -> Expanded | None:
        """Return what is drafted below next, of the newest layer. None: nothing is, whatever the numbers."""

    @abstractmethod
    def select(self, pool: TensorPool) -> Selected:
        """Return the tree."""


class Best(Growth):
    """OPT-Tree's growth (`OptTree`): a layer's n best above the n-th best so far, while E(A) grows by a threshold."""

    def __init__(self, nodes: int, threshold: float) -> None:
        self.nodes = self.widest = nodes
        self.threshold, self.stops = threshold, threshold > 0

    def begin(self, device: torch.device) -> None:
        self._best = torch.full((self.nodes,), -math.inf, dtype=torch.float64, device=device)
        """The n best candidates so far, the best first."""
        self._expected = torch.zeros((), dtype=torch.float64, device=device)

    def pick(self, log_probs: Float[Tensor, "frontier columns"], above: Float[Tensor, " frontier"]) -> TensorChildren:
        paths = (log_probs + above[:, None]).flatten()
        # NaN exceeds nothing. Numbers of an answer are compared in its dtype, of which the floor is one.
        paths = torch.where(paths > self._best[-1], paths, -math.inf)
        places = first_best(paths, self.nodes)
        columns = log_probs.shape[1]
        return TensorChildren(padded(paths, self.nodes)[places], places % columns, (places // columns) % len(above))

    def expand(self, paths: Float[Tensor, " children"], depth: int) -> Expanded:
        before, self._best = self._expected, torch.cat([self._best, paths]).topk(self.nodes).values
        # A running sum: the host adds the greatest first, too.
        self._expected = self._best.exp().cumsum(0)[-1]
        live = (paths > self._best[-1]) & (self._expected - before > self.threshold)
        return Expanded(torch.arange(len(paths), device=paths.device), live)

    def select(self, pool: TensorPool) -> Selected:
        return pool.best(self.nodes)


class Beam(Growth):
    """EAGLE-2's growth (`Eagle2`), and DDD's, which asks after some layers how likely the beam is (`DynamicDepth`)."""

    def __init__(self, top_k: int, nodes: int, threshold: float = -math.inf, checks: Sequence[int] = ()) -> None:
        self.widest, self.nodes, self.threshold, self.checks = top_k, nodes, threshold, frozenset(checks)
        self.stops = bool(self.checks)

    def pick(self, log_probs: Float[Tensor, "frontier columns"], above: Float[Tensor, " frontier"]) -> TensorChildren:
        return of_each(log_probs, above, self.widest)

    def expand(self, paths: Float[Tensor, " children"], depth: int) -> Expanded:
        places = paths.argsort(descending=True, stable=True)[: self.widest].sort().values
        live = paths[places] > -math.inf
        if depth in self.checks:
            live = live & ~(paths[places].logsumexp(0) < self.threshold)
        return Expanded(places, live)

    def select(self, pool: TensorPool) -> Selected:
        return pool.best(self.nodes)


class Fixed(Growth):
    """The growth of a tree that is given by its paths (`Static`): which children go where is known beforehand."""

    def __init__(self, paths: Sequence[tuple[int, ...]], columns: int) -> None:
        """`paths`: as `Static` has them. `columns`: those of the drafter's answers."""
        self.nodes = len(paths)
        self.width = min(1 + max(path[-1] for path in paths), columns)
        known, inner = set(paths), {path[:-1] for path in paths}
        frontier: list[tuple[int, ...]] = [()]
        self._layers: list[tuple[int, list[int], list[int]]] = []
        for _ in range(max(map(len, paths))):
            layer = [(*path, rank) for path in frontier for rank in range(self.width)]
            inside = [place for place, path in enumerate(layer) if path in known]
            expanded = [place for place in inside if layer[place] in inner]
            self._layers.append((len(layer), inside, expanded))
            frontier = [layer[place] for place in expanded]
        self.widest = max(len(expanded) for *_, expanded in self._layers)
        self._sent: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}

    def begin(self, device: torch.device) -> None:
        if device not in self._sent:
            numbers = [(np.array(inside, int), np.array(expanded, int)) for _, inside, expanded in self._layers]
            self._sent[device] = [(send(inside, device), send(expanded, device)) for inside, expanded in numbers]
        self._places = self._sent[device]

    def pick(self, log_probs: Float[Tensor, "frontier columns"], above: Float[Tensor, " frontier"]) -> TensorChildren:
        return of_each(log_probs, above, self.width)

    def expand(self, paths: Float[Tensor, " children"], depth: int) -> Expanded | None:
        places = self._places[depth - 1][1]
        return Expanded(places, paths[places] > -math.inf) if len(places) else None

    def select(self, pool: TensorPool) -> Selected:
        begin, rows = 1, [torch.zeros(1, dtype=torch.long, device=pool.device)]
        for (size, _, _), (inside, _) in zip(self._layers[: pool.depth], self._places, strict=False):
            rows.append(begin + inside)
            begin += size
        return pool.tree(torch.cat(rows))


def of_each(
    log_probs: Float[Tensor, "frontier columns"], above: Float[Tensor, " frontier"], count: int
) -> TensorChildren:
    """The `count` most probable children of each node, node after node, the most probable first."""
    found = log_probs.topk(min(count, log_probs.shape[1]))
    rows = torch.arange(len(above), device=above.device)[:, None].expand_as(found.indices)
    paths = (found.values + above[:, None]).flatten()
    return TensorChildren(torch.where(paths > -math.inf, paths, -math.inf), found.indices.flatten(), rows.flatten())


def first_best(values: Float[Tensor, " numbers"], count: int) -> Int[Tensor, " count"]:
    """Places of the `count` greatest, rising; of equal ones at the cut the first, which `topk` leaves open."""
    values = padded(values, count)
    least = values.topk(count).values[-1]
    greater, equal = values > least, values == least
    taken = greater | (equal & (equal.cumsum(0) <= count - greater.sum()))
    places = torch.where(taken, taken.cumsum(0) - 1, count)
    numbers = torch.arange(len(values), device=values.device)
    return torch.zeros(count + 1, dtype=torch.long, device=values.device).scatter(0, places, numbers)[:count]


def padded(values: Float[Tensor, " numbers"], count: int) -> Float[Tensor, " padded"]:
    """At least `count` numbers: -inf behind those that there are."""
    return torch.constant_pad_nd(values, (0, max(count - len(values), 0)), -math.inf)
