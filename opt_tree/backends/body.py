"""The body: what a forward computes, as a pure function of tensors, for backends that record or compile it.

Owns the cache inside it. Knows nothing of shapes' origin, of packages and of who asked.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from opt_tree.backend import Mask, call_network, model_inputs
from opt_tree.backends.grouped_attention import grouped_attention
from opt_tree.backends.hidden_states import hidden_states
from opt_tree.target import Drafted

BEST = 64
"""Tokens of each row that a drafter's model picks: a tree of as many nodes has no others."""


class BodyCache(Cache):
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

    Returns a tuple, a batch row for each lane: the logits, then the hidden states of each of `layers`; then, where it
    is told what is `drafted`, `best_of` the logits.
    """

    def __init__(self, model: Any, layers: tuple[int, ...] = (), drafted: Drafted | None = None) -> None:
        super().__init__()
        self.model, self.layers, self.drafted = model, layers, drafted
        output = model.get_output_embeddings()
        if output is not None and all(output is not module for module in model.modules()):
            self.output = output  # a head borrows the target's output layer: its weights have to be found here

    def forward(
        self,
        ints: Int[Tensor, "3 lanes rows"],
        mask: Mask | dict[str, Mask],
        kv: list[Tensor],
        features: Float[Tensor, "lanes rows hidden"] | None = None,
        kept: Int[Tensor, " kept"] | None = None,
    ) -> tuple[Tensor, ...]:
        """`kv`: keys and values of each layer in turn, `[lanes, heads, capacity, dim]`, written in place.

        `features`: those of the `Inputs`, where the model takes them. `kept`: the rows that have logits, where the
        model takes that; None: all.
        """
        keys = (next(iter(mask.values())) if isinstance(mask, dict) else mask).shape[-1]
        inputs = model_inputs(self.model, ints, mask, features)
        if kept is not None:
            inputs["logits_to_keep"] = kept
        with grouped_attention(), hidden_states(self.model, self.layers) as states:
            logits = call_network(self.model, inputs, BodyCache(kv, ints[2], keys))
        best = () if self.drafted is None else (best_of(logits, self.drafted),)
        return (logits, *(states[layer] for layer in self.layers), *best)


def best_of(logits: Float[Tensor, "lanes rows vocab"], drafted: Drafted) -> Int[Tensor, "2 lanes rows k"]:
    """Return each row's best tokens as `Output.best` has them: one tensor, for one read.

    In rising order, as whoever picks from whole rows meets them.
    """
    scores = logits[..., : drafted.columns].to(drafted.scale.dtype) * drafted.scale
    values, places = scores.log_softmax(-1).topk(min(BEST, drafted.columns))
    places, order = places.sort(-1)
    bits = torch.int32 if values.dtype == torch.float32 else torch.int64
    tokens = places if drafted.tokens is None else drafted.tokens[places]
    return torch.stack([values.gather(-1, order).view(bits), tokens.to(bits)])
