"""A Llama-like network cut in two: networks that share its weights, one of its first layers and one of the others."""

import copy
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from opt_tree.backends.windows import layer_windows
from opt_tree.errors import UnsupportedModelError


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
