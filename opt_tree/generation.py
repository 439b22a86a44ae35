"""What goes into a generation and what comes out: a checked prompt, a finished `Generation`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from opt_tree.errors import require
from opt_tree.step import Step
from opt_tree.target import Target


@dataclass(frozen=True)
class Generation:
    """A finished generation: the new tokens, why it ended, and every step of it."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    """"length" (max_new_tokens), "context" (the model's context is full), or what the stop rule said."""
    steps: list[Step] = field(repr=False)
    accept_lengths: list[int]
    """Tokens emitted by each step, accepted + 1, the last step trimmed where the generation stopped."""
    seconds: float
    """Wall time of everything, prefill included."""
    lanes: int = 1
    """How many sequences were decoded side by side. Above 1 all times are of the batch: others' work is in them."""
    reused: int = 0
    """Tokens of the prompt that the target did not take in, as its cache held them already (`reuse=True`)."""
    log_probs: list[float] | None = field(default=None, repr=False)
    """Of each token, its log-probability in the target's processed distribution (`recorder=`)."""
    top_log_probs: list[dict[int, float]] | None = field(default=None, repr=False)
    """Of each place, the likeliest tokens with their log-probabilities, the likeliest first."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step (the literature's MAL or tau): mean of accepted + 1; 1.0 for plain decoding."""
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1)

    @property
    def expected_lengths(self) -> list[float]:
        """E(A) + 1 of each step: what the drafter led to expect of `accept_lengths`."""
        return [step.expected_accepted + 1 for step in self.steps]

    @property
    def prefill_seconds(self) -> float:
        return self.steps[0].times.prefill if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return len(self.tokens) / self.seconds


def check_ids(given: Any, name: str) -> None:
    """Raise TypeError for what a tokenizer returns as a whole, a mapping such as a BatchEncoding."""
    if isinstance(given, Mapping):
        raise TypeError(f'{name} must be token ids, got a {type(given).__name__}: pass its ["input_ids"]')


def check_prompt(prompt: Any, target: Target) -> list[int]:
    """Return the prompt as a fresh list of token ids, or say in one line what is wrong with it."""
    check_ids(prompt, "prompt")
    require(Iterable, prompt=prompt)
    ids = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else list(prompt)
    if ids and isinstance(ids[0], (list, tuple)):
        if len(ids) > 1:
            raise ValueError(
                f"a batch of {len(ids)} prompts: trees of different shapes do not batch; decode one prompt at a time, "
                "or split the prompts over processes"
            )
        ids = list(ids[0])
    if not ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    if not all(isinstance(token, (int, np.integer)) for token in ids):
        raise ValueError("the prompt must be token ids; run the tokenizer on text first")
    if len(ids) >= target.max_context:
        room = f"{target.max_context} of context{target.context_note}"
        raise ValueError(f"the prompt has {len(ids)} tokens, which leaves no room in {room}")
    if min(ids) < 0 or max(ids) >= target.vocab:
        raise ValueError(f"token {max(ids) if min(ids) >= 0 else min(ids)} is outside the vocabulary of {target.vocab}")
    return [int(token) for token in ids]


def check_others(given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that are not `generate`'s, with a word on where they may belong."""
    for name, value in given.items():
        raise TypeError(
            f"generate() takes no {name}: pass sampling=Sampling({name}={value!r}) if it shapes the distribution; "
            "help(Decoder.generate) lists all"
        )


def check_new_tokens(most: Any) -> int:
    """Return a number of new tokens as an int, 8.0 likewise. TypeError or ValueError for what is none."""
    require(Real, max_new_tokens=most)
    if not 1 <= most < math.inf or most != int(most):
        raise ValueError(f"max_new_tokens must be at least 1, got {most}: whole tokens")
    return int(most)
