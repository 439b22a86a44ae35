"""A step on the device, seen from the host: what it sends, reads once, and notes of both contexts.

The host gives what it knows before the step (which rows the drafter lacks, how long both contexts are, where the noise
starts) in one upload, and reads tree and verdict in one read. Knows nothing of texts and of when one ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backends.tensor_pool import read_tree
from opt_tree.backends.tensor_step import FACTS, Given, Left, Shape, TensorStep
from opt_tree.model import Model, Pending
from opt_tree.sampling import Sampling
from opt_tree.target import Forward
from opt_tree.tree import Tree, fetch, send

LEAST_KEYS = 256
"""A forward has so many keys, or twice as many as often as it takes: few shapes."""


class Asked(NamedTuple):
    """What a step begins with, all of it known to the host."""

    forward: Forward | None
    """Rows that the drafter lacks of its context, a model's root the last; at most `TensorStep.catching_up`. None: it
    has none."""
    root: int
    """The last token of the context."""
    more: Int[np.ndarray, " numbers"]
    """What else the drafter sends (`TensorDrafter.sent`)."""
    limit: int
    """Layers at most."""
    sampling: Sampling
    """How the target's own tokens are chosen; without processors."""
    starts: Int[np.ndarray, " depths"]
    """The noise of the own tokens by depth (`Random.starts`), as many as `limit` and one; none for a greedy target."""
    ends: Bool[Tensor, " vocab"] | None = None
    """The tokens below which nothing goes into the tree, on the device."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What a step left: tree and verdict on the host, all else where it was computed."""

    tree: Tree
    path: list[int]
    token: int
    """The target's own."""
    logits: Float[Tensor, "rows vocab"]
    scores: Float[Tensor, "rows vocab"]
    features: dict[int, Float[Tensor, "path hidden"]]


class DeviceStep(TensorStep):
    """A `TensorStep` between what the host knows before it and what the host learns of it."""

    def run(self, asked: Asked, launched: Callable[[], None] = lambda: None) -> Judged:
        """Take a step. Both contexts are then as after one of the host, but for what the drafter learns in `accept`.

        `launched` is called when all is on its way and nothing was waited for.
        """
        missing, most, target, lm = asked.forward, self.catching_up, self.target, self.drafter.lm
        rows, least = 0 if missing is None else len(missing.tokens), int(lm is not None)
        if not least <= rows <= most:
            raise ValueError(f"a step catches up with {least} to {most} rows of the drafter, got {rows}")
        for model in (target, *([] if lm is None else [lm])):
            model.cache.truncate(model.length)
        own, draft = self.slots(asked.limit)
        length = target.length - rows if lm is None else lm.length
        keys = self.keys(target, target.length + own), self.keys(lm, length + draft)
        shape = Shape(asked.limit, keys, asked.sampling, self.drafter.scale, asked.ends is not None)
        behind, more = 3 * most + FACTS, len(asked.more)
        numbers, features = np.zeros(behind + more + len(asked.starts), dtype=np.int64), None
        if missing is not None:
            lacking = numbers[: 3 * most].reshape(3, most)
            lacking[2] = keys[1] - 1  # padding goes where nobody looks
            lacking[0, most - rows :], lacking[1, most - rows :] = missing.tokens, missing.positions
            lacking[2, most - rows :] = np.arange(length, length + rows)
            features = missing.features
        numbers[3 * most : behind] = target.length, length + rows, asked.root
        numbers[behind : behind + more], numbers[behind + more :] = asked.more, asked.starts
        if features is not None and rows < most:
            features = torch.constant_pad_nd(features, (0, 0, most - rows, 0))
        left = self.launch(shape, Given(send(numbers, target.device), features, asked.ends))
        self.drafter.launched()
        launched()
        (told,) = fetch(left.told)
        return self._judged(told, asked, left)

    def keys(self, lm: Model | None, slots: int) -> int:
        """How many keys a forward has where so many slots are used; the last one is nobody's."""
        keys = LEAST_KEYS
        while keys < slots:
            keys *= 2
        return keys if lm is None else self.shape(lm, 1, keys - 1)[1]

    def _judged(self, told: np.ndarray, asked: Asked, left: Left) -> Judged:
        """Make a tree and a verdict of what was read, and tell both models which of their rows are kept."""
        rows, missing, target, lm = len(left.logits), asked.forward, self.target, self.drafter.lm
        tree, verdict = read_tree(told, rows)
        kept = verdict[: int(verdict[-2]) + 1]
        text = tree.tokens[kept]
        _write(target, text)
        target.commit(list(range(len(text))))
        if lm is not None and missing is not None:
            _write(lm, missing.tokens)
            lm.commit(list(range(len(missing.tokens))))
            _write(lm, text[1:])
        features = {layer: states[: len(kept)] for layer, states in left.features.items()}
        return Judged(
            tree, kept.tolist(), int(verdict[-1]), left.logits[: len(tree)], left.scores[: len(tree)], features
        )


def _write(lm: Model, tokens: Int[np.ndarray, " rows"]) -> None:
    """A path of these tokens was written behind the context."""
    lm.cache.truncate(lm.length)
    lm.cache.open(len(tokens))
    lm._note(Pending(0, tokens, np.arange(lm.length, lm.length + len(tokens))))
