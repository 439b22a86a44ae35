"""Canonical attention in Triton, without a GPU: in Triton's interpreter, and as the code that a GPU would get."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_canonical import DTYPES, leaves_no_trace, problem

from opt_tree.engines import canonical
from opt_tree.engines.canonical import NotCanonicalError, attend, load_kernel, whole_sums

WANTED = "pip install triton to try the kernels for CUDA"
HERE = Path(__file__)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> ModuleType:
    """The kernels in the interpreter, which Triton takes for all that it loads or for nothing: in another process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs with TRITON_INTERPRET=1, as test_all_that_is_interpreted does")
    request.getfixturevalue("kernel")
    return importlib.import_module("opt_tree.engines.canonical_cuda")


def test_all_that_is_interpreted() -> None:
    pytest.importorskip("triton", reason=WANTED)
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is that process")
    run = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-k", "interpreter", str(HERE)]
    found = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 1, "keys": 1},
        {"lanes": 2, "groups": 1, "shared": 5, "rows": 3, "keys": 16, "dim": 40},
        {"groups": 3, "shared": 3, "rows": 7, "keys": 70, "dim": 64},
    ],
)
def test_the_interpreter_computes_what_the_kernel_for_cpus_does(interpreted, dtype, sizes):
    """To rounding: the interpreter rounds a fused multiply-add twice."""
    query, key, value, mask = problem(0, dtype, **sizes)
    mask[0, 0, 0] = -3e38  # a row that sees no key
    given = query, key, value[..., : max(1, value.shape[-1] - 3)], mask, 0.1
    expected = attend(*given).double()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(interpreted.attend(*given).double(), expected, atol=limit, rtol=limit)


def test_other_rows_lanes_slots_and_junk_leave_no_trace_in_the_interpreter(interpreted: ModuleType) -> None:
    assert leaves_no_trace(interpreted.attend, torch.bfloat16)


def test_a_mask_that_adds_other_numbers_is_loud_in_the_interpreter(interpreted: ModuleType) -> None:
    query, key, value, mask = problem(6, torch.float32, rows=2, keys=9)
    mask[0, 0, 0, 0] = -1.0
    found = interpreted.attend(query, key, value, mask, 0.25)
    assert found[0, 0].isnan().all() and found[0, 1].isfinite().all()


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_a_gpu_and_fuses_nothing_by_itself(capability: int) -> None:
    pytest.importorskip("triton", reason=WANTED)
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("an interpreted kernel is not compiled")
    module = importlib.import_module("opt_tree.engines.canonical_cuda")
    from triton import compile as compile_kernel  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    sizes = {"DIM": 64, "COLUMNS": 64, "QUERIES": module.QUERIES, "KEYS": module.KEYS}
    types = dict.fromkeys(module.INTEGERS, "i32") | dict.fromkeys(module.OTHERS, "*bf16")
    types |= {"scores": "*fp32", "scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
    for kernel in (module._score, module._weigh):
        signature = {name: types[name] for name in kernel.arg_names}
        known = {name: size for name, size in sizes.items() if name in signature}
        source = ASTSource(kernel, signature, constexprs=known)
        made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        text = made.asm["ptx"]
        assert "fma.rn.f32" in text and not re.search(r"\b(add|mul)\.f32", text), "what may still be fused has no .rn"


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opt_tree.engines.canonical_cuda", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotCanonicalError, match=r"its attention kernel on CUDA is written in Triton: .*triton"):
        load_kernel("cuda")


def test_sums_are_whole_inside_and_as_before_behind() -> None:
    settings = torch.backends.cuda.matmul
    name = "allow_bf16_reduced_precision_reduction"
    before = getattr(settings, name), getattr(settings, f"{name}_split_k")
    with whole_sums():
        assert not getattr(settings, name) and not getattr(settings, f"{name}_split_k")
    assert (getattr(settings, name), getattr(settings, f"{name}_split_k")) == before
    assert canonical.ROWS > 61, "a tree of 60 nodes and its root go in one forward"
