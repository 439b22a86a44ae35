"""Attention of grouped queries: the queries that share a key are rows of one product, and no key is copied.

Owns what the backends put in place of transformers' `sdpa` while a body runs. It copies each key for every query that
shares it, or has the kernel take the queries apart, which on a CPU is slow for few rows in bfloat16. Results differ by
rounding.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_here, _lock, _bodies = threading.local(), threading.Lock(), 0
"""What computes attention in the body that this thread runs; how many bodies run in all threads."""


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, this thread's models of `sdpa` attention compute it by `Grouped`; other threads notice nothing.

    Inside `attention_by` they compute it by what that names. Where somebody else has put another function in the place
    of transformers', that one is left there.
    """
    _count(1)
    before, _here.grouped = getattr(_here, "grouped", None), (getattr(_here, "kind", None) or Grouped)()
    try:
        yield
    finally:
        _here.grouped = before
        _count(-1)


@contextmanager
def attention_by(kind: Callable[[], Callable[..., tuple[Tensor, None]]] | None) -> Iterator[None]:
    """Inside, bodies that this thread runs have their attention computed by one of these each; None: by `Grouped`."""
    before, _here.kind = getattr(_here, "kind", None), kind
    try:
        yield
    finally:
        _here.kind = before


def _count(more: int) -> None:
    """One body more or less runs: transformers' function is replaced while any does."""
    global _bodies
    mine = ALL_ATTENTION_FUNCTIONS._local_mapping
    with _lock:
        _bodies += more
        if _bodies and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
            mine["sdpa"] = _attend
        elif not _bodies and mine.get("sdpa") is _attend:
            del mine["sdpa"]


@torch.compiler.disable  # a compiled layer calls it as it is
def _attend(*args: Any, **more: Any) -> tuple[Tensor, None]:
    """What stands in the place of transformers' function: for a thread that runs no body it is that function."""
    return (getattr(_here, "grouped", None) or sdpa_attention_forward)(*args, **more)


class Grouped:
    """The attention of one forward. What it does not know goes to transformers: no mask, or one for each head."""

    def __init__(self) -> None:
        self._masks: tuple[Tensor | None, Tensor | None] = None, None
        """The mask of the last layer, and the same for the rows of a group."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        lanes, heads, rows, _ = query.shape
        groups = heads // key.shape[1]
        special = dropout or more.get("softcap") or more.get("position_bias") is not None
        if groups == 1 or special or attention_mask is None or attention_mask.shape[1] > 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
        if self._masks[0] is not attention_mask:
            self._masks = attention_mask, torch.cat([attention_mask] * groups, 2)
        # Copies, not reshapes: those would make one row a case of its own in an exported graph.
        folded = query.clone(memory_format=torch.contiguous_format).view(lanes, -1, groups * rows, query.shape[3])
        found = torch.nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=self._masks[1], scale=scaling
        )
        found = found.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4)
        return found.clone(memory_format=torch.contiguous_format).view(lanes, rows, heads, -1), None
