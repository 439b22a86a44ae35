"""The library on a pretended CUDA device (tests/pretend), in a process of its own, since a process has one such device.

Shown: what lies where, how often the host waits, what a captured graph reads and writes. Not shown: a device's kernels,
their rounding and time; so what is marked for a GPU because of its rounding is left to one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretend.device import NO_PLACE

ROOT = Path(__file__).parents[2]
CHECKS = ("tests/pretend/check_pretended_cuda.py", "tests/decoding/test_gpu.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute alone on a core, and another suite inside
def test_texts_waits_graphs_and_what_is_marked_for_a_gpu(tmp_path):
    """By a torch without a CUDA device, as on the machines that this is for."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OPT_TREE_CACHE": str(tmp_path)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed there, and importing hypothesis takes a second
    command = [sys.executable, "-m", "pytest", "-p", "pretend.plugin", "-o", "addopts=", "-q"]
    command += ["--noconftest", "-o", "python_files=check_*.py test_*.py", *CHECKS, "-k", "not rounding"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if found.returncode == NO_PLACE:
        pytest.skip(f"this torch has no place for the pretended device: {found.stderr.strip().splitlines()[-1]}")
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout and "passed" in found.stdout
