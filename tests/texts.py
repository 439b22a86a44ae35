"""What every drafter must keep: the text of plain decoding, greedy and drawn; and what is said of one that is none."""

from collections.abc import Sequence
from typing import Any

import pytest
from tiny_models import tiny

from opt_tree import CausalLM, CheckpointError, Decoder, Generation, Sampling, load_drafter
from opt_tree.tools.presets import plain

GREEDY_AND_DRAWN = (Sampling(), Sampling(0.8))


def plain_texts(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    tokens: int = 16,
    samplings: Sequence[Sampling] = GREEDY_AND_DRAWN,
    model: Any = None,
) -> list[Generation]:
    """Decode prompts one after the other; each text must be that of plain decoding with the target's model.

    `model`: an object of the same weights that no drafter has hooked; by default the tiny Llama.
    """
    alone = plain(CausalLM(model or tiny("llama")))
    found = []
    for sampling in samplings:
        for text in prompts:
            found.append(decoder.generate(text, tokens, sampling, seed=1))
            assert found[-1].tokens == alone.generate(text, tokens, sampling, seed=1).tokens
    return found


def refused(spec: str, target: Any, complaint: str) -> None:
    """Load a drafter that is none: it must be said in one line, with where it lies."""
    with pytest.raises(CheckpointError, match=complaint) as error:
        load_drafter(spec, target)
    assert spec.partition(":")[2] in str(error.value) and "\n" not in str(error.value)
