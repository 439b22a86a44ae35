"""The stop rule that people write: stop tokens and stop strings."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from opt_tree.errors import require
from opt_tree.request import StopTokens


@dataclass(frozen=True)
class Stop(StopTokens):
    """Stop after any of `tokens`, or as soon as the text contains any of `strings` (these need the tokenizer).

    Without `tokens`, the end tokens of the target that generates are meant (`Target.ends`); `tokens=()` is none.
    """

    strings: tuple[str, ...] | str = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(Collection, strings=self.strings)
        if isinstance(self.strings, str):
            object.__setattr__(self, "strings", (self.strings,))
        for string in self.strings:
            require(str, string=string)
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings need the tokenizer")
        if "" in self.strings:
            raise ValueError("an empty stop string stops everything")

    def __call__(self, generated: list[int]) -> str | None:
        if (reason := super().__call__(generated)) is not None or not self.strings:
            return reason
        assert self.tokenizer is not None
        # A character takes at most four byte tokens: the tail is long enough for any string that ends here.
        tail = generated[-(4 * max(map(len, self.strings)) + 4) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return "stop_string" if any(string in text for string in self.strings) else None
