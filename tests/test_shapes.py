"""Calls of the library have the shapes that it annotates: quick test files that call most of it run with checks on."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = """
check_wrong_shapes.py
controllers/test_selected.py
core/test_registry.py
decoding/test_presets.py
display/test_display.py
drafters/test_few.py
integrations/test_hf_batch.py
models/test_devices.py
models/test_named.py
models/test_wrapping.py
policies/test_policies_field.py
"""


def test_calls_have_the_shapes_that_are_annotated() -> None:
    """In a process of its own: the checks are put in where the library is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *(f"tests/{name}" for name in FILES.split())]
    found = subprocess.run(command, cwd=ROOT, env=environment | {"CHECK_SHAPES": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
