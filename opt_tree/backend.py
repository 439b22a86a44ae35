"""Who computes a forward: `Backend` is the network as it is. Knows nothing of trees, drafters and who asked."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import ModelOutput

from opt_tree.cache import KVCache, LayerShape, inference
from opt_tree.errors import UnsupportedModelError, one_line
from opt_tree.masks import additive
from opt_tree.target import Drafted, Output, Work

Mask = Bool[Tensor, "texts 1 rows keys"]


class Inputs(NamedTuple):
    """One forward as tensors on the model's device, of one text or several; the cache is open for it.

    Padding stands in front of a text's rows, so that the last row is always a real one.
    """

    numbers: Int[Tensor, "3 texts rows"]
    """Tokens, positions, and slots: where the rows go in the cache."""
    mask: Mask | dict[str, Mask]
    """True where a row sees a key; one for each kind of layer where the model has several."""
    features: Float[Tensor, "texts rows hidden"] | None = None
    """Inputs of a head that drafts in the target's feature space."""
    last_only: bool = False
    """Nobody reads other logits than the last row's; a backend may compute more."""
    drafted: Drafted | None = None
    """Of a drafter's model. A backend may return the best tokens of each row (`Output.best`)."""


class Meter:
    """Counts the forwards of one model, and their seconds by the host's clock."""

    def __init__(self) -> None:
        self.work = Work()

    def now(self) -> Any:
        """A moment of this clock, in seconds."""
        return time.perf_counter()

    def add(self, rows: int, begin: Any, end: Any) -> None:
        """Count a forward over so many rows between two moments."""
        self.work += Work(1, rows, end - begin)


class Backend:
    """Computes forwards of one network."""

    name: str = "plain"
    """In a word, for a reader: "eager", "aot"."""
    rows_at_once: int | None = None
    """More rows than these are run in parts; None: any number."""

    def __init__(self, network: Any) -> None:
        self.network, self.meter = network, Meter()
        self._keeps_logits = takes(network, "logits_to_keep")

    def begin_text(self) -> bool:
        """A text begins: whoever keeps what was made of weights looks whether they are the same, and says so."""
        return True

    def new_cache(self) -> KVCache:
        """An empty cache of what the network stores."""
        return KVCache(layer_shapes(self.network))

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        """From a forward's rows and its first slot to the rows and keys that it is padded to."""
        return rows, first_slot + rows

    def watch(self, layers: tuple[int, ...]) -> None:
        """See `Target.watch`. This one returns logits alone: ValueError for any layer."""
        if layers:
            raise ValueError(f"{type(self).__name__} has no hidden states to read, asked for layers {layers}")

    def forward(self, inputs: Inputs, cache: Cache) -> Output:
        """Write the rows into the cache; return logits, at least each last row's, by text."""
        given = model_inputs(self.network, inputs.numbers, inputs.mask, inputs.features)
        if inputs.last_only and self._keeps_logits:
            given["logits_to_keep"] = 1
        return Output(call_network(self.network, given, cache))

    @inference
    def run(self, inputs: Inputs, cache: KVCache, rows: int) -> Output:
        """Compute a forward with so many real rows, and add it to what was done."""
        begin = self.meter.now()
        output = self.forward(inputs, cache)
        self.meter.add(rows, begin, self.meter.now())
        return output


def model_inputs(
    model: Any, ints: Int[Tensor, "3 texts rows"], mask: Mask | dict[str, Mask], features: Tensor | None = None
) -> dict[str, Any]:
    """Return the tensors of a forward by the names that models take them by."""
    dtype = model.get_input_embeddings().weight.dtype
    added = {name: additive(m, dtype) for name, m in mask.items()} if isinstance(mask, dict) else additive(mask, dtype)
    inputs: dict[str, Any] = {"input_ids": ints[0], "position_ids": ints[1], "attention_mask": added}
    return inputs if features is None else inputs | {"features": features}


def call_network(model: Any, inputs: dict[str, Any], cache: Cache) -> Float[Tensor, "texts kept vocab"]:
    """Call the network once. `cache` takes the rows' keys and values and answers with those to attend to."""
    return model(**inputs, **{cache_argument(type(model)): cache}, use_cache=True).logits


@torch.inference_mode()
def layer_shapes(model: Any, cache: Cache | None = None) -> list[LayerShape]:
    """Run one token through transformers' own cache, to see what each layer stores for a token."""
    weight, cache = model.get_input_embeddings().weight, DynamicCache() if cache is None else cache
    one = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    features = {"features": weight.new_zeros(1, 1, weight.shape[1])} if takes(model, "features") else {}
    try:
        call_network(model, {"input_ids": one, "position_ids": one} | features, cache)
        none = weight.new_empty(1, 0, 1, 0)  # of a layer that keeps a state instead
        layers: list[Any] = [
            (getattr(layer, "keys", none), getattr(layer, "values", none))
            for layer in cache.layers  # type: ignore[attr-defined]
        ]
        return [LayerShape(k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device) for k, v in layers]
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run with a key/value cache: {one_line(error)}"
        ) from error


_NEWEST = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"  # renamed in 5.24, with an alias
cache_argument: Callable[[Any], str] = functools.cache(
    lambda kind: next((name for name in ("cache", "past_key_values") if takes(kind, name)), _NEWEST)
)
"""By what name a class of modules takes a transformers cache; where it names none, the installed transformers'."""


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters
