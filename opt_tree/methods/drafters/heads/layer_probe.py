"""Which of several conventions a head was trained by, where its file does not say: all are tried on a short text.

Conventions are which states layer ids name, and which row of a block speaks of the next token. A head that reads other
states than it was trained on drafts, and badly (45 % against 10 % of first tokens in one case,
vllm-project/vllm#43671); texts stay what they are, so that nothing else shows it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.text_states import logits_and_states

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

States = Mapping[int, Float[Tensor, "1 tokens hidden"]]
"""What the target's layers return of a text, by layer; -1: its last state, behind the norm."""
Try = Callable[[Int[Tensor, "1 tokens"], States], Int[Tensor, " tokens"]]
"""From a text and its states to the token that a head drafts first behind each of the text's; -1: it is not asked."""


class Convention(NamedTuple):
    """A way to read a head's file."""

    name: str
    """For `describe`, behind "layers named by " or the like."""
    best: Try
    """What the head drafts, read so."""


class Probed(NamedTuple):
    """What a probe found: how often the head's first token is the target's, by the one that is taken and by another."""

    taken: int
    """Which convention: the first unless another one is better beyond chance."""
    names: tuple[str, str]
    """The one that is taken, and the best of the others; where another one is taken, the first."""
    agreed: tuple[int, int]
    """Rows in which the head agrees, by each of both."""
    rows: int
    clear: bool
    """Whether the difference is beyond chance; if not, a rule of thumb was kept."""
    rule: str
    """Which."""

    def __str__(self) -> str:
        first, second = (f"{count / self.rows:.0%}" for count in self.agreed)
        how = "" if self.clear else f", too near to tell: {self.rule}"
        return f"{self.names[0]} ({first} of first tokens agree, {second} if {self.names[1]}{how})"


@torch.inference_mode()
def probe(
    target: CausalLM,
    layers: Sequence[int],
    conventions: Sequence[Convention],
    tokenizer: PreTrainedTokenizerBase | None,
    rule: str,
) -> Probed:
    """Run a head over a text by each convention, beside the true tokens; the first convention is that of a `rule`.

    Another one is taken if it is better by more than chance: of the rows in which only one of both agrees, the
    difference is above three times its deviation. `layers`: all that any of them reads. Without a `tokenizer` the text
    is a row of token ids.
    """
    ids = _ids(target, tokenizer)
    logits, states = logits_and_states(target.model, ids, layers)
    wanted = logits[0].argmax(-1).cpu()
    drafted = [one.best(ids, states).cpu() for one in conventions]
    agreed = [(found == wanted)[found >= 0] for found in drafted]
    counts = [int(one.sum()) for one in agreed]
    best = max(range(len(counts)), key=lambda number: (counts[number], -number))
    taken = best if best and _clear(agreed[best], agreed[0]) else 0
    others = [number for number in range(len(counts)) if number != taken]
    other = 0 if taken else max(others, key=lambda number: counts[number])
    return Probed(
        taken,
        (conventions[taken].name, conventions[other].name),
        (counts[taken], counts[other]),
        len(agreed[0]),
        _clear(agreed[taken], agreed[other]),
        rule,
    )


def _clear(one: Bool[Tensor, " rows"], other: Bool[Tensor, " rows"]) -> bool:
    """Whether one of both agrees more often beyond chance."""
    first, second = int((one & ~other).sum()), int((other & ~one).sum())
    return abs(first - second) > _SIGMAS * max(first + second, 1) ** 0.5


def _ids(target: CausalLM, tokenizer: PreTrainedTokenizerBase | None) -> Int[Tensor, "1 tokens"]:
    count = min(_MOST, target.max_context)
    known = tokenizer(TEXT).input_ids if tokenizer is not None else [(7 * i + 3) % target.vocab for i in range(count)]
    return torch.tensor([known[:count]], device=target.device)
