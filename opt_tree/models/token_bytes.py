"""Which bytes each token of a tokenizer stands for, so that two vocabularies can be compared.

Owns the two spellings that vocabularies have: byte-level (GPT-2's: a character for each byte) and sentencepiece's ("▁"
for a space, "<0x0A>" for a byte). Strings alone would compare one vocabulary's spelling with another's.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from opt_tree.models.checkpoints import CheckpointError

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The bytes that byte-level spelling has a character for: all."""
_NUMBERS = {ord(letter): byte for letter, byte in _BYTES.items()}
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """What each id means: a piece of text, or a mark that no text has."""

    plain: dict[int, bytes]
    """The ids of text, with the bytes that they add to it."""
    marks: dict[int, str]
    """The special ids (beginning, end, turns), by name."""
    spare: frozenset[int]
    """Ids that stand for a byte of which the vocabulary may have a character as well."""


def token_bytes(tokenizer: PreTrainedTokenizerBase, name: str) -> TokenBytes:
    """Return the bytes of every token. Ids that the tokenizer has no name for are nobody's.

    `name`: the model, for messages. Raises CheckpointError for a tokenizer whose tokens are spelled in another way.
    """
    raw = getattr(tokenizer, "backend_tokenizer", None)
    if raw is None:
        raise CheckpointError(f"{name} has a {type(tokenizer).__name__}, which does not say the bytes of its tokens")
    added = tokenizer.added_tokens_decoder
    plain = {index: token.content.encode() for index, token in added.items() if not token.special}
    marks = {index: token.content for index, token in added.items() if token.special}
    own = {index: token for token, index in tokenizer.get_vocab().items() if index not in added}
    parts = _parts(raw.decoder) | _parts(raw.pre_tokenizer)
    known, spare = {*_BYTES}, set()
    if "ByteLevel" in parts:
        for index, token in own.items():
            if known.issuperset(token):
                plain[index] = token.translate(_NUMBERS).encode("latin-1")
    elif parts & {"ByteFallback", "Metaspace"} or getattr(raw.model, "byte_fallback", False):
        for index, token in own.items():
            if byte := _FALLBACK.fullmatch(token):
                spare.add(index)
                plain[index] = bytes([int(byte[1], 16)])
            else:
                plain[index] = token.replace("▁", " ").encode()
    else:
        kinds = ", ".join(sorted(parts)) or "no such part"
        raise CheckpointError(
            f"the tokenizer of {name} is neither byte-level nor sentencepiece's ({kinds}): nothing says the bytes of "
            "its tokens"
        )
    return TokenBytes(plain, marks, frozenset(spare))


def _parts(component: Any) -> set[str]:
    """The kinds of steps that a part of a tokenizer is made of."""
    if component is None:
        return set()
    content = json.loads(component.__getstate__())
    steps = [content, *content.get("decoders", ()), *content.get("pretokenizers", ())]
    return {step["type"] for step in steps}
