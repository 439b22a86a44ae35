"""`pytest -p pretend.plugin`: the tests believe that there is a CUDA device."""

import gc
import sys

import torch

from pretend import device, graphs

try:
    device.install()
    graphs.install()
    torch.ones(2, device="cuda").sum().item()
except Exception as error:  # private names of torch are others
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(device.NO_PLACE)


def pytest_configure() -> None:
    gc.disable()  # what imports and collection make stays, as in tests/process.py


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
