"""When a generation ends before its budget does: at stop tokens, or by any rule of that form."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Integral
from types import NoneType
from typing import Protocol

from opt_tree.errors import require


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
