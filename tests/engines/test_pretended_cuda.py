"""The library on a pretended CUDA device (tests/pretend), in a process of its own, since a process has one such device.

Shown: what lies where, how often the host waits, what a captured graph reads and writes. Not shown: a device's kernels,
their rounding and time.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)  # two minutes alone on a core, and another suite inside


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository; torch without a CUDA device, as on the machines that this is for."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def torch_can_be_made_to_believe_it():
    """Skip where the private names of torch that the device rests on are others."""
    found = run("-c", "from pretend import plugin; import torch; torch.ones(2, device='cuda').sum().item()")
    if found.returncode:
        pytest.skip(f"this torch has no place for the pretended device: {found.stderr.strip().splitlines()[-1]}")


def checked(*arguments: str) -> str:
    pytest_on_it = ("-m", "pytest", "-n", "0", "-p", "pretend.plugin", "-o", "addopts=", "-q")
    found = run(*pytest_on_it, *arguments)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    return found.stdout


def test_texts_waits_and_graphs():
    checked("--noconftest", "-o", "python_files=check_*.py", "tests/pretend/check_pretended_cuda.py")


def test_what_is_marked_for_a_gpu_passes_on_it():
    out = checked("-m", "gpu", "tests/decoding/test_gpu.py")
    assert "skipped" not in out and "passed" in out


def test_a_first_gpu_s_command_runs_on_it(tmp_path):
    """The parts that ask the device for something of their own, with small sizes."""
    written = tmp_path / "first"
    options = ["--dry-run", "--parts", "machine,buckets,steps", "--output"]
    start = f"from pretend import plugin; import runpy, sys; sys.argv[1:1] = {options}"
    found = run("-c", f"{start}; runpy.run_module('experiments.gpu_first_light', run_name='__main__')", str(written))
    assert found.returncode == 0, found.stderr[-2000:]
    parts = json.loads(written.with_suffix(".json").read_text())["parts"]
    assert parts["machine"]["rows"] and parts["buckets"]["rows"]
    assert all(row["waits/step"] >= 1 for row in parts["steps"]["rows"])
