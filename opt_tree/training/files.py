"""What a run leaves on disk for the next one, checkpoints, and the dtype that it computes in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from opt_tree.models.checkpoints import fast_bfloat16
from opt_tree.system.files import whole


def working_dtype() -> torch.dtype:
    """Return bfloat16 with an accelerator or on a CPU that multiplies it, else float32, which is faster there."""
    return torch.bfloat16 if torch.cuda.is_available() or fast_bfloat16() else torch.float32


def write_checkpoint(
    config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a config and tensors as one folder, floating-point ones in `dtype`."""
    cast = {name: t.to(dtype if t.is_floating_point() else t.dtype).contiguous() for name, t in tensors.items()}
    with whole(folder) as partial:
        partial.mkdir()
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(cast, partial / "model.safetensors", metadata={"format": "pt"})
