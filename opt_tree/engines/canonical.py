"""Canonical arithmetic on a CPU: a token's logits are a function of the tokens before it alone, bit for bit.

Owns the attention kernel (`canonical.cpp`), what stands in the place of transformers' attention function while a body
runs, and the rule for one row. `opt_tree.models.canonical` switches a model over and checks it.
"""

import os
import shutil
import subprocess
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opt_tree.engines.package_cache import Package, package_of, processor

SOURCE = Path(__file__).with_name("canonical.cpp")
OPTIONS = ("-O3", "-std=c++20", "-march=native", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
"""Of the compiler. Nothing may be fused or reordered beyond what the source says."""
DTYPES = (torch.bfloat16, torch.float32)

_lock = threading.Lock()
_here = threading.local()


class NotCanonicalError(ValueError):
    """A model's forwards cannot be canonical here; the message says why in one line."""


def load_kernel() -> None:
    """Have `torch.ops.opt_tree.canonical_attention`: build it once for this CPU and this torch, and load it.

    Raises NotCanonicalError where there is no C++ compiler, and where the kernel does not build or load.
    """
    with _lock:
        if hasattr(torch.ops.opt_tree, "canonical_attention"):
            return
        facts = {"source": SOURCE.read_text(), "options": OPTIONS, "torch": torch.__version__, "processor": processor()}
        package = package_of(facts, "canonical.so")
        try:
            if package.about() is None:
                with package.lock():
                    if package.about() is None:  # another process may have built it meanwhile
                        _build(package)
            torch.ops.load_library(str(package.file))
        except OSError as error:
            raise NotCanonicalError(f"the canonical attention kernel does not load: {error}") from error
        torch.library.register_fake("opt_tree::canonical_attention", _fake)


def _build(package: Package) -> None:
    """Compile the kernel, in five seconds."""
    with TemporaryDirectory() as folder:
        made = Path(folder) / package.file.name
        built = subprocess.run(command(SOURCE, made), capture_output=True, text=True)
        if built.returncode:
            raise NotCanonicalError(f"its attention kernel does not build: {' '.join(built.stderr.split())[:300]}")
        package.write(made, {})


def command(source: Path, made: Path) -> list[str]:
    """How a source is compiled against torch's stable interface. Raises NotCanonicalError without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise NotCanonicalError("its attention kernel has to be built, and there is no C++ compiler ($CXX or g++)")
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [compiler, *OPTIONS, f"-I{torch_folder / 'include'}", str(source), *libraries, "-o", str(made)]


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The shape of what the kernel returns, for tracing."""
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def attend(
    query: Float[Tensor, "lanes heads rows dim"],
    key: Float[Tensor, "lanes kv_heads keys dim"],
    value: Float[Tensor, "lanes kv_heads keys value_dim"],
    mask: Float[Tensor, "_ 1 rows keys"],
    scale: float,
) -> Float[Tensor, "lanes rows heads value_dim"]:
    """Attention in bfloat16 or float32 whose sums go key after key, in the order of slots; see `canonical.cpp`.

    Arguments:
        query: Each `heads / kv_heads` heads in turn attend to one head of keys.
        mask: Of one lane or of all; 0 where a row sees a key, the dtype's most negative number or -inf where not.
        scale: Of the products of queries and keys.

    Raises RuntimeError for shapes, dtypes and masks that it is not made for.
    """
    tensors = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value, mask))
    return cast(Any, torch.ops.opt_tree.canonical_attention).default(*tensors, scale)


class Canonical:
    """The attention of one forward, in the place of transformers' `sdpa`."""

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
        others = [name for name in ("softcap", "position_bias", "s_aux", "cache") if more.get(name) is not None]
        if attention_mask is None or attention_mask.shape[1] > 1 or dropout or others:
            what = ", ".join(others) or ("a mask for each head" if attention_mask is not None else "no mask")
            raise NotCanonicalError(f"there is no canonical attention for {type(module).__name__} with {what}")
        _here.layers = layers_seen() + 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, scale), None


def layers_seen() -> int:
    """How many layers this thread has computed by canonical attention."""
    return getattr(_here, "layers", 0)


def at_least_two(compute: Any, rows: Tensor) -> Tensor:
    """Compute a linear layer of one row as that of two equal ones: one alone would go to another kernel.

    From two rows on the library sums a row's products in the same order, however many there are.
    """
    if rows.numel() != rows.shape[-1]:
        return compute(rows)
    one = rows.reshape(1, -1)
    return compute(torch.cat([one, one]))[:1].view(*rows.shape[:-1], -1)
