"""Stop rules: tokens, and strings that a toy tokenizer spells over the borders of tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from opt_tree import Stop

PIECES = ["a", "b", "ab", "ba", " ", "</", "s>", "é", "<end>", "xyz" * 9]


class Toy(PreTrainedTokenizerBase):
    """Token i is PIECES[i]; from 100 on, token 100 + b is the byte b. Remembers how much it was asked to decode."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        self.asked.append(len(token_ids))
        pieces = [bytes([token - 100]) if token >= 100 else PIECES[token].encode() for token in token_ids]
        pieces = [piece for piece in pieces if not (skip_special_tokens and piece == b"<end>")]
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text.replace(" .", ".") if options.get("clean_up_tokenization_spaces", True) else text


def stops_at(stop: Stop, tokens: list[int]) -> tuple[int, str] | None:
    """After how many tokens the rule ends the text, asked after each, and what it says."""
    for length in range(1, len(tokens) + 1):
        if (reason := stop(tokens[:length])) is not None:
            return length, reason
    return None


def test_any_of_the_stop_tokens_stops() -> None:
    stop = Stop(frozenset({7, 2}))
    assert stops_at(stop, [1, 3, 2, 7]) == (3, "stop_token")
    assert stops_at(stop, [7]) == (1, "stop_token")
    assert stops_at(stop, [1, 3, 4]) is None
    assert stops_at(Stop(), [1, 2, 3]) is None
    # It is asked after every token: an earlier stop token was let pass on purpose, or by another rule.
    assert stop([7, 1]) is None


@pytest.mark.parametrize(
    ("string", "tokens", "expected"),
    [
        ("ab", [0, 1], 2),  # a|b
        ("ab", [3, 1], 2),  # ba|b
        ("aa", [2, 1, 3], None),  # ab|b|ba
        ("aba", [2, 2], 2),  # ab|ab: ends inside the second token
        ("</s>", [0, 5, 6, 0], 3),
        ("b </s>", [2, 4, 5, 6], 4),
        ("é", [0, 195 + 100, 169 + 100], 3),  # one character, two byte tokens
        ("éé", [7, 295, 269], 3),
        ("<end>", [0, 8], 2),  # a special token's own text counts
        ("z", [9], 1),  # inside one long token
        ("x", [0, 1, 2, 3], None),
        (" ", [4], 1),
        (" .", [4, 100 + ord(".")], 2),  # no space is cleaned up
    ],
)
def test_strings_stop_as_soon_as_the_text_has_them(string: str, tokens: list[int], expected: int | None) -> None:
    stop = Stop(strings=(string,), tokenizer=Toy())
    assert stops_at(stop, tokens) == (None if expected is None else (expected, "stop_string"))


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60), st.text("ab é</s>", min_size=1, max_size=9))
def test_strings_stop_where_the_whole_text_first_has_them(tokens: list[int], string: str) -> None:
    """Only the tail is decoded, however long the text; it is always long enough."""
    toy = Toy()
    whole = ["".join(PIECES[token] for token in tokens[:length]) for length in range(1, len(tokens) + 1)]
    first = next((length for length, text in enumerate(whole, start=1) if string in text), None)
    expected = None if first is None else (first, "stop_string")
    assert stops_at(Stop(strings=(string,), tokenizer=toy), tokens) == expected
    assert max(toy.asked) <= 4 * len(string) + 4


def test_the_tail_is_long_enough_for_byte_tokens() -> None:
    """Four bytes a character, every byte a token of its own, behind a long text."""
    string = "𝄞𝄢𝄞𝄢𝄞"
    spelled = [100 + byte for byte in string.encode()]
    assert stops_at(Stop(strings=(string,), tokenizer=Toy()), [0] * 50 + spelled) == (50 + 20, "stop_string")


def test_several_strings_and_tokens() -> None:
    stop = Stop(frozenset({3}), ("bb", "</s>"), Toy())
    assert stops_at(stop, [1, 1, 3]) == (2, "stop_string")
    assert stops_at(stop, [1, 0, 3, 1, 1]) == (3, "stop_token")
    assert stops_at(stop, [0, 5, 6]) == (3, "stop_string")


def test_strings_need_a_tokenizer_and_a_character() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        Stop(strings=("a", ""), tokenizer=Toy())
    with pytest.raises(ValueError, match="stop strings need the tokenizer"):
        Stop(strings=("x",))
