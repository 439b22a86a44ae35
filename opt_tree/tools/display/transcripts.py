"""The text of a generation with its two owners: accepted *draft* tokens and the *target's own* that ends each step.

Owns what a token looks like in a terminal: growing text, colours, one-line labels. Pure functions that return strings;
nothing here prints; standard output is only asked whether it takes colours.
"""

import itertools
import os
import sys
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, TextIO, runtime_checkable

from opt_tree.errors import require
from opt_tree.generation import Generation

# A model may emit escape sequences: control characters become visible signs, only tabs and new lines keep their sense.
# Those that turn the direction of what follows (U+202E) become signs, too: a line would not say what was emitted.
VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {127: 0x2421}
    | dict.fromkeys((*range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
)
_ANSI_DRAFTED, _ANSI_END = "\x1b[36m", "\x1b[0m"


@runtime_checkable
class Texts(Protocol):
    """What it takes to show tokens: any tokenizer of transformers."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any: ...


class Ids:
    """Shows tokens as their numbers, where no tokenizer is known."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        return "".join(f" #{token}" for token in token_ids)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        return None


class IncrementalText:
    """The text of a growing list of tokens; bytes of an unfinished character wait for the token that ends it."""

    def __init__(self, tokenizer: Texts) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Return what `token` adds to the text: special tokens add nothing, nor does an unfinished character."""
        self._held.append(token)
        text = self._grown()
        if text.endswith("\ufffd"):
            return ""
        # What was just completed is the context in which the next token's spaces are decoded. A special token alone
        # would be none: sentencepiece drops the space of a text's first word.
        self._before, self._held = self._held if text else self._before + self._held, []
        return text.translate(VISIBLE)

    def rest(self) -> str:
        """Return what is still held back, once no more tokens follow: a replacement sign for a broken character."""
        text, self._held = self._grown(), []
        return text.translate(VISIBLE)

    def _grown(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True)
class Piece:
    """Text of one owner within one step."""

    text: str
    drafted: bool
    """True for accepted draft tokens, False for the target's own."""
    step: int


def pieces(generation: Generation, tokenizer: Texts) -> list[Piece]:
    """Return the text of a generation in order, at most two pieces a step; a split character goes to its last token."""
    require(Generation, generation=generation)
    decoder, tokens, found = IncrementalText(tokenizer), iter(generation.tokens), []
    for index, (step, length) in enumerate(zip(generation.steps, generation.accept_lengths, strict=True)):
        # The last step may have been cut: then even its last token can be a drafted one.
        owned = [(place < step.accepted, decoder.add(next(tokens))) for place in range(length)]
        for drafted, group in itertools.groupby(owned, key=lambda pair: pair[0]):
            found.append(Piece("".join(text for _, text in group), drafted, index))
    if found:
        found[-1] = Piece(found[-1].text + decoder.rest(), found[-1].drafted, found[-1].step)
    return [piece for piece in found if piece.text]


def paint(text: str, drafted: bool, color: bool = True) -> str:
    """Mark accepted draft text: cyan, or without colour in square brackets. The target's own stays as it is."""
    if not drafted or not text:
        return text
    return f"{_ANSI_DRAFTED}{text}{_ANSI_END}" if color else f"[{text}]"


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def transcript(generation: Generation, tokenizer: Texts, color: bool | None = None) -> str:
    """Return the generated text, accepted draft tokens in colour or in brackets: `[ the quick] fox[ jumps] over`.

    `color` None: in colour where standard output is a terminal that takes colours, so no file gets escape codes.
    """
    require((bool, NoneType), color=color)
    color = wants_color(sys.stdout) if color is None else color
    return "".join(paint(piece.text, piece.drafted, color) for piece in pieces(generation, tokenizer))


def token_label(tokenizer: Texts, token: int) -> str:
    """Return a token's text on one line: a space shows as an open box, a part of a character as the token's number."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    raw = tokenizer.convert_ids_to_tokens(token)
    if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" "):
        text = " " + text  # sentencepiece drops the space of a first token
    if not text or "\ufffd" in text or raw is None:
        return f"#{token}"
    return text.translate(VISIBLE).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
