"""Rows of a transformers cache: taken as a context, compared with one, given back.

`generate` is given them by its caller, and wants them. Owns what they have to be for that.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from opt_tree.cache import KVCache, inference
from opt_tree.errors import counted


@inference
def adopt(cache: KVCache, past: Cache) -> None:
    """Take the rows of a transformers cache as the context.

    Where a layer kept the last rows of a window only, no later row sees the others. Raises ValueError for a cache of
    another model.
    """
    length, layers = past.get_seq_length(), len(cast(Any, past.layers))
    if layers != len(cache):
        raise ValueError(f"the cache has {counted(layers, 'layer')}, the model stores {len(cache)}")
    cache.reset()
    cache.reserve(length)
    for number, (mine, theirs) in enumerate(_pairs(cache, past)):
        shape, found = (*mine.shape[:2], mine.shape[3]), (*theirs.shape[:2], theirs.shape[3])
        if shape != found:
            raise ValueError(f"the cache holds rows of {found} in layer {number // 2}, the model's are {shape}")
        if theirs.dtype != mine.dtype:
            raise ValueError(f"the cache holds {theirs.dtype}, the model stores {mine.dtype}")
        mine[:, :, length - theirs.shape[2] : length] = theirs
    cache.length = length


def begins_with(cache: KVCache, past: Cache) -> bool:
    """Whether the rows of a transformers cache are the first committed ones of ours, number for number."""
    length = past.get_seq_length()
    if length > cache.length or len(cast(Any, past.layers)) != len(cache):
        return False
    return all(
        mine.dtype == theirs.dtype
        and mine.device == theirs.device
        and torch.equal(mine[:, :, length - theirs.shape[2] : length], theirs)
        for mine, theirs in _pairs(cache, past)
    )


def hand_over(cache: KVCache, past: Cache, length: int) -> None:
    """Append what `past` lacks of the first `length` committed rows."""
    start, views = past.get_seq_length(), cache.views
    for layer, (keys, values) in enumerate(zip(views[::2], views[1::2], strict=True)):
        past.update(keys[:, :, start:length].clone(), values[:, :, start:length].clone(), layer)


def _pairs(cache: KVCache, past: Cache) -> Iterator[tuple[Tensor, Tensor]]:
    """Our storage and theirs, keys and values in turn."""
    theirs = [rows for layer in cast(Any, past.layers) for rows in (layer.keys, layer.values)]
    return zip(cache.views, theirs, strict=True)
