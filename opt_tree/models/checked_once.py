"""Which targets passed the canonical check on this machine before: a model of 1.5 B takes ten seconds of a core for it.

Owns what such a verdict depends on: the weights' files, the code, versions, the processor, threads, the environment.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opt_tree.backends.mapped import LEAST, mapped
from opt_tree.backends.package_cache import facts_of, remember, remembered

if TYPE_CHECKING:
    from opt_tree.models.causal_lm import CausalLM

_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")
"""What the environment tells them may choose their kernels."""


def check_once(lm: "CausalLM", check: Callable[["CausalLM"], None]) -> None:
    """Check a target, unless the same one passed here before. Its context is forgotten.

    One whose large weights are not those of files, as far as the system tells, is always checked.
    """
    facts = _facts(lm)
    if facts is None:
        check(lm)
    elif remembered(facts) is None:
        check(lm)
        remember(facts, "canonical")
    else:
        lm.reset()


def _facts(lm: "CausalLM") -> dict[str, Any] | None:
    """All that the verdict depends on; None where the numbers of a large weight are not those of a file."""
    digest = hashlib.sha256()
    for name, weight in (*lm.model.named_parameters(), *lm.model.named_buffers()):
        weight = weight.detach()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        if lm.device.type != "cpu" or ((found := mapped(weight)) is None and weight.nbytes >= LEAST):
            return None
        digest.update(
            f"{found.file}".encode() if found else weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    ours = [path for folder in ("", "backends", "models") for path in sorted((_PACKAGE / folder).glob("*.[cp][py]*"))]
    return facts_of(lm.model, digest.hexdigest()) | {
        "what": "canonical",
        "ours": hashlib.sha256(b"".join(path.read_bytes() for path in ours)).hexdigest(),
        "engine": [lm.engine.name, bool(lm.eager.packed), f"{lm.buckets}"],
        "libraries": {key: value for key, value in os.environ.items() if key.startswith(_LIBRARIES)},
    }
