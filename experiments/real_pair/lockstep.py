"""The trees that many policies draw along a stored greedy text, and what each step would emit: without a target.

At temperature 0 a text does not depend on the trees, so it decides what is accepted (EDR, arXiv:2610.10411, for trees).
Policies that stand at the same place of the text share their draft forwards: a node is drafted once, whoever asks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_tree import CausalLMDrafter, Tree, TreePolicy
from opt_tree.answers import LogProbs
from opt_tree.grow import Asking, run
from opt_tree.pool import CandidatePool, Frontier
from opt_tree.sampling import Sampling
from opt_tree.target import Forward
from opt_tree.tools.counterfactual import follow


class Way(NamedTuple):
    """A policy, and the temperature by which the drafter's scores are divided (1: bare)."""

    policy: TreePolicy
    temperature: float = 1.0


@dataclass(frozen=True)
class Stored:
    """A greedy text: the prompt, the tokens behind it, and how long it was allowed to become."""

    prompt: list[int]
    tokens: list[int]
    limit: int
    ends: frozenset[int]
    """The tokens at which it stops."""


@dataclass(frozen=True)
class Taken:
    """One step of a policy."""

    place: int
    """New tokens before it."""
    emitted: int
    accepted: int
    known: bool
    """Whether the accepted path ended within the stored text; if not, more of the tree may have been right."""
    expected: float
    """E(A) of the tree."""
    nodes: int
    layers: int
    forwards: int
    drafted: int
    """Rows in those forwards, the context's last token among them, without what the drafter had to catch up with."""

    def row(self) -> list[Any]:
        """Its numbers, for a file."""
        return [round(value, 5) if isinstance(value, float) else int(value) for value in asdict(self).values()]


@dataclass
class _Growing:
    """A tree under way: its pool, and of each node it had expanded the row in which the shared drafter answered."""

    way: Way
    layers: int
    pool: CandidatePool
    rows: list[int] = field(default_factory=lambda: [0])
    asked: list[int] = field(default_factory=lambda: [0])
    """Rows of the newest answer that its newest frontier is."""
    forwards: int = 1
    tree: Tree | None = None

    def add(self, laws: LogProbs) -> Frontier | None:
        """Take in the newest answer; return what is to be expanded next, or None, and the tree is there."""
        whole = self.asked == list(range(len(laws.values)))
        self.pool.add(laws if whole else LogProbs(laws.values[self.asked]))
        rows = self.way.policy.expand(self.pool) if self.pool.depth < self.layers else None
        if rows is None or not len(rows):
            self.tree = self.pool.tree(self.way.policy.select(self.pool))
            return None
        self.forwards += 1
        return self.pool.frontier(rows)


def grow(
    drafter: CausalLMDrafter, context: list[int], ways: Mapping[str, Way], room: int
) -> Asking[dict[str, _Growing]]:
    """Draw the tree of every policy below the last token of the context, of `room` layers at most.

    The trees are those of `opt_tree.grow.grow`, node for node, where the drafter's arithmetic is canonical.
    """
    growing = {
        name: _Growing(way, min(way.policy.max_depth, room), CandidatePool(context[-1], way.policy.children))
        for name, way in ways.items()
    }
    for one in growing.values():
        if one.layers <= 0:
            one.forwards, one.tree = 0, Tree.of([context[-1]], [-1])
    live = [one for one in growing.values() if one.tree is None]
    above: list[list[int]] = [[]]  # of each row that was answered: the columns that it sees, its own the last one
    logits = (yield from _logits(drafter, drafter.root(context))) if live else torch.zeros(0)
    while live:
        laws = {t: LogProbs.of(logits, scale=1 / t) for t in {one.way.temperature for one in live}}
        wanted: dict[tuple[int, int], int] = {}
        for one in live:
            frontier = one.add(laws[one.way.temperature])
            if frontier is not None:
                parents = [one.rows[parent] for parent in frontier.parents.tolist()]
                nodes = zip(parents, frontier.tokens.tolist(), strict=True)
                one.asked = [wanted.setdefault(node, len(wanted)) for node in nodes]
                one.rows += [len(above) + row for row in one.asked]
        live = [one for one in live if one.tree is None]
        if live:
            logits = yield from _logits(drafter, drafter.expand(_frontier(list(wanted), above)))
    drafter.lm.cut(drafter.lm.length)  # what was drafted here is nobody's context
    return growing


def _frontier(nodes: Sequence[tuple[int, int]], above: list[list[int]]) -> Frontier:
    """Describe nodes to the drafter, given by their parents' rows and their tokens; note them as rows of their own."""
    parents, tokens = np.array(nodes).T
    first = len(above)
    visible = np.zeros((len(nodes), first - 1 + len(nodes)), dtype=bool)
    for index, parent in enumerate(parents.tolist()):
        above.append([*above[parent], first - 1 + index])
        visible[index, above[-1]] = True
    return Frontier(tokens, parents, np.array([len(seen) for seen in above[first:]]), visible)


def _logits(drafter: CausalLMDrafter, forward: Forward) -> Asking[Tensor]:
    """What the draft model says, before any temperature: `[rows, vocab]`."""
    output = yield forward
    return output.logits[:, : drafter.vocab]


@torch.inference_mode()
def steps_along(drafter: CausalLMDrafter, text: Stored, ways: Mapping[str, Way]) -> dict[str, list[Taken]]:
    """Return the steps that each policy takes through the text; their lengths are those of decoding with it."""
    return run(stepping_along(drafter, text, ways))


def stepping_along(drafter: CausalLMDrafter, text: Stored, ways: Mapping[str, Way]) -> Asking[dict[str, list[Taken]]]:
    """The same, as a generator of the forwards that it needs."""
    drafter.begin(text.prompt, 0, None, Sampling())
    begin, length, end = len(text.prompt), len(text.tokens), len(text.prompt) + text.limit
    at, steps = dict.fromkeys(ways, 0), {name: list[Taken]() for name in ways}
    for place in _places(at, length):
        context = [*text.prompt, *text.tokens[:place]]
        here = {name: ways[name] for name, where in at.items() if where == place}
        grown = yield from grow(drafter, context, here, end - begin - place - 1)
        for name, one in grown.items():
            assert one.tree is not None
            steps[name].append(_taken(one, one.tree.ending_at(text.ends), text, place))
            at[name] += steps[name][-1].emitted
    return steps


def _places(at: Mapping[str, int], length: int) -> Iterator[int]:
    """The earliest place at which somebody stands, as long as there is one before the end."""
    while (place := min(at.values())) < length:
        yield place


def _taken(one: _Growing, tree: Tree, text: Stored, place: int) -> Taken:
    rest = text.tokens[place:]
    path = follow(tree, rest)
    accepted = len(path) - 1
    known = accepted < len(rest) or path[-1] not in tree.parents
    emitted = min(accepted + 1, len(rest))
    layers = int(tree.depths.max())
    return Taken(
        place,
        emitted,
        accepted,
        known,
        tree.expected_accepted,
        tree.nodes,
        layers,
        one.forwards,
        len(one.rows) * bool(one.forwards),
    )
