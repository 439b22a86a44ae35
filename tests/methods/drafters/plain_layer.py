"""A Llama layer as its paper has it, for one sequence: no cache, no mask. What heads are compared with."""

from typing import Any

import torch
from torch import Tensor


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in float32 as in every Llama."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_layer(w: dict[str, Tensor], prefix: str, c: Any, read: Tensor, residual: Tensor) -> Tensor:
    """Return the states behind a layer whose attention reads `read`, `[tokens, width]`, and is added to `residual`."""
    n, size = len(read), c.hidden_size // c.num_attention_heads

    def projected(name: str) -> Tensor:
        bias = w.get(f"{prefix}.self_attn.{name}_proj.bias", torch.zeros(()))
        return (read @ w[f"{prefix}.self_attn.{name}_proj.weight"].T + bias).view(n, -1, size).transpose(0, 1)

    q, k, v = map(projected, "qkv")
    frequencies = 1 / c.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = (torch.arange(n, dtype=torch.float32)[:, None] * frequencies).repeat(1, 2)

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * angles.cos().double() + torch.cat([-second, first], -1) * angles.sin().double()

    attended = torch.zeros(n, c.num_attention_heads, size, dtype=torch.float64)
    for head in range(c.num_attention_heads):
        group = head // (c.num_attention_heads // c.num_key_value_heads)
        scores = rotated(q[head]) @ rotated(k[group]).T / size**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended[:, head] = scores.softmax(-1) @ v[group]
    x = residual + attended.reshape(n, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T
    y = normed(x, w[f"{prefix}.post_attention_layernorm.weight"], c.rms_norm_eps)
    gate, up, down = (w[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
