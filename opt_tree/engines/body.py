"""The body: what a forward computes, as a pure function of tensors, for backends that record or compile it.

Owns the cache inside it. Knows nothing of shapes' origin, of packages and of who asked.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from opt_tree.core.children import TopK
from opt_tree.core.probabilities import grouped_log_probs
from opt_tree.engines.base import Mask, call_network, model_inputs
from opt_tree.engines.grouped_attention import grouped_attention


def compute_batch(
    model: Any, inputs: dict[str, Any], cache: Cache, layers: tuple[int, ...] = ()
) -> tuple[Float[Tensor, "texts rows vocab"], dict[int, Float[Tensor, "texts rows hidden"]]]:
    """`call_network` with keys that are not copied for the queries that share them."""
    with grouped_attention():
        return call_network(model, inputs, cache, layers)


class Rows(Cache):
    """The cache inside a body: tensors in, the rows written at `slots` of each lane, its first `keys` slots out."""

    def __init__(self, kv: list[Tensor], slots: Int[Tensor, "lanes rows"], keys: int | torch.SymInt) -> None:
        super().__init__(layers=[])
        self.kv, self.slots, self.keys = kv, slots[:, None], keys
        self.lanes = torch.arange(slots.shape[0], device=slots.device)[:, None, None]
        counts = {kept.shape[1] for kept in kv}
        self.heads = {count: torch.arange(count, device=slots.device)[:, None] for count in counts}

    @torch.compiler.disable  # a compiled layer calls it as it is
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows; return what to attend to. Called by the model."""
        keys, values = self.kv[2 * layer_idx], self.kv[2 * layer_idx + 1]
        for kept, states in ((keys, key_states), (values, value_states)):
            kept.index_put_((self.lanes, self.heads[kept.shape[1]], self.slots), states)
        return keys[:, :, : self.keys], values[:, :, : self.keys]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions are always passed explicitly."""
        return 0

    def __len__(self) -> int:
        return len(self.kv) // 2

    def __bool__(self) -> bool:
        return True


class Body(nn.Module):
    """A forward of some lanes as a pure function of tensors, their storage among them; it reads nothing on the host.

    Returns a tuple, a batch row for each lane: the logits, then the hidden states of each of `layers`; then, where
    `columns` are named, the epilogue: `grouped_log_probs` of so many; then, where `children` are named, the best of
    them, for a single lane.
    """

    def __init__(
        self, model: Any, layers: tuple[int, ...] = (), columns: int = 0, children: TopK | None = None
    ) -> None:
        super().__init__()
        self.model, self.layers, self.columns, self.picked_by = model, layers, columns, children
        output = model.get_output_embeddings()
        if output is not None and all(output is not module for module in model.modules()):
            self.output = output  # a head borrows the target's output layer: its weights have to be found here

    def forward(
        self,
        ints: Int[Tensor, "3 lanes rows"],
        mask: Mask | dict[str, Mask],
        kv: list[Tensor],
        more: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """`kv`: keys and values of each layer in turn, `[lanes, heads, capacity, dim]`, written in place.

        `more`: `features`, `[lanes, rows, hidden]`, `scale`, `[lanes]`, and `above`, `[lanes, rows]`, of the `Inputs`,
        where the model and the epilogue take them.
        """
        keys = (next(iter(mask.values())) if isinstance(mask, dict) else mask).shape[-1]
        inputs = model_inputs(self.model, ints, mask, more.get("features"))
        logits, states = compute_batch(self.model, inputs, Rows(kv, ints[2], keys), self.layers)
        laws: tuple[Tensor, ...] = ()
        if self.columns:
            laws = grouped_log_probs(logits, more["scale"][:, None, None], self.columns)
        picked = () if self.picked_by is None else (self.picked_by.best(laws[0][0], more["above"][0])[None],)
        return (logits, *(states[layer] for layer in self.layers), *laws, *picked)
