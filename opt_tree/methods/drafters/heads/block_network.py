"""The network that block drafters share: layers over [anchor, mask, mask, ...] that read the target's hidden states.

Owns what rows begin as and are read by, which rows see which (`BlockSight`), DFlash 2's convolutions, and a forward
over many blocks of a text. Layers, rotary positions and norms are transformers' own (`MuseGlimmerAssistantModel`);
files of other layouts are given its names. A context row is what `encoder` makes of the target's states of one token
before the anchor; no block row is ever one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

from opt_tree.models.output_scaling import Scaling
from opt_tree.models.quantised_layers import home_of


class BlockSight(NamedTuple):
    """What the rows of a block see in a layer of one kind: the context, and one another."""

    causal: bool = False
    """Whether a row sees no later row of its block (JetSpec)."""
    window: int | None = None
    """How far a row sees, its own place included; None: everything."""
    from_anchor: bool = False
    """Whether the window is counted from the anchor, which is one row more, and hides no row of the block."""

    @property
    def open(self) -> bool:
        """Whether every row sees all."""
        return self == BlockSight()

    def mask(self, anchors: Int[Tensor, "texts anchors"], size: int, length: int) -> Bool[Tensor, "texts 1 rows keys"]:
        """Return what blocks of `size` rows behind these anchors see of `length` context rows and of all their rows."""
        places = torch.arange(size, device=anchors.device)
        ahead = torch.arange(length, device=anchors.device) - anchors[..., None, None]
        seen, inside = (ahead < 0) & self.sees(places[:, None], ahead), self.sees(places[:, None], places)
        own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)[:, None, :, None] & inside[:, None]
        return torch.cat([seen.flatten(1, 2), own.flatten(2).flatten(0, 1).expand(len(anchors), -1, -1)], -1)[:, None]

    def sees(self, place: Int[Tensor, "rows 1"], ahead: Int[Tensor, "*many keys"]) -> Bool[Tensor, "*other rows keys"]:
        """Whether the row at a place of a block sees keys that are so far behind its anchor; below 0: before it."""
        back = place - ahead
        seen = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        if self.window is not None:
            seen = seen & ((-1 - ahead if self.from_anchor else back.abs()) < self.window)
        return seen


Sights = Mapping[str, BlockSight]
"""By the kind of layer, "full_attention" or "sliding_attention"."""
Masks = Mapping[str, Bool[Tensor, "texts 1 rows keys"] | None]
"""By the kind of layer, too; None: every row sees all."""
OPEN: Sights = {"full_attention": BlockSight()}
"""As the paper has it: every row sees all."""


def two_sided(window: int) -> Sights:
    """Return what rows see in transformers' layers: in sliding ones all that is at most `window` rows away."""
    return {**OPEN, "sliding_attention": BlockSight(window=window + 1)}


class Scores(NamedTuple):
    """An output layer and what is made of its numbers."""

    layer: Any
    scaling: Scaling

    def __call__(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows columns"]:
        return self.scaling(self.layer(states.to(*home_of(self.layer))))


class RawEmbedding(NamedTuple):
    """An embedding's rows times a factor, whatever its model makes of them."""

    layer: Any
    factor: float = 1.0

    def __call__(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        rows = nn.Embedding.forward(self.layer, tokens.to(self.layer.weight.device))
        return rows if self.factor == 1 else rows * self.factor


class DynamicConvolution(nn.Module):
    """DFlash 2's causal convolution along a block, whose kernel each row adds to: before a sublayer and behind it.

    y_j = sum over o of (base[s, o] + delta_j[s, o, group]) * x_{j - o}, zeros above the block. State-dict names are the
    published ones: `base_kernel` [2, size, hidden] and `kernel_projection.weight` [2 * size * groups, hidden].
    """

    def __init__(self, hidden: int, kernel: int, group: int, block: int) -> None:
        """`kernel`: rows that are summed; `group`: channels that share a delta; `block`: rows of a block."""
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * (hidden // group), bias=False)
        self._kernel, self._group, self._block = kernel, group, block

    def kernels(self, x: Float[Tensor, "texts rows hidden"]) -> Float[Tensor, "2 kernel texts rows hidden"]:
        """Return the kernels before and behind a sublayer that reads `x`, a row's own for each."""
        deltas = self.kernel_projection(x).unflatten(-1, (2, self._kernel, -1)).repeat_interleave(self._group, -1)
        return (self.base_kernel + deltas).movedim((-3, -2), (0, 1))

    def forward(
        self, x: Float[Tensor, "texts rows hidden"], kernel: Float[Tensor, "kernel texts rows hidden"]
    ) -> Float[Tensor, "texts rows hidden"]:
        """Return what one kernel makes of the rows of each block."""
        blocks, total = x.unflatten(1, (-1, self._block)), kernel[0] * x
        for back in range(1, min(self._kernel, self._block)):
            earlier = nn.functional.pad(blocks[:, :, :-back], (0, 0, back, 0)).flatten(1, 2)
            total = total + kernel[back] * earlier
        return total


class ConvolvedLayer(MuseGlimmerAssistantDecoderLayer):
    """A layer of DFlash 2: the block's rows, and no context rows, pass a convolution around both sublayers."""

    def __init__(self, config: MuseGlimmerAssistantConfig, index: int, kernel: int, group: int) -> None:
        super().__init__(config, index)
        sizes = (config.hidden_size, kernel, group, config.block_size)
        self.attention_conv, self.mlp_conv = DynamicConvolution(*sizes), DynamicConvolution(*sizes)

    def forward(self, hidden_states: Tensor, *more: Any, **named: Any) -> Tensor:  # type: ignore[override]
        read = self.input_layernorm(hidden_states)
        before, behind = self.attention_conv.kernels(read)
        attended, _ = self.self_attn(self.attention_conv(read, before), *more, **named)
        hidden_states = hidden_states + self.attention_conv(attended, behind)
        read = self.post_attention_layernorm(hidden_states)
        before, behind = self.mlp_conv.kernels(read)
        return hidden_states + self.mlp_conv(self.mlp(self.mlp_conv(read, before)), behind)


def block_network(
    config: MuseGlimmerAssistantConfig, states: int | None = None, convolution: tuple[int, int] | None = None
) -> MuseGlimmerAssistantModel:
    """Return the untrained network of a config.

    `states`: numbers that `fc` reads of the target for each token; None: as many as the block is wide, for each layer.
    `convolution`: size and group of DFlash 2's kernels.
    """
    model = MuseGlimmerAssistantModel(config)
    if states is not None:
        model.encoder.fc = nn.Linear(states, config.hidden_size, bias=False)
    if convolution is not None:
        model.layers = nn.ModuleList(
            ConvolvedLayer(config, number, *convolution) for number in range(config.num_hidden_layers)
        )
    return model


def run_blocks(
    model: Any,
    noise: Float[Tensor, "texts anchors block hidden"],
    context: Float[Tensor, "texts tokens wide"],
    anchors: Int[Tensor, "texts anchors"],
    sights: Sights = OPEN,
) -> Float[Tensor, "texts anchors block hidden"]:
    """Return what blocks behind some anchors of a text become, all in one forward; none of them sees another.

    `noise`: the embeddings of each block's rows. `context`: the target's states of every token; a block sees those
    before its anchor.
    """
    length, size = context.shape[1], noise.shape[2]
    places = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
    before = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
    found = model(
        noise_embeds=noise.flatten(1, 2),
        context_hidden_states=context,
        position_ids=torch.cat([before, places], 1),
        attention_mask={kind: sight.mask(anchors, size, length) for kind, sight in sights.items()},
    )
    return found.last_hidden_state.view(noise.shape)
