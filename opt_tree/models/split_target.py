"""A target in two halves over its one cache: a drafter runs the lower layers, scoring goes on from there.

Owns the cut: two models that share the target's weights, the hidden states between them, and which slot of the cache a
row of the tree has. Rows are drafted once: their lower layers' keys and values are those that the target attends to.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backend import Inputs, Meter
from opt_tree.backends.packed import Packed
from opt_tree.cache import KVCache, inference
from opt_tree.errors import UnsupportedModelError
from opt_tree.masks import tree_mask
from opt_tree.model import Model
from opt_tree.models.capabilities import unwrapped
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.halves import Lower, Upper, check_cut
from opt_tree.models.tensor_parallel import check_whole
from opt_tree.target import Forward, Output, Work
from opt_tree.tree import Tree, send


class Over(Packed):
    """Computes some layers of a target, over the target's cache and with its packed weights."""

    def __init__(self, network: Any, target: CausalLM) -> None:
        super().__init__(network, target.eager.packed)
        self.target, self.buckets = target, target.buckets

    def new_cache(self) -> KVCache:
        return self.target.cache


class Scoring(Over):
    """The same as a part of the target's own forwards, whose seconds these are."""

    @property
    def meter(self) -> Meter:  # type: ignore[override]
        return self.target.backend.meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        """It has none of its own."""


@dataclass(frozen=True, eq=False)
class Placed(Forward):
    """Rows that other layers have run before."""

    places: Int[np.ndarray, " rows"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Their columns among the pending rows."""


class UpperHalf(Model):
    """The upper layers: no row of theirs is a new one."""

    def prepare(self, forward: Forward) -> Inputs:
        assert isinstance(forward, Placed) and forward.features is not None
        (rows, columns), length = forward.visible.shape, self.length
        padded, keys = self.backend.shape(rows, length + columns - rows)
        keys = max(keys, length + columns + padded - rows)
        padding, numbers = padded - rows, np.zeros((3, padded), dtype=np.int64)
        numbers[:2, padding:] = forward.tokens, forward.positions
        numbers[2, padding:] = length + forward.places
        numbers[2, :padding] = length + columns + np.arange(padding)
        sent = send(numbers, self.device)[:, None]
        self.cache.open(0, keys, sent[2, 0], forward.visible)
        features = torch.constant_pad_nd(forward.features, (0, 0, padding, 0))[None]
        mask = tree_mask(forward.visible, length, padded, keys, self.device)
        return Inputs(sent, mask, features, forward.last_only)


class SplitTarget:
    """The lower half of a target for a drafter to run, and the target's way to score a tree that was drafted with it.

    Slots behind the context, of a draft whose root and two nodes were expanded, and a tree of node 2 and two leaves:

        slot        0 root   1 node   2 node   3 leaf   4 leaf
        drafting    lower    lower    lower
        scoring     upper             upper    both     both

    A drafted row keeps its slot whatever becomes of it, so that nothing is moved before a path is committed. Slots of
    what is not in the tree are hidden by the mask. `begin` and `extend` are the drafter's; scoring is reached through
    `CausalLM.run`, which asks whoever has rows (`CausalLM.ahead`).
    """

    def __init__(self, target: CausalLM, depth: int) -> None:
        """Cut behind `depth` layers. Raises UnsupportedModelError for a target whose halves differ from the whole."""
        check_whole(target, "an early exit")
        self.target, self.depth = target, depth
        self._hidden: list[Tensor] = []
        self._below: dict[int, list[Tensor]] = {}
        model = unwrapped(target.model)
        check_cut(model, depth)
        lower, upper = Lower(model, depth), Upper(model, depth)
        self.lower, self.leaves = Model(lower, Over(lower, target)), Model(lower, Scoring(lower, target))
        self.upper = UpperHalf(upper, Scoring(upper, target))
        self._probe()

    @property
    def work(self) -> Work:
        """What drafting has cost in the lower half."""
        return self.lower.work

    def begin(self, root: int) -> Float[Tensor, "1 hidden"]:
        """Forget what was drafted; run the root and return its hidden state behind the lower half."""
        self.target.cache.truncate(self.target.length)
        self._hidden, self._below = [], {}
        return self.extend(np.array([root]), np.array([self.target.length]), np.ones((1, 1), dtype=bool))

    def extend(
        self,
        tokens: Int[np.ndarray, " rows"],
        positions: Int[np.ndarray, " rows"],
        visible: Bool[np.ndarray, "rows columns"],
    ) -> Float[Tensor, "rows hidden"]:
        """Run further drafted rows; the columns of `visible` are all of them, the root's first."""
        target = self.target
        hidden = self._run_lower(Forward(self.lower, tokens, positions, visible))
        # A canonical package has other bits than eager halves: its trees are scored by the whole of it. On CUDA halves
        # have other numbers of rows.
        whole = target.canonical and (target.backend is not target.eager or target.eager.rows_at_once)
        target.ahead = None if whole else self
        return hidden

    def run(self, forward: Forward) -> Output:
        """Score a tree: the lower half for the rows that were not drafted, the upper half for all of them."""
        target, tree = self.target, forward.tree
        assert tree is not None
        drafted = sum(len(rows) for rows in self._hidden)
        places = np.where(tree.draft_rows < drafted, tree.draft_rows, -1)
        leaves = (places < 0).nonzero()[0]
        places[leaves] = drafted + np.arange(len(leaves))
        visible = np.zeros((len(tree), drafted + len(leaves)), dtype=bool)
        rows, above = tree.ancestors.nonzero()
        visible[rows, places[above]] = True
        positions = target.length + tree.depths
        if len(leaves):
            self._run_lower(Forward(self.leaves, tree.tokens[leaves], positions[leaves], visible[leaves]))
        index = send(places, target.device)
        hidden = torch.cat(self._hidden).index_select(0, index)
        output = self.upper.run(Placed(self.upper, tree.tokens, positions, visible, hidden, places=places))
        target.pending = np.zeros((2, visible.shape[1]), dtype=np.int64)
        target.pending[:, places] = tree.tokens, positions
        features = {layer + self.depth if layer >= 0 else layer: rows for layer, rows in output.features.items()}
        features |= {layer: torch.cat(rows).index_select(0, index) for layer, rows in self._below.items()}
        if self.depth - 1 in target.eager.layers:
            features[self.depth - 1] = hidden
        target.places = places
        return Output(output.logits, features)

    def _run_lower(self, forward: Forward) -> Float[Tensor, "rows hidden"]:
        self._watch()
        output = forward.model.run(forward)
        hidden = output.logits.clone()
        self._hidden.append(hidden)
        for layer, rows in output.features.items():
            self._below.setdefault(layer, []).append(rows.clone())
        return hidden

    def _watch(self) -> None:
        """Let the halves return what the target was asked for, each its own layers."""
        layers = self.target.eager.layers
        below = tuple(layer for layer in layers if 0 <= layer < self.depth - 1)
        cast(Over, self.lower.backend).layers = cast(Over, self.leaves.backend).layers = below
        above = tuple(max(layer - self.depth, -1) for layer in layers if layer == -1 or layer >= self.depth)
        cast(Over, self.upper.backend).layers = above

    @inference
    def _probe(self) -> None:
        """Draft and score a small tree; raise UnsupportedModelError where the whole target says something else."""
        target = self.target
        context, root, a, b, c = [[(7 * i + 3) % target.vocab for i in range(4)], *(i % target.vocab for i in range(4))]
        tree = Tree(np.array([root, a, b, c]), np.array([-1, 0, 0, 1]), np.zeros(4), np.array([0, 1, -1, -1]))
        work = target.work
        target.reset()
        target.append(context)
        whole = target.score(tree).logits.double().clone()
        self.begin(root)
        self.extend(np.array([a]), np.array([target.length + 1]), np.ones((1, 2), dtype=bool))
        halves = target.score(tree).logits.double()
        target.reset()
        target.work, self.lower.work = work, Work()
        off, size = (halves - whole).abs().max(), whole.abs().max()
        if not off <= (1e-3 if target.dtype.itemsize >= 4 else 0.05) * size:
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be cut behind layer {self.depth}: in two halves its logits are "
                f"off by {off:.2g}, where the largest is {size:.2g}"
            )
