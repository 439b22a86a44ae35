"""Decoder layers of a quantised model in two native calls each, in the place of some fifty operations.

Owns which layers are computed so, and how. Beside products of a few rows by four-bit weights, the norms, rotations and
gates between them and the modules around them take up to half of a forward. A layer that is built as Llama's (two
norms, rotated queries and keys, a gated layer with SiLU) and answers as its own code does is computed by
`quantised.cpp`: in float32 between products, and each row by itself. Attention and the cache are called as they are.
"""

from operator import is_
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opt_tree.backends.quantised import QuantisedLinear

_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION, _OWN_NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
_GATED = ("gate_proj", "up_proj", "down_proj")
_KNOWN = {"attention_mask", "position_embeddings", "cache", "past_key_values", "position_ids", "use_cache"}
"""What a layer may be told; of anything else its own code makes what it wants."""
_ROWS = 5
_NEAR = {torch.float32: 0.01, torch.bfloat16: 0.06}
"""How far the answer may be from that of the layer's own code, as a share of its length: both round their rows to eight
bits, and in bfloat16 that code rounds at every operation. A layer by another formula is off by more."""


def compute_natively(model: nn.Module) -> int:
    """Have the decoder layers of a quantised model computed natively where they can be; return how many are."""
    found = [NativeLayer(layer) for layer in model.modules() if _is_known(layer)]
    near = [own for own in found if own.is_near()]
    for own in near:
        own.layer.__dict__["forward"] = own
    return len(near)


def _is_known(layer: nn.Module) -> bool:
    """Whether a module has the parts of a layer of Llama's, in quantised weights."""
    if set(layer._modules) != {*_PARTS} or "forward" in layer.__dict__:
        return False
    children: Any = layer._modules
    attention, gated = children["self_attn"]._modules, children["mlp"]._modules
    linears = [attention.get(name) for name in _ATTENTION] + [gated.get(name) for name in _GATED]
    norms = [children[name] for name in ("input_layernorm", "post_attention_layernorm")]
    own = [attention[name] for name in _OWN_NORMS if name in attention]
    return (
        all(type(one) is QuantisedLinear for one in linears)
        and set(attention) in ({*_ATTENTION}, {*_ATTENTION, *_OWN_NORMS})
        and set(gated) == {*_GATED, "act_fn"}
        and "silu" in type(gated["act_fn"]).__name__.lower()
        and all("RMSNorm" in type(norm).__name__ and _eps(norm) is not None for norm in (*norms, *own))
    )


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


class NativeLayer:
    """Stands in for the `forward` of a decoder layer, for as long as the layer has the parts that it had.

    A layer with a hook or another part, and a call with arguments that are not known, go to the layer's own code.
    """

    def __init__(self, layer: Any) -> None:
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.linears = [getattr(self.attention, name) for name in _ATTENTION]
        self.gated = [getattr(self.mlp, name) for name in _GATED]
        self.own = [getattr(self.attention, name, None) for name in _OWN_NORMS]
        self.parts = self._parts()
        norms = [*self.norms, *(norm for norm in self.own if norm is not None)]
        self.eps = _eps(norms[0])
        self.size: Any = getattr(self.attention, "head_dim", None)
        kinds = {norm.weight.dtype for norm in norms} | {linear.dtype for linear in (*self.linears, *self.gated)}
        whole = isinstance(self.size, int) and self.size % 16 == 0
        self.is_made_for = whole and len({_eps(norm) for norm in norms}) == len(kinds) == 1 and kinds <= _NEAR.keys()

    def __call__(self, hidden_states: Tensor, **given: Any) -> Any:
        angles: Any = given.get("position_embeddings")
        attend, turned = self._attend, angles is not None and angles[0].shape[-1] == self.size
        if not turned or attend is None or not self._is_as_it_was() or not _KNOWN.issuperset(given):
            return type(self.layer).forward(self.layer, hidden_states, **given)
        query, key, value = self.before_attention(hidden_states, angles)
        if (cache := given.get("cache", given.get("past_key_values"))) is not None:
            key, value = cache.update(key, value, self.attention.layer_idx)
        more = {"sliding_window": self.attention.sliding_window} if hasattr(self.attention, "sliding_window") else {}
        attended, _ = attend(
            self.attention,
            query,
            key,
            value,
            given.get("attention_mask"),
            dropout=0.0,
            scaling=self.attention.scaling,
            **more,
        )
        return self.behind_attention(attended.flatten(2), hidden_states)

    @property
    def _attend(self) -> Any:
        """Transformers' attention function of this layer; None where the layer's module has one of its own."""
        return ALL_ATTENTION_FUNCTIONS.get(self.attention.config._attn_implementation)

    def before_attention(
        self, x: Float[Tensor, "texts rows hidden"], angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[texts, heads, rows, dim]`.

        `angles`: cosines and sines of the rows' places, `[texts, rows, dim]`, of one text or of all.
        """
        q, k, v, _ = map(_weights, self.linears)
        own = [None if norm is None else norm._parameters["weight"] for norm in self.own]
        counts = (linear.out_features // self.size for linear in self.linears[:2])
        cos, sin = (one.contiguous() for one in angles)
        compute: Any = torch.ops.opt_tree.quantised_queries
        return compute.default(x, self.norms[0]._parameters["weight"], self.eps, *q, *k, *v, *own, cos, sin, *counts)

    def behind_attention(
        self, attended: Float[Tensor, "texts rows inputs"], x: Float[Tensor, "texts rows hidden"]
    ) -> Float[Tensor, "texts rows hidden"]:
        """Return the layer's rows, from what attention gave and from the rows that the layer was given."""
        gate, up, down = map(_weights, self.gated)
        compute: Any = torch.ops.opt_tree.quantised_rest
        norm, width = self.norms[1]._parameters["weight"], self.gated[0].out_features
        return compute.default(attended, x, *_weights(self.linears[3]), norm, self.eps, *gate, *up, *down, width)

    def _is_as_it_was(self) -> bool:
        """Whether the layer has the parts that it had, and nobody watches one of them."""
        watched = any(part is not None and (part._forward_hooks or part._forward_pre_hooks) for part in self.parts)
        return not watched and all(map(is_, self.parts, self._parts()))

    def _parts(self) -> list[Any]:
        """The layer's modules, as it has them now; None for a norm that it has not."""
        attention, mlp = self.attention._modules.get, self.mlp._modules.get
        inside = [*map(attention, (*_ATTENTION, *_OWN_NORMS)), *map(mlp, (*_GATED, "act_fn"))]
        return [*map(self.layer._modules.get, _PARTS), *inside]

    @torch.inference_mode()
    def is_near(self) -> bool:
        """Whether it answers as the layer's own code does, over some random rows behind each other."""
        if not self.is_made_for or self._attend is None:
            return False
        size, norm = self.size, self.norms[0].weight
        numbers = torch.Generator().manual_seed(0)
        rows = torch.randn(2, _ROWS, self.linears[0].in_features, generator=numbers).to(norm.dtype)
        turns = torch.randn(2, _ROWS, size // 2, generator=numbers).repeat(1, 1, 2)
        mask = torch.full((_ROWS, _ROWS), torch.finfo(norm.dtype).min, dtype=norm.dtype).triu(1)[None, None]
        angles = turns.cos().to(norm.dtype), turns.sin().to(norm.dtype)
        told: dict[str, Any] = {"attention_mask": mask, "position_embeddings": angles}
        try:
            expected = type(self.layer).forward(self.layer, rows, cache=_NoCache(), **told)
            found = self(rows, cache=_NoCache(), **told)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # it is called in another way
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        return bool((found - expected).norm() <= _NEAR[norm.dtype] * expected.norm())


class _NoCache(Cache):
    """What a layer attends to where it is tried: its own rows."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _weights(linear: QuantisedLinear) -> tuple[Tensor, Tensor | None]:
    return linear._buffers["packed"], linear._buffers["bias"]  # type: ignore[return-value]
