"""Hidden states of whole texts, by plain forwards of a network: what heads are trained on, and are tried on."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.backends.hidden_states import hidden_states, watched_module

States = dict[int, Float[Tensor, "texts tokens hidden"]]
"""What layers return of some texts, by layer; -1: the last state, behind the norm."""


@torch.inference_mode()
def text_states(model: Any, texts: Int[Tensor, "texts tokens"], layers: Sequence[int]) -> States:
    """Return the hidden states of some layers; right-hand padding is seen by no token before it."""
    with hidden_states(model, tuple({*layers})) as states:
        model.base_model(input_ids=texts, use_cache=False)
    return states


@torch.inference_mode()
def logits_and_states(
    model: Any, texts: Int[Tensor, "texts tokens"], layers: Sequence[int]
) -> tuple[Float[Tensor, "texts tokens vocab"], States]:
    """Return the logits, too."""
    with hidden_states(model, tuple({*layers})) as states:
        logits = model(input_ids=texts, use_cache=False).logits
    return logits, states


def check_layers_are_there(model: Any, layers: Sequence[int]) -> None:
    """Raise ValueError for a layer that the network does not have."""
    for layer in layers:
        watched_module(model, layer)
