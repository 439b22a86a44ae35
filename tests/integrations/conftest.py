"""A tiny model, and a decoder of it, for all that goes through `generate`."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def model() -> Any:
    from tiny_models import tiny  # here: a conftest is read before the checks of shapes are put into what it imports

    return tiny("llama")


@pytest.fixture(scope="module")
def decoder(model: Any) -> Any:
    from tiny_models import VOCAB, tiny_drafter

    from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree

    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    return Decoder(CausalLM(model), drafter, OptTree(nodes=10, threshold=0.1, max_depth=5))
