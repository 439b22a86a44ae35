"""Triton's kernels without a GPU: in its interpreter, and as the code that a GPU would get."""

import os
import subprocess
import sys
from typing import Any

import pytest

WANTED = "pip install triton to try the kernels for CUDA"
_INTERPRETED = "3.9"
"""What the interpreter is tried with: 3.6 stops at loops with NumPy 2.4."""


def is_interpreted() -> bool:
    """Whether this process interprets kernels: Triton does so for all that it loads, or for nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def only_interpreted() -> None:
    """Skip a test where kernels are compiled."""
    if not is_interpreted():
        pytest.skip("runs with TRITON_INTERPRET=1, as test_all_that_is_interpreted does")


def run_interpreted(file: str) -> None:
    """Run the tests of a file that have "interpreter" in their name in a process that interprets kernels."""
    pytest.importorskip("triton", _INTERPRETED, reason=WANTED)
    if is_interpreted():
        pytest.skip("this is that process")
    run = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-k", "interpreter", file]
    found = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout[-4000:] + found.stderr[-2000:]


def only_compiled() -> None:
    """Skip a test where there is no Triton, or one that interprets."""
    pytest.importorskip("triton", reason=WANTED)
    if is_interpreted():
        pytest.skip("an interpreted kernel is not compiled")


def compiled(kernel: Any, types: dict[str, str], sizes: dict[str, int], capability: int, **options: Any) -> Any:
    """Return the code of a kernel for a GPU of this compute capability.

    `types`: of arguments by their name, of others "i32". `sizes`: those that are known when it is compiled.
    """
    from triton import compile as compile_kernel  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    types = types | dict.fromkeys(sizes, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={name: sizes[name] for name in signature if name in sizes})
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options).asm
