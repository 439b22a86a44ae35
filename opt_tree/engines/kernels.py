"""C++ kernels of this package: each source is built once for this processor and this torch, kept, and loaded.

Owns the compiler's command and where what it makes lies. A kernel is written against torch's stable interface and
registers operators of `torch.ops.opt_tree`.
"""

import os
import shutil
import subprocess
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from opt_tree.engines.package_cache import Package, package_of, processor

OPTIONS = ("-O3", "-std=c++20", "-march=native", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
"""Of the compiler. Nothing may be fused or reordered beyond what the source says."""
_lock = threading.Lock()


class KernelError(RuntimeError):
    """A kernel cannot be had here; the message says why in one line, and begins with the kernel's name."""


def load(source: Path, operator: str) -> bool:
    """Have an operator that a source registers, which takes some seconds once; return whether it was loaded by this.

    Raises KernelError where there is no C++ compiler, and where the kernel does not build or load.
    """
    with _lock:
        if hasattr(torch.ops.opt_tree, operator):
            return False
        facts = {"source": source.read_text(), "options": OPTIONS, "torch": torch.__version__, "processor": processor()}
        package = package_of(facts, f"{source.stem}.so")
        try:
            package.ensure(lambda: _build(source, package))
            torch.ops.load_library(str(package.file))
        except OSError as error:
            raise KernelError(f"the kernel {source.name} does not load: {error}") from error
        return True


def _build(source: Path, package: Package) -> None:
    with TemporaryDirectory() as folder:
        made = Path(folder) / package.file.name
        built = subprocess.run(command(source, made), capture_output=True, text=True)
        if built.returncode:
            raise KernelError(f"the kernel {source.name} does not build: {' '.join(built.stderr.split())[:300]}")
        package.write(made, {})


def command(source: Path, made: Path) -> list[str]:
    """How a source is compiled against torch's stable interface. Raises KernelError without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise KernelError(f"the kernel {source.name} has to be built, and there is no C++ compiler ($CXX or g++)")
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [compiler, *OPTIONS, f"-I{torch_folder / 'include'}", str(source), *libraries, "-o", str(made)]
