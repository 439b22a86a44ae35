"""A tiny model, and a decoder of it, for all that goes through `generate`."""

from typing import Any

import pytest
from tiny_models import VOCAB, tiny, tiny_drafter

from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.opt import OptTree


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
    return Decoder(CausalLM(model), drafter, OptTree(nodes=10, threshold=0.1, max_depth=5))
