"""Which of two conventions a head's layers are named by, where its file does not say: both are tried on a short text.

A head that reads other states than it was trained on drafts, and badly (45 % against 10 % of first tokens in one
case, vllm-project/vllm#43671); texts stay what they are, so that nothing else shows it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opt_tree.hidden_states import hidden_states
from opt_tree.methods.drafters.heads.eagle_head import HeadedEagle
from opt_tree.models.causal_lm import CausalLM

TEXT = """The library opens at nine in the morning and closes at six. Every book has a number on its back, and the
number says on which shelf it stands. If you cannot find a book, ask the person at the desk.

def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

Question: What is 12 times 12? Answer: 12 times 12 is 144. Question: What is the capital of France? Answer: The
capital of France is Paris."""
"""Prose, code and an answer: what most heads were trained on."""
_MOST, _SIGMAS = 160, 3.0


class Probed(NamedTuple):
    """What a probe found: how often the head's first token is the target's, by either reading."""

    entered: bool
    """Whether ids name what enters a layer: the reading that is taken."""
    agreed: tuple[int, int]
    """Rows in which the head agrees, by the reading that is taken and by the other one."""
    rows: int
    clear: bool
    """Whether one is better beyond chance; if not, a rule of thumb was kept."""

    def __str__(self) -> str:
        first, second = (f"{count / self.rows:.0%}" for count in self.agreed)
        names = ("what enters them", "what leaves them")
        taken, other = names if self.entered else names[::-1]
        how = "" if self.clear else ", too near to tell: SGLang's rule"
        return f"layers named by {taken} ({first} of first tokens agree, {second} by {other}{how})"


@torch.inference_mode()
def probe(
    headed: HeadedEagle,
    target: CausalLM,
    readings: tuple[tuple[int, ...], tuple[int, ...]],
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: Int[Tensor, " columns"] | None,
) -> tuple[int, int, int, bool]:
    """Run the head over a text by both `readings`, layers by their outputs, beside the true tokens.

    Return how many rows agree with the target by the first and by the second, of how many, and whether that is more
    than chance: of the rows in which only one agrees, the difference is above three times its deviation. `tokens`: the
    draft vocabulary. Without a `tokenizer` the text is a row of token ids.
    """
    ids = _ids(target, tokenizer)
    network: Any = target.model
    layers = tuple(sorted({*readings[0], *readings[1]}))
    with hidden_states(network, layers) as states:
        wanted = network(input_ids=ids, use_cache=False).logits[0].argmax(-1)
    found = [_agrees(headed, ids, [states[layer] for layer in one], wanted, tokens) for one in readings]
    first, second = (int((one & ~other).sum()) for one, other in (found, found[::-1]))
    clear = abs(first - second) > _SIGMAS * max(first + second, 1) ** 0.5
    return int(found[0].sum()), int(found[1].sum()), len(found[0]), clear


def _ids(target: CausalLM, tokenizer: PreTrainedTokenizerBase | None) -> Int[Tensor, "1 tokens"]:
    count = min(_MOST, target.max_context)
    known = tokenizer(TEXT).input_ids if tokenizer is not None else [(7 * i + 3) % target.vocab for i in range(count)]
    return torch.tensor([known[:count]], device=target.device)


def _agrees(
    headed: HeadedEagle,
    ids: Int[Tensor, "1 tokens"],
    states: Sequence[Tensor],
    wanted: Int[Tensor, " tokens"],
    tokens: Int[Tensor, " columns"] | None,
) -> Bool[Tensor, " rows"]:
    """Where the head's best token behind each pair is the target's: pair i has token i + 1, whose successor it is."""
    head: Any = headed.base_model
    weight = head.embed_tokens.weight
    features = head.fuse([state[:, :-1].to(weight.device, weight.dtype) for state in states])
    read = ids[:, 1:].to(weight.device).clamp(max=head.config.vocab_size - 1)
    rows = read.shape[1]
    mask = torch.full((rows, rows), torch.finfo(weight.dtype).min, dtype=weight.dtype, device=weight.device).triu(1)
    positions = torch.arange(rows, device=weight.device)[None]
    best = headed(read, features, position_ids=positions, attention_mask=mask[None, None]).logits[0].argmax(-1)
    best = best if tokens is None else tokens.to(best.device)[best]
    return (best == wanted[1:].to(best.device)).cpu()
