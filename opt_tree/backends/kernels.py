"""C++ kernels of this package: each source is built once for this processor and this torch, kept, and loaded.

Where nothing can be kept, each process builds it anew. Owns the compiler's command and where what it makes lies. A
kernel is written against torch's stable interface and registers operators of `torch.ops.opt_tree`.
"""

import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from opt_tree.backends.package_cache import package_of, processor

OPTIONS = ("-O3", "-std=c++20", "-march=native", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
"""Of the compiler. Nothing may be fused or reordered beyond what the source says."""
_lock = threading.Lock()


class KernelError(RuntimeError):
    """A kernel cannot be had here; the message says why in one line, and begins with the kernel's name."""


def load(source: Path, operator: str) -> bool:
    """Have an operator that a source registers, which takes some seconds once; return whether it was loaded by this.

    Where the cache cannot be written, or another user may write to it, it is built for this process alone, with a
    warning.
    Raises KernelError where there is no C++ compiler, and where the kernel does not build or load.
    """
    with _lock:
        if hasattr(torch.ops.opt_tree, operator):
            return False
        facts = {"source": source.read_text(), "options": OPTIONS, "torch": torch.__version__, "processor": processor()}
        package = package_of(facts, f"{source.stem}.so")
        try:
            try:
                package.ensure(lambda: _build(source, lambda made: package.write(made, {})))
                torch.ops.load_library(str(package.checked_file()))
            except OSError as error:
                if any(map(os.path.isfile, package.folder.parents)):  # a wrong name, not a place that keeps nothing
                    raise
                _build(source, lambda made: torch.ops.load_library(str(made)))  # what is loaded needs no file any more
                warnings.warn(f"the kernel {source.name} was built for this process alone: {error}", stacklevel=2)
        except OSError as error:
            raise KernelError(f"the kernel {source.name} does not load: {error}") from error
        return True


def _build(source: Path, use: Callable[[Path], None]) -> None:
    """Build a source and have the file used, which then goes."""
    with TemporaryDirectory() as folder:
        made = Path(folder) / f"{source.stem}.so"
        built = subprocess.run(command(source, made), capture_output=True, text=True)
        if built.returncode:
            raise KernelError(f"the kernel {source.name} does not build: {' '.join(built.stderr.split())[:300]}")
        use(made)


def command(source: Path, made: Path) -> list[str]:
    """How a source is compiled against torch's stable interface. Raises KernelError without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise KernelError(f"the kernel {source.name} has to be built, and there is no C++ compiler ($CXX or g++)")
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [compiler, *OPTIONS, f"-I{torch_folder / 'include'}", str(source), *libraries, "-o", str(made)]
