"""The text of an answer that grows: what of it is certain already, and where a stop string cuts it.

Knows nothing of requests.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Tokens as a reader sees them, without special ones."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerText:
    """The text of one answer, piece by piece. All pieces together are the text of all tokens, up to a stop string.

    Arguments:
        stops: the strings that the answer ends before.
        ends: the tokens that the answer ends at, which are no part of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], ends: Collection[int]) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._tokens: list[int] = []
        self.text = ""
        """What was given out."""

    def add(self, tokens: Sequence[int]) -> str:
        """Take in more tokens; return what of the text is certain now, whatever follows."""
        self._tokens += tokens
        # Half of a character is shown as U+FFFD: it may become another one.
        text = self._whole().rstrip("\ufffd")
        return self._given(text[: min((_begun(text, stop) for stop in self._stops), default=len(text))])

    def end(self, stopped: bool) -> str:
        """Return the rest; `stopped`: a stop string ended the answer."""
        text = self._whole()
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0] if stopped else []
        return self._given(text[: min(found, default=len(text))])

    def _whole(self) -> str:
        shown = self._tokens[:-1] if self._tokens and self._tokens[-1] in self._ends else self._tokens
        return decoded(self._tokenizer, shown)

    def _given(self, text: str) -> str:
        """Give out what is new of a text that goes on from what was given out."""
        new, self.text = text[len(self.text) :], max(self.text, text, key=len)
        return new


def _begun(text: str, stop: str) -> int:
    """Where the stop string is in the text, or its beginning at the end of it; else the text's length."""
    found = text.find(stop)
    if found >= 0:
        return found
    last = range(max(0, len(text) - len(stop) + 1), len(text))
    return next((place for place in last if stop.startswith(text[place:])), len(text))
