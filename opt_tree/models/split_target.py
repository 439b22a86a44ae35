"""A target in two halves over its one cache: a drafter runs the lower layers, scoring goes on from there.

Owns the cut: two models that share the target's weights, the hidden states between them, and which slot of the cache a
row of the tree has. Rows are drafted once: their lower layers' keys and values are those that the target attends to.
"""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from opt_tree.core.errors import UnsupportedModelError
from opt_tree.core.target import Forward, Output, Work
from opt_tree.core.tree import Tree, send
from opt_tree.engines import Eager, Engine
from opt_tree.engines.kv_cache import inference
from opt_tree.models.capabilities import layer_windows, unwrapped
from opt_tree.models.causal_lm import CausalLM, Placed
from opt_tree.models.meter import Meter
from opt_tree.models.tensor_parallel import check_whole


class Lower(nn.Module):
    """The embeddings and the first layers of a Llama-like model; its "logits" are what the last of them puts out."""

    def __init__(self, model: Any, depth: int) -> None:
        super().__init__()
        self.base_model = _cut(model.base_model, 0, depth)
        self.base_model.norm = nn.Identity()
        self.config = self.base_model.config

    def forward(self, input_ids: Tensor, **attention: Any) -> SimpleNamespace:
        """`attention`: positions, mask and cache, as the model takes them."""
        return SimpleNamespace(logits=self.base_model(input_ids=input_ids, **attention).last_hidden_state)

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embed_tokens

    def get_output_embeddings(self) -> None:
        """None: what it puts out is no vocabulary's."""


class Upper(nn.Module):
    """The other layers, the norm and the output layer: from `features`, which the lower half put out, to logits."""

    def __init__(self, model: Any, depth: int) -> None:
        super().__init__()
        self.whole = _copied(model)
        setattr(self.whole, model.base_model_prefix, _cut(model.base_model, depth, len(model.base_model.layers)))
        self.config = self.whole.base_model.config

    def forward(self, input_ids: Tensor, features: Tensor, **attention: Any) -> SimpleNamespace:
        """`input_ids` are not read: the features stand for them."""
        return SimpleNamespace(logits=self.whole(inputs_embeds=features, **attention).logits)

    @property
    def base_model(self) -> nn.Module:
        return self.whole.base_model

    def get_input_embeddings(self) -> nn.Module:
        return self.whole.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.whole.get_output_embeddings()


class Split:
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
        self._meter = Meter()
        self._hidden: list[Tensor] = []
        self._below: dict[int, list[Tensor]] = {}
        model = unwrapped(target.model)
        check_cut(model, depth)
        self.lower: Engine = Eager(Lower(model, depth), target.cache, target.eager.packed)
        self.upper: Engine = Eager(Upper(model, depth), target.cache, target.eager.packed)
        self._probe()

    @property
    def work(self) -> Work:
        """What drafting has cost in the lower half."""
        return self._meter.work

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
        # The target's own meter is set aside and not read: on CUDA to read it is to wait for the device.
        own, target.meter = target.meter, self._meter
        try:
            hidden = self._run_lower(tokens, positions, visible)
        finally:
            target.meter = own
        # A canonical package has other bits than eager halves: its trees are scored by the whole of it. On CUDA halves
        # have other numbers of rows.
        whole = target.canonical and (target.engine is not target.eager or target.fixed_rows)
        target.ahead = None if whole else self
        return hidden

    def score(self, tree: Tree) -> Output:
        """Score a tree: the lower half for the rows that were not drafted, the upper half for all of them."""
        target = self.target
        drafted = sum(len(rows) for rows in self._hidden)
        places = np.where(tree.draft_rows < drafted, tree.draft_rows, -1)
        leaves = (places < 0).nonzero()[0]
        places[leaves] = drafted + np.arange(len(leaves))
        visible = np.zeros((len(tree), drafted + len(leaves)), dtype=bool)
        rows, above = tree.ancestors.nonzero()
        visible[rows, places[above]] = True
        positions = target.length + tree.depths
        if len(leaves):
            self._run_lower(tree.tokens[leaves], positions[leaves], visible[leaves])
        index = send(places, target.device)
        hidden = torch.cat(self._hidden).index_select(0, index)
        output = target.run(Placed(target, tree.tokens, positions, visible, hidden, places=places), self.upper)
        features = {layer + self.depth if layer >= 0 else layer: rows for layer, rows in output.features.items()}
        features |= {layer: torch.cat(rows).index_select(0, index) for layer, rows in self._below.items()}
        if self.depth - 1 in target.engine.layers:
            features[self.depth - 1] = hidden
        target.places = places
        return Output(output.logits, features)

    def _run_lower(
        self,
        tokens: Int[np.ndarray, " rows"],
        positions: Int[np.ndarray, " rows"],
        visible: Bool[np.ndarray, "rows columns"],
    ) -> Float[Tensor, "rows hidden"]:
        self._watch()
        output = self.target.run(Forward(self.target, tokens, positions, visible), self.lower)
        hidden = output.logits.clone()
        self._hidden.append(hidden)
        for layer, rows in output.features.items():
            self._below.setdefault(layer, []).append(rows.clone())
        return hidden

    def _watch(self) -> None:
        """Let the halves return what the target was asked for, each its own layers."""
        layers = self.target.engine.layers
        self.lower.watch(tuple(layer for layer in layers if 0 <= layer < self.depth - 1))
        self.upper.watch(tuple(max(layer - self.depth, -1) for layer in layers if layer == -1 or layer >= self.depth))

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
        target.work, self._meter = work, Meter()
        off, size = (halves - whole).abs().max(), whole.abs().max()
        if not off <= (1e-3 if target.dtype.itemsize >= 4 else 0.05) * size:
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be cut behind layer {self.depth}: in two halves its logits are "
                f"off by {off:.2g}, where the largest is {size:.2g}"
            )


def check_cut(model: Any, depth: int) -> None:
    """Raise UnsupportedModelError for a model that is known to have no halves behind `depth` layers."""
    name, body = type(model).__name__, model.base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(body, "norm") or not hasattr(body, "embed_tokens"):
        raise UnsupportedModelError(f"{name} cannot be cut in two: it is not built of embed_tokens, layers and norm")
    if not 0 < depth < len(layers):
        raise UnsupportedModelError(f"{name} has {len(layers)} layers: it cannot be cut behind {depth}")
    kinds = layer_windows(model).keys() - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(f"{name} cannot be cut in two: it has layers of kind {', '.join(sorted(kinds))}")


def _copied(module: Any) -> Any:
    """Return a module with the same weights and submodules, in which the latter can be replaced."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _cut(body: Any, first: int, last: int) -> Any:
    """Return a decoder with the layers from `first` to `last` only, each with its own number in the cache."""
    view = _copied(body)
    view.layers = nn.ModuleList(body.layers[first:last])
    view.config = copy.copy(body.config)
    view.config.num_hidden_layers = last - first
    if getattr(body.config, "layer_types", None):
        view.config.layer_types = body.config.layer_types[first:last]
    return view
