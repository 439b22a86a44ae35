"""`pytest -p pretend.plugin`: the tests believe that there is a CUDA device."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
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


@pytest.fixture(autouse=True, scope="session")
def each_kind_of_model_is_probed_once() -> Iterator[None]:
    """A probe of the tree mask at each wrapping takes a quarter of the time. It shows the same for models of a kind."""
    from opt_tree.models import causal_lm

    probe, seen = causal_lm.check_tree_mask, set[Any]()

    def first(lm: causal_lm.CausalLM) -> None:
        kind = type(lm.model), lm.dtype, lm.device, str(lm.model.config), lm.buckets
        if kind not in seen:
            probe(lm)
        seen.add(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "check_tree_mask", first)
        yield
