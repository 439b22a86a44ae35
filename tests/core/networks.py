"""Small random networks for the tests of the core, and what they say: whole forwards of `transformers`, no cache."""

import copy
import functools
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from opt_tree.draft_model import CausalLMDrafter
from opt_tree.model import Model
from opt_tree.policy import OptTree

VOCAB, NEW = 24, 16
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], [9, 9, 9, 2, 9, 9, 9, 2, 9])
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "initializer_range": 0.3,  # with transformers' own, attention hardly decides a token, and texts tell nothing of it
}
TREES = (OptTree(1, 0.0, 1), OptTree(6, 0.0, 3), OptTree(12, 0.05, 6), OptTree(12, 0.6, 6), OptTree(30, 0.0, 10))


def network(kind: str, layers: int = 2, seed: int = 0) -> Any:
    """A random model in float64, with a window of 16 tokens where it is a Mistral."""
    torch.manual_seed(seed)
    more: dict[str, Any] = {"num_hidden_layers": layers, "num_key_value_heads": 1, "max_position_embeddings": 256}
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(sliding_window=16, **SIZES, **more)).double().eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, **more)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).double().eval()


def drafter_of(target: Any) -> CausalLMDrafter:
    """The target's own weights, shaken: often right and often not."""
    shaken = copy.deepcopy(target)
    torch.manual_seed(7)
    for weight in shaken.parameters():
        weight.data += 0.05 * weight.std() * torch.randn_like(weight)
    return CausalLMDrafter(Model(shaken))


@torch.inference_mode()
def logits_after(model: Any, text: list[int]) -> torch.Tensor:
    return model(torch.tensor([text]), use_cache=False).logits[0, -1]


def written(model: Any, prompt: list[int], count: int = NEW) -> list[int]:
    """The greedy text, a whole forward a token; written once for all that compare with it."""
    return _written(model, tuple(prompt), count)[:]


@functools.cache
def _written(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits_after(model, text).argmax()))
    return text[len(prompt) :]
