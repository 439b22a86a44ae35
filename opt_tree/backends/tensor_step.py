"""A step as a function of tensors: draft, score, judge and keep, and nothing in it is read.

Owns the shapes of a step's forwards, and what comes of them on the device. Backends compute the forwards as they
compute all others. Knows nothing of what the host gives, reads and notes (`device_step.py`), and of when a text ends.
"""

from collections.abc import Generator
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backend import Inputs
from opt_tree.backends.tensor_drafter import Behind, TensorDrafter, TensorRows
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import TensorPool, TensorTree, tree_of
from opt_tree.backends.tensor_verdict import judged
from opt_tree.backends.windows import WithWindows
from opt_tree.model import Model
from opt_tree.sampling import Temperature
from opt_tree.target import Output
from opt_tree.tree import Tree

FACTS = 5
"""How many rows the drafter lacks, the length of the target's context, that of the drafter's with these rows, the root,
and at which of the starts its noise begins."""


class Shape(NamedTuple):
    """What a step's operations depend on, beside the numbers in its tensors."""

    limit: int
    keys: tuple[int, int]
    """Of the target's forward, and of the drafter's."""
    sampling: Temperature
    scale: float
    """What the drafter's scores are multiplied by."""
    ends: bool


class Given(NamedTuple):
    """The tensors of a step, on the device."""

    numbers: Int[Tensor, " numbers"]
    """The tokens that the drafter lacks, behind padding; `FACTS`; what else it sends; starts of the noise, none or
    twice as many as there are depths."""
    features: Float[Tensor, "rows hidden"] | None
    """What the drafter's rows carry, behind padding."""
    ends: Bool[Tensor, " vocab"] | None


class Left(NamedTuple):
    """What the launch of a step leaves on the device."""

    told: Int[Tensor, " numbers"]
    """The tree, the accepted path, how many drafted nodes it has, the target's own token: what the host reads."""
    logits: Float[Tensor, "rows vocab"]
    scores: Float[Tensor, "rows vocab"]
    """The processed logits."""
    features: dict[int, Float[Tensor, "path hidden"]]
    """Those of the accepted path, its last row over and over."""
    next: Given
    """What the next step begins with, but for starts and ends."""


Layers = Generator[Bool[Tensor, ""] | None, bool | None, Left]
"""A step that is launched layer after layer, where a stop saves forwards: behind each layer stands its flag, whether
anything is drafted below it (`TensorPool.flag`). Sent True, it launches no further layer; what follows is launched
behind the last one. Where a stop saves nothing, all is launched at once."""


def further(layers: Layers, stopped: bool = False) -> Bool[Tensor, ""] | Left | None:
    """Launch the next layer and return its flag; behind the last one, launch and return the rest."""
    try:
        return layers.send(True) if stopped else next(layers)
    except StopIteration as end:
        return end.value


def whole(layers: Layers) -> Left:
    """Launch all layers of a step, and the rest."""
    while not isinstance(found := further(layers), Left):
        pass
    return found


class TensorStep:
    """The step of one target, one drafter and one policy's growth."""

    def __init__(self, target: Model, drafter: TensorDrafter, growth: Growth, layers: int) -> None:
        """`layers`: of the deepest tree."""
        self.target, self.drafter, self.growth, self.layers = target, drafter, growth, layers
        self.catching_up = drafter.catching_up(layers)
        """Rows that the drafter can lack after a step."""
        self.models = [lm for lm in (target, drafter.lm) if lm is not None]

    def slots(self, limit: int) -> tuple[int, int]:
        """How many rows the target's and the drafter's caches get in a step of so many layers, padding included."""
        drafter, own = self.drafter, self.target.backend.shape(1 + self.growth.nodes, 0)[0] + 1
        widest = drafter.widest(self.growth, self.layers)
        wide = 0 if drafter.lm is None else drafter.lm.backend.shape(widest, 0)[0]
        return own, self.catching_up + drafter.room(self.growth, limit) + wide + 1

    def looks(self, limit: int) -> bool:
        """Whether a stop saves forwards in a step of so many layers: the first two are launched before the host looks
        at a flag.
        """
        return limit > 2 and self.growth.stops and self.drafter.by_layers

    def launch(self, shape: Shape, given: Given) -> Layers:
        """Compute a step: tensors from tensors. What the caches say of their pending rows means nothing behind it."""
        for lm in self.models:
            lm.cache.truncate(lm.length)  # there is room for the rows of one launch
        target, most, sent = self.target, self.catching_up, given.numbers
        tokens, sent = sent[:most], sent[most:]
        (rows, before, length, root, first), sent = sent[:FACTS].unbind(), sent[FACTS:]
        own, steps = self.drafter.sends(self.layers), torch.arange(shape.limit + 1, device=target.device)
        more, starts = sent[:own], sent[own:]
        if len(starts):
            starts = starts[first + steps]
        back = torch.arange(-most, 0, device=target.device)
        there, places = back >= -rows, length + back
        # Padding goes where nobody looks.
        numbers = tokens, torch.where(there, places, 0), torch.where(there, places, shape.keys[1] - 1)
        context = torch.stack(numbers), given.features, length, root, more, self.growth.nodes
        behind = Behind(self.forward, shape.keys[1], *context)
        pool = yield from self._grow(behind, shape, given)
        pool.close()
        tree = tree_of(pool, self.growth.select(pool), shape.limit)
        output = self._score(tree, before, shape.keys[0])
        # Nothing that is carried looks at the tree: it only says how many rows there are.
        sizes = Tree.of([0] * len(tree.tokens), [-1] + [0] * (len(tree.tokens) - 1))
        scores = shape.sampling.process(output.logits, sizes, [])
        kept = self.drafter.keeps_rows
        found = judged(tree, scores, starts, torch.stack([before, length]), (shape.limit, most, kept))
        path = found.path
        _move(target, before + steps, before + path)
        if self.drafter.lm is not None and kept and pool.slots:
            _move(self.drafter.lm, length + steps[:-1], length + tree.slots[path[1:]])
        features = {layer: one[path] for layer, one in output.features.items()}
        again = self.drafter.sent_after(more, found.emitted, found.accepted)
        begins = torch.cat([self.drafter.known(found.emitted[found.latest]), found.facts, again])
        coming = Given(begins, self.drafter.carried(features, found.latest), None)
        return Left(found.told, output.logits, scores, features, coming)

    def _grow(
        self, behind: Behind, shape: Shape, given: Given
    ) -> Generator[Bool[Tensor, ""] | None, bool | None, TensorPool]:
        """Draft all layers, or those until a stop."""
        pool, growth, drafter, front = TensorPool(behind.root), self.growth, self.drafter, None
        growth.begin(pool.device)
        looks, stopped = self.looks(shape.limit), None
        while pool.depth == 0 or (front is not None and not stopped):
            values = drafter.begin(behind) if front is None else drafter.below(pool, front.tokens, front.above)
            depth, vocabulary = pool.depth + 1, (drafter.names, given.ends)
            layer, front = growth.layer(pool.front, values, vocabulary, depth, depth >= shape.limit)
            pool.take(layer, front)
            if looks:
                stopped = yield pool.flag(front)
        return pool

    def _score(self, tree: TensorTree, before: Int[Tensor, ""], keys: int) -> Output:
        """Score the tree behind the target's context of `before` tokens."""
        rows, device = len(tree.tokens), tree.tokens.device
        columns, own = torch.arange(keys, device=device), torch.arange(rows, device=device)
        mask = (columns < before).repeat(rows, 1).index_copy(1, before + own, tree.sees)
        places = columns.index_copy(0, before + own, before + tree.depths)
        return self.forward(self.target, TensorRows(tree.tokens, before + tree.depths, before + own, mask, places))

    def forward(self, lm: Model, rows: TensorRows, last_only: bool = False) -> Output:
        """Have the model's backend compute some rows, padded in front to what it takes."""
        count, keys = rows.mask.shape
        front = lm.backend.shape(count, 0)[0] - count
        tokens, positions, slots, mask, key_positions, features = rows
        if front:
            tokens, positions = (torch.constant_pad_nd(part, (front, 0)) for part in (tokens, positions))
            slots = torch.constant_pad_nd(slots, (front, 0), keys - 1)
            mask = torch.cat([(torch.arange(keys, device=lm.device) == keys - 1).repeat(front, 1), mask])
            features = None if features is None else torch.constant_pad_nd(features, (0, 0, front, 0))
        lm.cache.open(count, keys, slots)
        masks = cast(WithWindows, lm).by_kind(mask[None, None], positions, key_positions)
        numbers = torch.stack([tokens, positions, slots])[:, None]
        given = None if features is None else features[None]
        output = self.compute(lm, Inputs(numbers, masks, given, last_only, lm.drafted), count)
        return output.of_text(count, last_only)

    def compute(self, lm: Model, inputs: Inputs, rows: int) -> Output:
        """Compute one forward of so many real rows."""
        return lm.backend.run(inputs, lm.cache, rows)


def _move(lm: Model, to: Int[Tensor, " rows"], slots: Int[Tensor, " rows"]) -> None:
    """Copy rows of the cache, all of them read before one is written."""
    for storage in lm.cache._groups:
        storage.index_copy_(3, to, storage.index_select(3, slots))
