"""Native multi-token prediction: a layer that a target was trained with drafts for it (arXiv:2412.19437, section 2.2).

Owns the layer in the shape of a head, how it is read from the target's checkpoint, and the drafter around it.
"""

import copy
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.backend import cache_argument
from opt_tree.errors import one_line
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle_head import HeadedEagle
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import unwrapped
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError, check_finite, refused
from opt_tree.models.output_scaling import scaling_of


class MtpLayer(nn.Module):
    """The first layer of a transformers `MtpModel`, in the shape of a head: tokens and features in, features out.

    It reads the embedding of a token beside the target's last hidden state of the token before it: `eh_proj` of both,
    normed, then a decoder layer of the target's kind and a norm. A token's position is its own here, one behind that of
    the feature.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer = model.layers[0]  # transformers numbers MTP layers by themselves: its rows are a cache's layer 0
        self.config = copy.copy(model.config)
        self.config.num_hidden_layers = 1
        self._turns = {}
        if kinds := getattr(model.config, "layer_types", None):
            self.config.layer_types = kinds[:1]
            self._turns = {"layer_type": kinds[0]} if model.has_per_layer_rope else {}
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
        """Return estimates of the features of the tokens, a row each; `features` are those of the tokens before."""
        embed, rotary = self._shared
        embedded, positions = embed(input_ids), position_ids + 1
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


class MtpDrafter(EagleDrafter):
    """Drafts with the target's own MTP layer, an EAGLE head by its shape: below the root it reads its own estimates.

    A checkpoint with several layers has one for each depth; all depths are drafted by the first.
    """

    def __init__(self, model: Any, target: CausalLM) -> None:
        """`model`: a transformers `MtpModel` of this target, whose first layer becomes this drafter's."""
        self.stored = len(model.layers)
        """How many the checkpoint has."""
        self._begin(HeadedEagle(MtpLayer(model), model.shared_head, scaling_of(target.model)), target, None)

    def describe(self) -> str:
        some = "MTP layer" if self.stored == 1 else f"first of {self.stored} MTP layers"
        return f"{some} of the target, {self.lm.size}"


def load_mtp_layers(target: CausalLM) -> Any:
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


@register("mtp", about="the multi-token-prediction layer of the target's own checkpoint", paper="2412.19437")
def load_mtp(path: str, target: AnyLM, options: DrafterOptions) -> MtpDrafter:
    """Load the first MTP layer that lies in the target's own checkpoint (see `load_mtp_layers`)."""
    target = feature_target(target)
    model = load_mtp_layers(target)
    with refused(f"cannot draft by the MTP layers of {target.name}"):
        return MtpDrafter(model, target)
