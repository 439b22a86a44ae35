"""Attention with keys split over programs: in Triton's interpreter, as code for a GPU, and on one (`pytest -m gpu`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_canonical import problem
from test_canonical_cuda import INTERPRETED, WANTED, exact_attention

SIZES = [
    {"rows": 1, "keys": 1},
    {"lanes": 2, "groups": 1, "shared": 5, "rows": 3, "keys": 128, "dim": 40},
    {"groups": 3, "shared": 3, "rows": 7, "keys": 300, "dim": 64},
]


def compare(sizes: dict[str, int], dtype: torch.dtype, device: str, limit: float) -> None:
    """With PyTorch's attention in float64."""
    from opt_tree.backends import split_attention

    query, key, value, mask = (one.to(device, dtype) for one in problem(0, torch.float32, **sizes))
    mask[..., 0] = 0
    given = query.contiguous(), key.contiguous(), value.contiguous(), mask.contiguous()
    found = split_attention.attend(*given, 0.1)
    torch.testing.assert_close(found.double(), exact_attention(*given, 0.1), atol=limit, rtol=limit)


def test_all_that_is_interpreted() -> None:
    pytest.importorskip("triton", INTERPRETED, reason=WANTED)
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is that process")
    run = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-k", "interpreter", str(Path(__file__))]
    found = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_interpreter_computes_attention(sizes: dict[str, int]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs with TRITON_INTERPRET=1, as test_all_that_is_interpreted does")
    compare(sizes, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_it_compiles_for_a_gpu(dtype: str) -> None:
    pytest.importorskip("triton", reason=WANTED)
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("an interpreted kernel is not compiled")
    from triton import compile as compile_kernel  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    from opt_tree.backends import split_attention as module

    sizes = {name: getattr(module, name) for name in ("QUERIES", "KEYS", "PART")} | {"DIM": 64, "WIDTH": 64, "PARTS": 8}
    types = dict.fromkeys(("query", "key", "value", "mask", "out"), f"*{dtype}")
    types |= dict.fromkeys(("sums", "tops", "totals"), "*fp32") | dict.fromkeys(sizes, "constexpr") | {"scale": "fp32"}
    for kernel in (module._attend_part, module._combine_parts):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs={name: sizes[name] for name in signature if name in sizes})
        assert compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_gpu(sizes: dict[str, int], dtype: torch.dtype, limit: float) -> None:
    compare(sizes, dtype, "cuda", limit)
