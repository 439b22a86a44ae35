"""The body: what a forward computes, written once for every engine.

Owns the model's call and where its hidden states are read. An engine decides how it runs: kernel after kernel, or as
one compiled package. Knows nothing of shapes' origin, of packages and of who asked.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from opt_tree.core.children import TopK
from opt_tree.core.errors import UnsupportedModelError
from opt_tree.core.probabilities import grouped_log_probs
from opt_tree.core.target import Laws, Output
from opt_tree.engines.base import Inputs, Mask
from opt_tree.engines.grouped_attention import grouped_attention
from opt_tree.engines.masks import additive


def compute(
    model: Any,
    inputs: dict[str, Any],
    cache: Cache,
    layers: tuple[int, ...] = (),
) -> Output:
    """Call the model once on one sequence; return its logits and the hidden states of `layers`."""
    logits, states = compute_batch(model, inputs, cache, layers)
    return Output(logits[0], {layer: found[0] for layer, found in states.items()})


def compute_batch(
    model: Any,
    inputs: dict[str, Any],
    cache: Cache,
    layers: tuple[int, ...] = (),
) -> tuple[Float[Tensor, "batch rows vocab"], dict[int, Float[Tensor, "batch tokens hidden"]]]:
    """Call the model once; return the logits and the hidden states of `layers`, of every sequence.

    `cache` takes the rows' keys and values and answers with those to attend to: `KVCache` by plain slices, `Rows` by
    indices that are tensors, `Storage` for several sequences.
    """
    caught: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(grouped_attention())
        for layer in layers:
            stack.enter_context(_catch(watched_module(model, layer), layer, caught))
        logits = model(**inputs, past_key_values=cache, use_cache=True).logits
    if len(caught) < len(layers):
        missing = [layer for layer in layers if layer not in caught]
        raise RuntimeError(f"{type(model).__name__} did not run the layers whose features are read: {missing}")
    for layer, states in caught.items():
        check_states(model, layer, states)
    return logits, caught


def model_inputs(
    model: Any, ints: Int[Tensor, "3 lanes rows"], mask: Mask | dict[str, Mask], features: Tensor | None = None
) -> dict[str, Any]:
    """Return the tensors of a forward of some lanes by the names that models take them by."""
    dtype = model.get_input_embeddings().weight.dtype
    added = (
        {kind: additive(one, dtype) for kind, one in mask.items()} if isinstance(mask, dict) else additive(mask, dtype)
    )
    inputs: dict[str, Any] = {"input_ids": ints[0], "position_ids": ints[1], "attention_mask": added}
    return inputs if features is None else inputs | {"features": features}


def laws_of(logits: Float[Tensor, "rows vocab"], forward: Inputs) -> Laws | None:
    """Normalise what was computed, where it was asked for and no graph has done it."""
    if forward.scale is None:
        return None
    log_probs, peaks = grouped_log_probs(logits, forward.scale, forward.columns)
    return Laws(log_probs, peaks=peaks)


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


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

        `more`: `features`, `[lanes, rows, hidden]`, `scale`, `[lanes]`, and `above`, `[lanes, rows]`, of each lane's
        `Inputs`, where the model and the epilogue take them.
        """
        keys = (next(iter(mask.values())) if isinstance(mask, dict) else mask).shape[-1]
        inputs = model_inputs(self.model, ints, mask, more.get("features"))
        logits, states = compute_batch(self.model, inputs, Rows(kv, ints[2], keys), self.layers)
        laws: tuple[Tensor, ...] = ()
        if self.columns:
            laws = grouped_log_probs(logits, more["scale"][:, None, None], self.columns)
        picked = () if self.picked_by is None else (self.picked_by.best(laws[0][0], more["above"][0])[None],)
        return (logits, *(states[layer] for layer in self.layers), *laws, *picked)


def check_states(model: Any, layer: int, states: Tensor) -> None:
    """Raise UnsupportedModelError where what was read of a layer are no hidden states of the model."""
    width = model.config.get_text_config().hidden_size
    if states.dim() != 3 or states.shape[-1] != width:
        raise UnsupportedModelError(
            f"the hidden states of {type(model).__name__}, layer {layer}, cannot be read: they are {width} wide, and "
            f"what {type(watched_module(model, layer)).__name__} returns is {list(states.shape)}"
        )


def watched_module(model: Any, layer: int) -> nn.Module:
    """Return the module whose output is the features of `layer`: the decoder for -1, else one of its layers."""
    if layer == -1:
        return _decoder(model)
    layers, count = decoder_layers(model), model.config.get_text_config().num_hidden_layers
    if layers is None or not 0 <= layer < count:
        raise ValueError(f"{type(model).__name__} has no layer {layer} to read hidden states of; it has {count} layers")
    return layers[layer]


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """Return the model's decoder layers, as many as its config says; None where there is no such list."""
    decoder, count = _decoder(model), model.config.get_text_config().num_hidden_layers
    return next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


def _decoder(model: Any) -> nn.Module:
    # OPT's head calls its decoder past the base model, so it has to be the innermost of the two.
    if not hasattr(model, "get_decoder"):  # a head, which may hold an output layer of its own
        return model.base_model
    found = model.get_decoder()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if found is output:  # ModernBERT's decoder calls it so
        found = model.base_model
    if output is not None and any(output is one for one in found.children()):  # Llama 4 answers with the whole model
        found = max((one for one in found.children() if one is not output), key=lambda one: len([*one.modules()]))
    return found


@contextmanager
def _catch(module: nn.Module, layer: int, caught: dict[int, Tensor]) -> Iterator[None]:
    """Put what a module returns into `caught`, if it is this thread that called it.

    A hook that stayed would fire on forwards that are not ours, and would keep the model from being copied or pickled.
    """
    thread = threading.get_ident()

    def keep(_module: object, _args: object, output: Any) -> None:
        if threading.get_ident() == thread:
            caught[layer] = output if isinstance(output, Tensor) else output[0]

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
