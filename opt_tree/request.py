"""What a generation is asked for: a prompt, so many tokens, and where it ends before that."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import NoneType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from opt_tree.errors import require
from opt_tree.sampling import Temperature
from opt_tree.target import Target


@runtime_checkable
class StopRule(Protocol):
    """Asked after every single emitted token, so that a generation ends inside an accepted path if need be."""

    def __call__(self, generated: list[int]) -> str | None:
        """Return why to stop after the last token of `generated` (new tokens only), or None to go on."""


@dataclass(frozen=True)
class StopTokens:
    """Stop after any of `tokens`; None: the end tokens of the target that generates (`Target.ends`)."""

    tokens: Collection[int] | None = None

    def __post_init__(self) -> None:
        require((Collection, NoneType), tokens=self.tokens)
        if self.tokens is not None:
            for token in self.tokens:
                require(Integral, token=token)
            object.__setattr__(self, "tokens", frozenset(int(token) for token in self.tokens))

    def __call__(self, generated: list[int]) -> str | None:
        return "stop_token" if self.tokens is not None and generated[-1] in self.tokens else None


def ends_of(rule: StopRule | None) -> frozenset[int]:
    """The tokens that a rule is known to stop at, by its `tokens`; nothing has to be drafted below these."""
    return frozenset(getattr(rule, "tokens", None) or ())


def rule_for(rule: StopRule | None, ends: frozenset[int]) -> StopRule | None:
    """Return the rule for a target whose answers end at `ends`. Raises TypeError for what is no rule."""
    if rule is not None and not callable(rule):
        raise TypeError(f"stop must be a rule, such as Stop(strings=..., tokenizer=...), got {rule!r}")
    return replace(rule, tokens=ends) if isinstance(rule, StopTokens) and rule.tokens is None else rule


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
    """Raise TypeError for arguments that are not `generate`'s; those of a sampling are told where they belong."""
    for name, value in given.items():
        kinds: list[type[Temperature]] = [Temperature, *Temperature.__subclasses__()]
        shaping = {item.name for kind in kinds for item in fields(kind)}
        where = f"pass sampling=Sampling({name}={value!r})" if name in shaping else "help(Decoder.generate) lists all"
        raise TypeError(f"generate() takes no {name}: {where}")


def check_recorder(recorder: Any) -> None:
    """Raise TypeError for what can record no text."""
    parts = (getattr(recorder, name, None) for name in ("begin", "add", "told"))
    if recorder is not None and (isinstance(recorder, type) or not all(map(callable, parts))):
        raise TypeError(f"recorder must be a Recorder, such as Recorder(5), got {recorder!r:.80}")


def check_new_tokens(most: Any) -> int:
    """Return a number of new tokens as an int, 8.0 likewise. TypeError or ValueError for what is none."""
    require(Real, max_new_tokens=most)
    if not 1 <= most < math.inf or most != int(most):
        raise ValueError(f"max_new_tokens must be at least 1, got {most}: whole tokens")
    return int(most)
