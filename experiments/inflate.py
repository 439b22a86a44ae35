"""A small Llama target blown up to the shape of a large one that computes the same function.

    python -m evaluation.latency --through experiments/inflate.py:inflate_pair:350m     (1b, 7b, 8b, 13b, HIDDENxLAYERS)

Speed-ups depend on the latency of large targets, acceptance on what a target says. Where no large weights are at hand,
`inflate` gives the first with the second: every matrix has the large model's shape and is read in every forward, the
logits are the small model's. Owns the arithmetic of that; knows nothing of decoding.

How, for a residual stream of h dimensions that becomes H wide:

* The stream is an isometry of the small one, x_large = U x_small, with U the first h columns of a random H x H
  rotation: zero extension followed by that rotation, whose other columns only ever meet zeros. Activations are dense.
* RMSNorm divides by the root of the mean over H instead of h dimensions: norm weights times sqrt(h/H) and eps times h/H
  undo that. Norm weights are folded into the linear layers behind them, because a rotation commutes with a norm only if
  its weights are equal. Input and output embeddings can therefore no longer be tied.
* Extra heads and hidden units compute on random weights and are written with weight zero; extra layers write nothing.
  Head size and rotary positions stay. A key/value head is copied where the large model groups fewer query heads.
* An EAGLE head keeps its own size and the small output layer, because it predicts small features. It reads them through
  the inverse of the above, one small matrix product a step: feature_small = norm weights * sqrt(h/H) U^T feature_large.

What it cannot imitate: numbers that a large model's own rounding would give, the power that a GPU draws on weights
that are not partly zero, and the latency of a head as wide as the large target.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from opt_tree.backends.quantised import quantise
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.sampling import Sampling
from opt_tree.models.capabilities import size_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.target import Output
from opt_tree.tools.pair import Pair

_ROWS_AT_ONCE = 8192
_STD, _SEED = 0.02, 0
"""Of weights that compute nothing, and of the rotation."""


@dataclass(frozen=True)
class Shape:
    """A model's size; None stands for what follows from the rest and from the model that is inflated."""

    hidden: int
    layers: int
    intermediate: int | None = None
    """None: 8/3 of hidden, rounded up to a multiple of 256, as in Llama."""
    kv_width: int | None = None
    """Numbers of one key; None: query heads are grouped as in the model that is inflated."""


SHAPES = {
    "350m": Shape(1024, 24, 3072, 1024),  # GPT-2 medium's width and depth
    "1b": Shape(2048, 16, 8192, 512),  # Llama-3.2-1B
    "7b": Shape(4096, 32, 11008, 4096),  # Llama-2-7B, Vicuna-7B
    "8b": Shape(4096, 32, 14336, 1024),  # Llama-3.1-8B
    "13b": Shape(5120, 40, 13824, 5120),  # Llama-2-13B
}


def parse_shape(spec: str) -> Shape:
    """Return the shape that `7b`, `8b`, `13b`, `1b`, `350m` or HIDDENxLAYERS names."""
    if spec.lower() in SHAPES:
        return SHAPES[spec.lower()]
    if match := re.fullmatch(r"(\d+)[xX](\d+)", spec):
        return Shape(int(match[1]), int(match[2]))
    raise ValueError(f"unknown shape {spec!r} to inflate to; try {', '.join(SHAPES)} or HIDDENxLAYERS such as 2048x22")


@torch.no_grad()
def inflate(model: PreTrainedModel, spec: str) -> LlamaForCausalLM:
    """Return a model of shape `spec` with the logits of `model`, on the same device and of the same dtype.

    Equal up to rounding: about 1e-5 in float32 for logits of order 10. Raises ValueError for anything but a Llama
    model, for a shape smaller than the model in any respect, and for head sizes that do not divide it. Needs the memory
    of the result and a few hundred megabytes.
    """
    config = _config(model, parse_shape(spec), spec)
    assert isinstance(model, LlamaForCausalLM)
    embeddings = model.model.embed_tokens.weight
    device, dtype = embeddings.device, embeddings.dtype
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.device("meta"):
        large = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    large = large.to_empty(device=device).eval().requires_grad_(False)
    # Depends on the head size only; its frequencies are not weights and keep their own dtype.
    large.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    for name, parameter in large.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias")):
            parameter.zero_()
        elif name not in ("model.embed_tokens.weight", "lm_head.weight"):
            parameter.normal_(0.0, _STD, generator=generator)

    small = model.config.hidden_size
    isometry = _isometry(config.hidden_size, small).to(device, torch.promote_types(dtype, torch.float32))
    stretch = _Stretch(isometry, (small / config.hidden_size) ** 0.5)
    stretch.read(embeddings, large.model.embed_tokens.weight)
    stretch.read(model.lm_head.weight, large.lm_head.weight, model.model.norm.weight)
    for index, layer in enumerate(model.model.layers):
        place = (2 * index + 1) * config.num_hidden_layers // (2 * model.config.num_hidden_layers)
        _inflate_layer(layer, large.model.layers[place], stretch)
    large.generation_config = copy.deepcopy(model.generation_config)
    large.config.made_of = _described(config, model, large)
    return large


def inflate_pair(pair: Pair, spec: str, large: PreTrainedModel | None = None, weights: str | None = None) -> Pair:
    """Return the pair with its target inflated, and the drafter as it was; an EAGLE head gets the small features.

    `large`: what became of the same target, with the same shape, in another pair; the two then share its
    weights. `weights`: the bits that the large one's are quantised to. The small target is not kept: `pair` should not
    be used any more where memory counts.
    """
    small, drafter = pair.target.model, pair.drafter
    if drafter.features and not (isinstance(drafter, EagleDrafter) and tuple(drafter.features) == (-1,)):
        read = ", ".join(map(str, drafter.features))
        raise ValueError(
            f"{drafter.describe()} reads hidden states of the target (layers {read}): of these, one inflated to {spec} "
            "knows only what an EAGLE-1 head reads; take eagle:, or a drafter that reads none, as lm: and store:"
        )
    if large is None:
        large = inflate(small, spec)
        if weights is not None:
            quantise(large, weights)
    target = CausalLM(large)
    if drafter.features:
        assert isinstance(drafter, EagleDrafter)
        drafter = DeflatedFeatures(drafter, _deflation(small, target.hidden))
    return Pair(target, pair.tokenizer, drafter)


class DeflatedFeatures(DrafterAround):
    """Wraps the head of a small target so that it drafts for the inflated one: the features it gets are the small ones.

    Everything else is the head's own: its size, its cache, the small output layer behind it. The product that makes
    the features is part of `begin` and `accept`, so a step's times contain it.
    """

    made_of = (
        "; the EAGLE head keeps its own size: it reads the features through the inverse of the inflation and predicts "
        "through the small model's output layer"
    )

    def __init__(self, drafter: EagleDrafter, deflation: Float[Tensor, "large small"]) -> None:
        super().__init__(drafter)
        self.lm = drafter.lm
        self._deflation = deflation.to(drafter.lm.device, torch.promote_types(drafter.lm.dtype, torch.float32))

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Sampling) -> None:
        small = prefill and prefill._replace(features=self._deflate(prefill.features))
        self.drafter.begin(prompt, kept, small, sampling)

    def accept(self, outcome: Outcome) -> None:
        self.drafter.accept(replace(outcome, features=self._deflate(outcome.features)))

    def _deflate(
        self, features: Mapping[int, Float[Tensor, "tokens large"]]
    ) -> Mapping[int, Float[Tensor, "tokens small"]]:
        """In float32 or wider: a half-precision product would round what the target has rounded once already."""
        home = self._deflation
        return {layer: states.to(home.device, home.dtype) @ home for layer, states in features.items()}


def _deflation(small: Any, hidden: int) -> Float[Tensor, "large small"]:
    """Return the map from the features of a target inflated to `hidden` back to the small one's, in float64.

    The small stream normalised, n, leaves the small model as n * weights and the large one, whose last norm has
    weights of one, as sqrt(H/h) U n.
    """
    norm = small.model.norm.weight.detach().cpu().double()
    return _isometry(hidden, len(norm)) * (len(norm) / hidden) ** 0.5 * norm


def _described(config: LlamaConfig, small: PreTrainedModel, large: PreTrainedModel) -> str:
    """What a model was inflated from, for the line above every table."""
    origin = f"{small.config.name_or_path or 'an unnamed Llama'} ({size_of(small)})"
    return (
        f"inflated target: {origin} blown up to {size_of(large)} ({config.num_hidden_layers} layers, hidden "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} key/value heads of {config.head_dim}); same function, so acceptance is the "
        "small model's and latency the large one's"
    )


def _config(model: PreTrainedModel, shape: Shape, spec: str) -> LlamaConfig:
    """Check that the shape can hold the model, and return the large model's config."""
    small: Any = model.config
    if type(model) is not LlamaForCausalLM:
        raise ValueError(
            f"inflated to {spec}: {type(model).__name__} is not of the Llama architecture; only that one is inflated"
        )
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(f"inflated to {spec}: the target is quantised; load it in float32, bfloat16 or float16")
    unit = small.head_dim
    group = small.num_attention_heads // small.num_key_value_heads
    heads, rest = divmod(shape.hidden, unit)
    kv_heads, kv_rest = divmod(shape.kv_width or shape.hidden // group, unit)
    if rest or kv_rest or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"inflated to {spec}: a width of {shape.hidden} does not divide into heads of {unit} grouped by {group} as "
            f"in the target; take a multiple of {unit * group}"
        )
    intermediate = shape.intermediate or math.ceil(8 * shape.hidden / 3 / 256) * 256
    # A key/value head whose query heads do not fit into one group of the large model is copied.
    copies = math.ceil(group / (heads // kv_heads))
    for what, needed, there in (
        ("wide", small.hidden_size, shape.hidden),
        ("deep", small.num_hidden_layers, shape.layers),
        ("hidden units in an MLP", small.intermediate_size, intermediate),
        ("query heads", small.num_attention_heads, heads),
        ("key/value heads", small.num_key_value_heads * copies, kv_heads),
    ):
        if there < needed:
            raise ValueError(
                f"inflated to {spec}: {there} {what} is less than the target's {needed}; the shape must not be smaller"
            )
    config = copy.deepcopy(small)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = shape.hidden, shape.layers, intermediate
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, unit
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    config.tie_word_embeddings = False
    config.name_or_path = f"{small.name_or_path or 'llama'}+{spec.lower()}"
    return config


def _isometry(large: int, small: int) -> Float[Tensor, "large small"]:
    """Return the first columns of a random rotation. In float64: an error here would be one in every weight."""
    noise = torch.randn(large, small, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED))
    return torch.linalg.qr(noise).Q


@dataclass(frozen=True)
class _Stretch:
    """How the small stream lies in the large one, and how the matrices at its ends follow."""

    isometry: Float[Tensor, "large small"]
    norm_scale: float
    """sqrt(small / large): what a norm over the wider stream gives too much."""

    def read(self, source: Tensor, to: Tensor, norm: Tensor | None = None) -> None:
        """Fill a matrix that reads the stream, [out, large] from [out, small]; `norm`: the norm's weights before it."""
        scale = 1.0 if norm is None else norm.to(self.isometry.dtype) * self.norm_scale
        for start in range(0, len(source), _ROWS_AT_ONCE):
            rows = source[start : start + _ROWS_AT_ONCE].to(self.isometry.dtype) * scale
            to[start : start + len(rows)] = rows @ self.isometry.T

    def write(self, source: Float[Tensor, "small ..."]) -> Float[Tensor, "large ..."]:
        """Return a matrix or bias that writes to the stream, [large, ...] from [small, ...]."""
        return self.isometry @ source.to(self.isometry.dtype)


def _inflate_layer(small: LlamaDecoderLayer, large: LlamaDecoderLayer, stretch: _Stretch) -> None:
    """Put the small layer into the large one, whose other weights are random (readers) or zero (writers)."""
    ours, theirs = small.self_attn, large.self_attn
    query_places, kv_places = _heads(ours.config, theirs.config)
    for name, places in (("q_proj", query_places), ("k_proj", kv_places), ("v_proj", kv_places)):
        source, to = getattr(ours, name), getattr(theirs, name)
        unit = ours.head_dim
        for place, head in places:
            rows, at = slice(head * unit, (head + 1) * unit), slice(place * unit, (place + 1) * unit)
            stretch.read(source.weight[rows], to.weight[at], small.input_layernorm.weight)
            if source.bias is not None:
                to.bias[at] = source.bias[rows]
    columns = torch.cat([torch.arange(p * ours.head_dim, (p + 1) * ours.head_dim) for p, _ in query_places])
    theirs.o_proj.weight[:, columns] = stretch.write(ours.o_proj.weight).to(theirs.o_proj.weight.dtype)
    units = small.mlp.gate_proj.weight.shape[0]
    for name in ("gate_proj", "up_proj"):
        source, to = getattr(small.mlp, name), getattr(large.mlp, name)
        stretch.read(source.weight, to.weight[:units], small.post_attention_layernorm.weight)
        if source.bias is not None:
            to.bias[:units] = source.bias
    large.mlp.down_proj.weight[:, :units] = stretch.write(small.mlp.down_proj.weight)
    for source, to in ((ours.o_proj, theirs.o_proj), (small.mlp.down_proj, large.mlp.down_proj)):
        if source.bias is not None:
            to.bias[:] = stretch.write(source.bias)


def _heads(small: Any, large: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (place in the large model, head of the small one) for query heads, in the small order, and kv heads.

    Query head q reads key/value head q // group in both models, so a small kv head is stored once for every
    large group that its query heads occupy. Small 4 query / 2 kv heads in a large model of 8 / 8 and of 8 / 2:

        8 / 8: queries 0 1 2 3 at 0 1 2 3, kv 0 0 1 1 at 0 1 2 3      8 / 2: queries at 0 1 4 5, kv 0 1 at 0 1
    """
    ours = small.num_attention_heads // small.num_key_value_heads
    theirs = large.num_attention_heads // large.num_key_value_heads
    copies = math.ceil(ours / theirs)
    queries = []
    for head in range(small.num_attention_heads):
        kv, index = divmod(head, ours)
        queries.append(((kv * copies + index // theirs) * theirs + index % theirs, head))
    return queries, [(kv * copies + c, kv) for kv in range(small.num_key_value_heads) for c in range(copies)]
