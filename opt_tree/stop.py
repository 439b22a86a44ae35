"""When a generation ends before its budget does: stop tokens, stop strings, or any rule of that form."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Integral
from types import NoneType
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from opt_tree.errors import require


@runtime_checkable
class StopRule(Protocol):
    """Asked after every single emitted token, so that a generation ends inside an accepted path if need be."""

    def __call__(self, generated: list[int]) -> str | None:
        """Return why to stop after the last token of `generated` (new tokens only), or None to go on."""
        ...


def ends_of(rule: StopRule | None) -> frozenset[int]:
    """The tokens that a rule is known to stop at, by its `tokens`; nothing has to be drafted below these."""
    return frozenset(getattr(rule, "tokens", None) or ())


def rule_for(rule: StopRule | None, ends: frozenset[int]) -> StopRule | None:
    """Return the rule for a target whose answers end at `ends`: a `Stop` that names no tokens gets these.

    Raises TypeError for what is no rule.
    """
    if rule is not None and not callable(rule):
        raise TypeError(f"stop must be a rule, such as Stop(strings=..., tokenizer=...), got {rule!r}")
    return replace(rule, tokens=ends) if isinstance(rule, Stop) and rule.tokens is None else rule


@dataclass(frozen=True)
class Stop:
    """Stop after any of `tokens`, or as soon as the text contains any of `strings` (these need the tokenizer).

    Without `tokens`, the end tokens of the target that generates are meant (`Target.ends`); `tokens=()` is none.
    """

    tokens: Collection[int] | None = None
    strings: tuple[str, ...] | str = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        require((Collection, NoneType), tokens=self.tokens)
        require(Collection, strings=self.strings)
        if self.tokens is not None:
            for token in self.tokens:
                require(Integral, token=token)
            object.__setattr__(self, "tokens", frozenset(int(token) for token in self.tokens))
        if isinstance(self.strings, str):
            object.__setattr__(self, "strings", (self.strings,))
        for string in self.strings:
            require(str, string=string)
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings need the tokenizer")
        if "" in self.strings:
            raise ValueError("an empty stop string stops everything")

    def __call__(self, generated: list[int]) -> str | None:
        if self.tokens is not None and generated[-1] in self.tokens:
            return "stop_token"
        if self.strings:
            assert self.tokenizer is not None
            # A character takes at most four byte tokens: the tail is long enough for any string that ends here.
            tail = generated[-(4 * max(map(len, self.strings)) + 4) :]
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(string in text for string in self.strings):
                return "stop_string"
        return None
