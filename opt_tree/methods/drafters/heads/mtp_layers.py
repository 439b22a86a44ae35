"""The layers of native multi-token prediction as transformers has them, each in the shape of a head; how they are read.

A layer reads the embedding of a token beside the target's last hidden state of the token before it, or beside what the
layer above made of that one: `eh_proj` of both, normed, then a decoder layer of the target's kind and a norm.
"""

import copy
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.backend import cache_argument
from opt_tree.errors import one_line
from opt_tree.models.capabilities import unwrapped
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError, check_finite


class MtpLayer(nn.Module):
    """One layer of a transformers `MtpModel`, in the shape of a head: tokens and features in, features out.

    `index`: which one; it reads each token `index + 1` positions behind the feature that it is paired with.
    """

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        self.layer, self._ahead = model.layers[index], index + 1
        for module in self.layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # its place in a cache of its own, which has this one layer
        self.config = copy.copy(model.config)
        self.config.num_hidden_layers = 1
        self._turns = {}
        if kinds := getattr(model.config, "layer_types", None):
            self.config.layer_types = [kinds[index]]
            self._turns = {"layer_type": kinds[index]} if model.has_per_layer_rope else {}
        # In a list, so that the target's modules do not become submodules (they are not ours to move or to save).
        self._shared = [model.embed_tokens, model.rotary_emb]

    @property
    def embed_tokens(self) -> nn.Module:
        """The target's."""
        return self._shared[0]

    def forward(
        self,
        input_ids: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows hidden"],
        position_ids: Int[Tensor, "batch rows"],
        attention_mask: Tensor | None = None,
        cache: object | None = None,
    ) -> tuple[Float[Tensor, "batch rows hidden"]]:
        """Return what the next layer reads and the output layer scores, a row for each token."""
        embed, rotary = self._shared
        embedded, positions = embed(input_ids), position_ids + self._ahead
        hidden = self.layer(
            embedded,
            features.to(embedded.dtype),
            position_embeddings=rotary(embedded, position_ids=positions, **self._turns),
            attention_mask=attention_mask,
            position_ids=positions,
            **{cache_argument(type(self.layer)): cache},
        )
        return (hidden,)

    def read(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Return what the output layer reads of the layer's output: all of it, the layer ends with a norm."""
        return hidden


def read_layers(target: CausalLM) -> Any:
    """Read the MTP layers in the target's own checkpoint as a transformers `MtpModel`; CheckpointError says why not.

    They come to the target's dtype, and to the device of its embedding. Families: those of transformers whose config
    has `num_mtp_layers` and whose trees are scored in one forward (DeepSeek-V3, GLM-4.5, Mellum).
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise CheckpointError("this transformers has no MTP layers: update it") from error
    model = unwrapped(target.model)
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        raise CheckpointError(f"{target.name} has no MTP layers that transformers loads: its config says none")
    if target.ranks is not None:
        raise CheckpointError(
            "MTP layers share the target's embedding and output layer, which are split over processes"
        )
    if getattr(model.config, "quantization_config", None):
        raise CheckpointError(f"{target.name} is quantised, and transformers reads MTP layers as they are stored")
    try:
        layers = MtpModel.from_pretrained(model, device_map={"": target.device})
        layers.eval().requires_grad_(False)
        check_finite(target.name, layers.layers.state_dict())
        return layers
    except CheckpointError:
        raise
    except Exception as error:  # of every kind: missing files, missing tensors, patterns that fit none
        raise CheckpointError(f"cannot load the MTP layers of {target.name}: {one_line(error)}") from error
