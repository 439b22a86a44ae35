"""Sampling through `model.generate(custom_generate=decoder)` has the law of transformers' own processors."""

from collections import Counter
from typing import Any

import pytest
import torch
from enumeration import unchecked
from tiny_models import causal_logits, prompt, tiny, tiny_drafter
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree
from opt_tree.policies import Sampled, TreePolicy
from opt_tree.verifiers import Verifier, match, multi_round
from tests.statistical.chi_square import Text, fit

PROMPT, DRAWS = prompt(7), 250
IDS = torch.tensor([PROMPT])
OPTIONS = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3}
PAIRS = {
    "match": (OptTree(nodes=6, threshold=0.0, max_depth=3), match),
    "multi_round": (Sampled.kary(2, 2), multi_round),
}


def law(**options: Any) -> dict[Text, float]:
    """The law of two new tokens, from plain forwards and from processors in the order of transformers."""
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
            TemperatureLogitsWarper(options["temperature"]),
            TopKLogitsWarper(options["top_k"]),
            TopPLogitsWarper(options["top_p"]),
        ]
    )

    def behind(tokens: list[int]) -> dict[int, float]:
        logits = causal_logits(tiny("llama"), tokens)[-1:]
        probs = processors(torch.tensor([tokens]), logits).softmax(-1)[0].tolist()
        return {token: each for token, each in enumerate(probs) if each > 0}

    return {
        (one, two): first * second
        for one, first in behind(PROMPT).items()
        for two, second in behind([*PROMPT, one]).items()
    }


def drawn(policy: TreePolicy, verifier: Verifier) -> Counter[Text]:
    """Two new tokens of each seed."""
    model = tiny("llama")
    decoder = Decoder(CausalLM(model), CausalLMDrafter(CausalLM(tiny_drafter("llama"))), policy, verifier)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 2, "do_sample": True}
    with unchecked():
        texts = [model.generate(**inputs, **OPTIONS, custom_generate=decoder, seed=seed) for seed in range(DRAWS)]
    return Counter(tuple(text[0, len(PROMPT) :].tolist()) for text in texts)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_law_through_the_door_is_that_of_transformers(pair: str) -> None:
    texts = drawn(*PAIRS[pair])
    assert fit(texts, law(**OPTIONS)).p_value > 1e-4
    # The test has the power to tell: without the penalty, or at another temperature, the draws do not fit.
    assert fit(texts, law(**OPTIONS | {"repetition_penalty": 1.0})).p_value < 1e-4
    assert fit(texts, law(**OPTIONS | {"temperature": 1.6})).p_value < 1e-4
