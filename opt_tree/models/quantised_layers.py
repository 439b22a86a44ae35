"""What is asked of layers that may be quantised: where an output layer computes, some of its rows, a model's size.

Asking a quantised layer for its weight unpacks all numbers, so that nobody else does.
"""

import copy
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.backends.quantised import QuantisedLinear, quantise
from opt_tree.errors import UnsupportedModelError


def home_of(output: Any) -> tuple[torch.device, torch.dtype]:
    """Where an output layer computes, and in which dtype."""
    if isinstance(output, QuantisedLinear):
        return output.packed.device, output.dtype
    weight = readable_weight(output)
    return weight.device, weight.dtype


def columns_of(output: Any) -> int:
    """How many logits an output layer gives."""
    return output.out_features if isinstance(output, QuantisedLinear) else readable_weight(output).shape[0]


def readable_weight(layer: Any, what: str = "output layer") -> Tensor:
    """Return the weight of a layer; UnsupportedModelError for one that hides it (`quantize_dynamic`)."""
    if not isinstance(layer.weight, Tensor):
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise UnsupportedModelError(f"its {what}, a {kind}, has no weight to read; load_pair(weights=...) quantises")
    return layer.weight


def is_linear(output: Any) -> bool:
    """Whether an output layer is a plain linear one, whose rows `rows_of` takes without loss."""
    return type(output) in (nn.Linear, QuantisedLinear)


def rows_of(output: Any, tokens: Int[Tensor, " columns"]) -> nn.Module:
    """Return the output layer over some tokens only, its rows copied."""
    if isinstance(output, QuantisedLinear):
        return output.rows(tokens)
    index = tokens.to(output.weight.device)
    return linear_of(output.weight[index], None if output.bias is None else output.bias[index])


def linear_of(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> nn.Linear:
    """Return a linear layer with these weights, detached."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")  # none are drawn by chance
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which quantised layers are plain ones, with the numbers that they compute with.

    A layer with PEFT's adapters is the layer without them.
    """
    copied = copy.deepcopy(module)
    for parent in [*copied.modules()]:
        for name, layer in parent.named_children():
            if hasattr(layer, "get_base_layer"):
                setattr(parent, name, cast(Any, layer).get_base_layer())
            elif isinstance(layer, QuantisedLinear):
                setattr(parent, name, linear_of(layer.weight, layer.bias))
    return copied


def follow(head: nn.Module, output: Any) -> None:
    """Quantise a head whose borrowed output layer is quantised, in place: to eight bits, whatever the target has."""
    if isinstance(output, QuantisedLinear):
        quantise(head, "int8")


def weights_of(model: nn.Module) -> str | None:
    """Return what a model's weights were quantised to, "int8" or "int4"; None: they were not."""
    return min((f"int{layer.bits}" for layer in _quantised(model)), default=None)


def count_of(model: nn.Module) -> int:
    """Return how many weights a model has, quantised or not."""
    return sum(weight.numel() for weight in model.parameters()) + sum(layer.numbers for layer in _quantised(model))


def _quantised(model: nn.Module) -> list[QuantisedLinear]:
    return [layer for layer in model.modules() if isinstance(layer, QuantisedLinear)]
