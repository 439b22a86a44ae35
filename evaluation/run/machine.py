"""Where a run took place: versions, device, threads, commit. In every header, so that figures can be judged later."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import opt_tree


def environment(device: torch.device) -> dict[str, Any]:
    """Describe this process's software and hardware."""
    return {
        "opt_tree": opt_tree.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "accelerate", "numpy")},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def commit() -> str | None:
    """The commit of this checkout, with `+` for uncommitted changes; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        # An installed copy may lie inside some other project's checkout: only a tracked file's commit is ours.
        if not git("ls-files", "__init__.py", Path(__file__).name):
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The CPU's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
