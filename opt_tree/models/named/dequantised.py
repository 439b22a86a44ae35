"""The weights of a GGUF file as bfloat16 safetensors, a piece at a time: memory never holds a model.

Owns the way through transformers' reader of GGUF files that needs neither a model nor the file's metadata three times.
It is taken where each of the file's tensors is one of the model's, in the same shape.
"""

import functools
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers import modeling_gguf_pytorch_utils as reader

_NUMBERS = 1 << 22
"""Unpacked at once, where rows are independent of each other."""


class _Reader(gguf.GGUFReader):
    """gguf's reader, whose slices of the file are plain arrays: those of its own take most of its time."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._plain: np.ndarray | None = None
        super().__init__(*arguments, **named)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if self._plain is None:
            self._plain = self.data.view(np.ndarray)
        size = int(count) * np.dtype(dtype).itemsize
        found = self._plain[offset : offset + size].view(dtype)
        order = self.byte_order if override_order is None else override_order
        return found if order in ("I", "<") and _LITTLE else found.view(found.dtype.newbyteorder(order))


_LITTLE = struct.pack("=H", 1) == struct.pack("<H", 1)


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, transformers reads a GGUF file's metadata once and faster, and shows its bar on terminals only."""
    once = functools.lru_cache(maxsize=1)
    changes: list[tuple[Any, str, Any]] = [
        (reader, "tqdm", functools.partial(reader.tqdm, disable=None)),
        (gguf, "GGUFReader", once(_Reader)),
        (gguf, "get_tensor_name_map", once(gguf.get_tensor_name_map)),
    ]
    kept = [getattr(module, name) for module, name, _ in changes]
    for module, name, new in changes:
        setattr(module, name, new)
    try:
        yield
    finally:
        for (module, name, _), before in zip(changes, kept, strict=True):
            setattr(module, name, before)


def save(folder: str, name: str, fresh: Path, weights: str, check: Callable[[Any], None]) -> bool:
    """Write the GGUF file `name` of a folder to `fresh`: weights, config, generation config. Called in `read_once`.

    Returns False, and writes nothing, where it is not as simple as that: then transformers has to load it. `check` may
    refuse the config.
    """
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    file = gguf.GGUFReader(f"{folder}/{name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    architecture = reader.read_field(file, "general.architecture")[0]
    processor = reader.TENSOR_PROCESSORS.get(architecture, reader.TensorProcessor)(config=config.to_dict())
    names = reader.get_gguf_hf_weights_map(model, processor)
    found = {names[tensor.name]: tensor for tensor in file.tensors if tensor.name in names}
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    tied = {key for key in getattr(model, "all_tied_weights_keys", {}) if key not in found}
    if {key: tuple(map(int, reversed(tensor.shape))) for key, tensor in found.items()} != {
        key: shape for key, shape in shapes.items() if key not in tied
    }:
        return False
    check(config)
    _write(fresh / weights, found, processor)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(fresh)
    GenerationConfig.from_model_config(config).save_pretrained(fresh)
    return True


def _write(path: Path, tensors: dict[str, Any], processor: Any) -> None:
    """Write the tensors one after the other, as safetensors in bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        shape = tuple(map(int, reversed(tensor.shape)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + 2 * prod(shape))}
        end += 2 * prod(shape)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (
        path.open("wb") as out,
        tqdm(total=round(end / 1e6), desc="converting", unit="MB", leave=False, disable=None) as bar,
    ):
        out.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            for piece in _pieces(tensor, processor):
                piece.view(torch.uint8).numpy().tofile(out)
                bar.update(piece.nbytes / 1e6)
        out.flush()
        os.fsync(out.fileno())


def _pieces(tensor: Any, processor: Any) -> Iterator[torch.Tensor]:
    """The numbers of a tensor in bfloat16, some rows at a time; all at once where transformers moves rows."""
    data = tensor.data.view(np.ndarray)
    whole = type(processor).process is not reader.TensorProcessor.process
    step = len(data) if whole else max(_NUMBERS // max(prod(map(int, tensor.shape)) // len(data), 1), 1)
    for begin in range(0, len(data), step):
        numbers = gguf.dequantize(data[begin : begin + step], tensor.tensor_type)
        numbers = processor.process(weights=numbers, name=tensor.name).weights
        yield torch.from_numpy(np.array(numbers, np.float32)).to(torch.bfloat16).reshape(-1)
