"""Which targets passed the canonical check on this machine before: a model of 1.5 B takes ten seconds of a core for it.

Owns what such a verdict depends on: the weights or their files, the code, versions, the processor, threads, the
environment.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Tensor

from opt_tree.backends.mapped import mapped
from opt_tree.backends.package_cache import bytes_of, facts_of, remember, remembered, weights_digest

if TYPE_CHECKING:
    from opt_tree.models.causal_lm import CausalLM

_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")
"""What the environment tells them may choose their kernels."""


def check_once(lm: "CausalLM", check: Callable[["CausalLM"], None]) -> None:
    """Check a target, unless the same one passed here before. Its context is forgotten.

    Numbers of a file, as far as the system tells, are known by the file. Others are read, by a checksum: it only has to
    tell one model from another, and a digest that resists an attack takes five times as long.
    """
    if lm.device.type != "cpu":
        return check(lm)
    facts = _facts(lm)
    if remembered(facts) is None:
        check(lm)
        remember(facts, "canonical")
    else:
        lm.reset()


def _facts(lm: "CausalLM") -> dict[str, Any]:
    """All that the verdict depends on."""

    def told(weight: Tensor) -> bytes:
        found = mapped(weight.detach())
        return f"{crc32(bytes_of(weight)) if found is None else found.file}".encode()

    ours = [path for folder in ("", "backends", "models") for path in sorted((_PACKAGE / folder).glob("*.[cp][py]*"))]
    return facts_of(lm.model, weights_digest(lm.model, told)) | {
        "what": "canonical",
        "ours": hashlib.sha256(b"".join(path.read_bytes() for path in ours)).hexdigest(),
        "engine": [lm.backend.name, bool(lm.eager.packed), f"{lm.buckets}"],
        "libraries": {key: value for key, value in os.environ.items() if key.startswith(_LIBRARIES)},
    }
