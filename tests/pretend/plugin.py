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


def pytest_collection_finish() -> None:
    """What imports made stays: it is not looked through for garbage again and again."""
    gc.freeze()
