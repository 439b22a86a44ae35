"""A step as a function of tensors: draft, score, judge and keep, with one read of the host behind it all.

Owns the shapes of a step's forwards, and what comes of them on the device. The host gives what it knows before the step
(which rows the drafter lacks, how long both contexts are) in one upload, and reads tree and verdict in one read.
Backends compute the forwards as they compute all others. Knows nothing of texts and of when one ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backend import Inputs
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool, TensorTree, tree_of
from opt_tree.draft_model import OfModel
from opt_tree.model import Model, Pending
from opt_tree.target import Forward, Output
from opt_tree.tree import Tree, fetch, send

LEAST_KEYS = 256
"""A forward has so many keys, or twice as many as often as it takes: few shapes."""
_FACTS = 3
Choice = Callable[[Float[Tensor, "rows vocab"], Int[Tensor, " rows"]], Int[Tensor, " rows"]]
"""From the target's logits and the depths of a tree's rows to the target's own token at every row."""


class Asked(NamedTuple):
    """What a step begins with, all of it known to the host."""

    forward: Forward
    """Rows that the drafter lacks of its context, the root's the last; at most `TensorStep.catching_up`."""
    root: int
    """The last token of the context."""
    limit: int
    """Layers at most."""
    ends: Bool[Tensor, " vocab"] | None
    """The tokens below which nothing goes into the tree, on the device."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What a step left: tree and verdict on the host, all else where it was computed."""

    tree: Tree
    path: list[int]
    token: int
    """The target's own."""
    logits: Float[Tensor, "rows vocab"]
    features: dict[int, Float[Tensor, "path hidden"]]


class TensorStep:
    """The step of one target, one drafter of a model and one policy's growth.

    The drafter's rows of accepted nodes are kept where its forwards read tokens alone. A head's, which were computed
    from features that it estimated, are dropped, as on the host.
    """

    def __init__(self, target: Model, drafter: OfModel, growth: Growth, layers: int) -> None:
        """`layers`: of the deepest tree."""
        self.target, self.drafter, self.growth, self.layers = target, drafter, growth, layers
        self.catching_up = layers + 1 if drafter.features else 2
        """Rows that the drafter can lack after a step: a whole path and one token; or the last node, if it was not
        drafted below, and one token."""

    def slots(self, limit: int) -> tuple[int, int]:
        """How many rows the target's and the drafter's caches get in a step of so many layers, padding included."""
        draft = self.growth.room(limit)
        widest = self.drafter.lm.backend.shape(max(self.growth.widest, self.catching_up), 0)[0]
        return self.target.backend.shape(1 + self.growth.nodes, 0)[0] + 1, self.catching_up + draft + widest + 1

    def run(self, asked: Asked, choose: Choice, launched: Callable[[], None] = lambda: None) -> Judged:
        """Take a step. Both contexts are then as after one of the host, but for what the drafter learns in `accept`.

        `launched` is called when all is on its way and nothing was waited for.
        """
        if not 1 <= len(asked.forward.tokens) <= self.catching_up:
            rows = len(asked.forward.tokens)
            raise ValueError(f"a step catches up with 1 to {self.catching_up} rows of the drafter, got {rows}")
        target, drafting = self.target, _Drafting(self, asked)
        pool = drafting.grow(asked)
        tree = tree_of(pool, self.growth.select(pool), asked.limit)
        output = self._score(tree, drafting.before)
        choice = choose(output.logits, tree.depths)
        path, count = tree.walk(choice, asked.limit)
        steps = torch.arange(asked.limit + 1, device=target.device)
        _move(target, drafting.before + steps, drafting.before + path)
        if asked.forward.features is None and pool.slots:
            below = tree.slots[path[1:]]
            _move(self.drafter.lm, drafting.behind + steps[:-1], drafting.behind + below)
        launched()
        (told,) = fetch(torch.cat([*tree.told(), path, count[None], choice[path[-1:]]]))
        return self._told(told, tree, output, path)

    def _score(self, tree: TensorTree, before: Int[Tensor, ""]) -> Output:
        """Score the tree behind the target's context of `before` tokens."""
        target = self.target
        target.cache.truncate(target.length)
        rows, keys = len(tree.tokens), keys_of(target, target.length + self.slots(1)[0])
        columns, own = torch.arange(keys, device=target.device), torch.arange(rows, device=target.device)
        mask = (columns < before).repeat(rows, 1).index_copy(1, before + own, tree.sees)
        places = columns.index_copy(0, before + own, before + tree.depths)
        return forward_of(target, Rows(tree.tokens, before + tree.depths, before + own, mask, places))

    def _told(self, told: np.ndarray, tree: TensorTree, output: Output, path: Int[Tensor, " path"]) -> Judged:
        """Make a tree and a verdict of what was read, and tell both models which of their rows are kept."""
        judged, verdict = tree.read(told)
        count = int(verdict[-2])
        kept, begin = verdict[: count + 1], self.target.length
        text, places = judged.tokens[kept], begin + np.arange(count + 1)
        self.target._note(Pending(0, text, places))
        self.target.commit(list(range(count + 1)))
        self.drafter.lm._note(Pending(0, text[1:], places[1:]))
        features = {layer: states[path[: count + 1]] for layer, states in output.features.items()}
        return Judged(judged, kept.tolist(), int(verdict[-1]), output.logits[: len(judged)], features)


class _Drafting:
    """The drafter's part of one step: its missing rows, then layer after layer."""

    def __init__(self, step: TensorStep, asked: Asked) -> None:
        """Send the step's integers."""
        self.step, self.lm = step, step.drafter.lm
        rows, most = len(asked.forward.tokens), step.catching_up
        self.keys = keys_of(self.lm, self.lm.length + step.slots(asked.limit)[1])
        self.lm.cache.truncate(self.lm.length)
        numbers = np.zeros((3, most), dtype=np.int64)
        numbers[2] = self.keys - 1  # padding goes where nobody looks
        slots = np.arange(self.lm.length, self.lm.length + rows)
        numbers[:, most - rows :] = asked.forward.tokens, asked.forward.positions, slots
        facts = [step.target.length, self.lm.length + rows, asked.root]
        sent = send(np.append(numbers, facts), self.lm.device)
        self.numbers, (self.before, self.behind, self.root) = sent[:-_FACTS].view(3, most), sent[-_FACTS:].unbind()
        self.columns = torch.arange(self.keys, device=self.lm.device)

    def grow(self, asked: Asked) -> TensorPool:
        """Draft all layers."""
        pool, growth, drafter = TensorPool(self.root, asked.ends), self.step.growth, self.step.drafter
        growth.begin(pool.device)
        output = self._catch_up(asked.forward)
        self.seen = torch.zeros(1, 0, dtype=torch.bool, device=pool.device)
        self.key_positions = self.columns
        while True:
            values = drafter.answer(output).unpicked.values
            children = growth.pick(values, pool.above(values.dtype))
            tokens = drafter.drafted.tokens
            paths = pool.add(children, children.columns if tokens is None else tokens[children.columns])
            expanded = growth.expand(paths, pool.depth) if pool.depth < asked.limit else None
            if expanded is None:
                pool.close()
                return pool
            output = self._below(pool, *pool.expand(expanded), output)

    def _catch_up(self, forward: Forward) -> Output:
        """Run the rows that the drafter lacks, behind padding; they are its context from now on."""
        tokens, positions, slots = self.numbers
        features, missing = forward.features, len(tokens) - len(forward.tokens)
        if features is not None and missing:
            features = torch.constant_pad_nd(features, (0, 0, missing, 0))
        mask = self.columns <= slots[:, None]
        output = forward_of(self.lm, Rows(tokens, positions, slots, mask, self.columns, features), last_only=True)
        self.lm._note(Pending(0, forward.tokens, forward.positions))
        self.lm.commit(list(range(len(forward.tokens))))
        return output._replace(features={layer: states[-1:] for layer, states in output.features.items()})

    def _below(self, pool: TensorPool, tokens: Tensor, above: Tensor, last: Output) -> Output:
        """Ask what may follow the nodes of a frontier. `above`: their parents' rows in `last`, the forward before."""
        width, first = len(tokens), pool.slots - len(tokens)
        own = torch.eye(width, dtype=torch.bool, device=pool.device)
        self.seen = torch.cat([self.seen[above], own], 1)
        at = self.behind + torch.arange(pool.slots, device=pool.device)
        # Depth 1 follows the root, which is the last row of the context here.
        positions = (self.behind + (pool.depth - 1)).expand(width)
        self.key_positions = self.key_positions.index_copy(0, at[first:], positions)
        mask = (self.columns < self.behind).repeat(width, 1).index_copy(1, at, self.seen)
        features = next((states[above] for states in last.features.values()), None)
        return forward_of(self.lm, Rows(tokens, positions, at[first:], mask, self.key_positions, features))


class Rows(NamedTuple):
    """The rows of one forward, on the device."""

    tokens: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    slots: Int[Tensor, " rows"]
    mask: Bool[Tensor, "rows keys"]
    key_positions: Int[Tensor, " keys"]
    """At which position the token in each slot stands."""
    features: Float[Tensor, "rows hidden"] | None = None


def keys_of(lm: Model, slots: int) -> int:
    """How many keys a forward has where so many slots are used; the last one is nobody's."""
    keys = LEAST_KEYS
    while keys < slots:
        keys *= 2
    return lm.backend.shape(1, keys - 1)[1]


def forward_of(lm: Model, rows: Rows, last_only: bool = False) -> Output:
    """Have the model's backend compute some rows, padded in front to what it takes. They are pending then."""
    count, keys = rows.mask.shape
    front = lm.backend.shape(count, 0)[0] - count
    tokens, positions, slots, mask, key_positions, features = rows
    if front:
        tokens, positions = (torch.constant_pad_nd(part, (front, 0)) for part in (tokens, positions))
        slots = torch.constant_pad_nd(slots, (front, 0), keys - 1)
        mask = torch.cat([(torch.arange(keys, device=lm.device) == keys - 1).repeat(front, 1), mask])
        features = None if features is None else torch.constant_pad_nd(features, (0, 0, front, 0))
    lm.cache.open(count, keys, slots)
    masks = lm.by_kind(mask[None, None], positions, key_positions)
    numbers = torch.stack([tokens, positions, slots])[:, None]
    given = None if features is None else features[None]
    output = lm.backend.run(Inputs(numbers, masks, given, last_only, lm.drafted), lm.cache, count)
    return output.of_text(0, count, last_only)


def _move(lm: Model, to: Int[Tensor, " rows"], slots: Int[Tensor, " rows"]) -> None:
    """Copy rows of the cache, all of them read before one is written."""
    for storage in lm.cache._groups:
        storage.index_copy_(3, to, storage.index_select(3, slots))
