"""Attention with keys split over programs: in Triton's interpreter, as code for a GPU, and on one (`pytest -m gpu`)."""

import pytest
import torch
from in_triton import compiled, only_compiled, only_interpreted, run_interpreted
from test_canonical import problem
from test_canonical_cuda import exact_attention

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
    run_interpreted(__file__)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_interpreter_computes_attention(sizes: dict[str, int]) -> None:
    only_interpreted()
    compare(sizes, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_it_compiles_for_a_gpu(dtype: str) -> None:
    only_compiled()
    from opt_tree.backends import split_attention as module

    sizes = {name: getattr(module, name) for name in ("QUERIES", "KEYS", "PART")} | {"DIM": 64, "WIDTH": 64, "PARTS": 8}
    types = dict.fromkeys(("query", "key", "value", "mask", "out"), f"*{dtype}")
    types |= dict.fromkeys(("sums", "tops", "totals"), "*fp32") | {"scale": "fp32"}
    for kernel in (module._attend_part, module._combine_parts):
        assert compiled(kernel, types, sizes, 90)["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_gpu(sizes: dict[str, int], dtype: torch.dtype, limit: float) -> None:
    compare(sizes, dtype, "cuda", limit)
