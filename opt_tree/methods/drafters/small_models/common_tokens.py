"""Two tokenizers beside each other: which ids stand for the same bytes, and a token of one in the ids of the other.

Owns how a text that the target writes is read by a draft model with another tokenizer: token by token. A token that
both have is the other's token; any other one is spelled by its bytes. What was read never changes as a text grows.
(To spell the whole text anew as it grows, as the other tokenizer would have it, drafts worse.)
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from opt_tree.methods.drafters.heads.layer_probe import TEXT
from opt_tree.models.token_bytes import TokenBytes, token_bytes

_RUNS = re.compile("[\\udc80-\\udcff]+|[^\\udc80-\\udcff]+")
"""What UTF-8 has no form for, and what it has: of bytes that were decoded with surrogates in place of the former."""


class CommonTokens:
    """Two tokenizers, and which ids of both stand for the same bytes or the same mark. Copies share what it holds.

    Of several draft ids with the same bytes one is taken, a piece of text before a spelled byte. Marks are paired by
    name, else by role (end, beginning, padding); never by bytes, since a text may spell a mark's name.

    Raises CheckpointError for a tokenizer whose tokens' bytes are not known.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
    ) -> None:
        self.target, self.drafter = token_bytes(target, target_name), token_bytes(drafter, drafter_name)
        self._ids: dict[bytes, int] = {}
        """The drafter's id of some bytes."""
        for index in sorted(self.drafter.plain, key=lambda index: (index in self.drafter.spare, index)):
            self._ids.setdefault(self.drafter.plain[index], index)
        self.pairs = {index: self._ids[text] for index, text in self.target.plain.items() if text in self._ids}
        """From the target's ids to the drafter's."""
        self.pairs |= _paired_marks(target, drafter, self.target, self.drafter)
        self._most = max(map(len, self._ids), default=0)
        self._raw = drafter.backend_tokenizer  # type: ignore[attr-defined]
        first = drafter("a").input_ids[:1]
        self.first = first if first == [drafter.bos_token_id] else []
        """What the drafter's texts begin with."""
        text = target(TEXT, add_special_tokens=False).input_ids
        self.share = sum(index in self.pairs for index in text) / max(len(text), 1)
        """Which part of a short text's tokens, as the target's tokenizer has them, is common."""
        self._read = {index: [other] for index, other in self.pairs.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommonTokens":
        return self

    def read(self, tokens: list[int]) -> list[int]:
        """Return the drafter's ids of some tokens of the target, at least one for each."""
        return [index for token in tokens for index in self._read.get(token) or self._spell(token)]

    def _spell(self, token: int) -> list[int]:
        """Return the ids of a token that the target alone has. What the drafter has no bytes for is read as id 0."""
        name = self.target.marks.get(token, "")
        return self._read.setdefault(token, self.spelled(self.target.plain.get(token, name.encode())) or [0])

    def spelled(self, data: bytes) -> list[int]:
        """Return the drafter's ids of some bytes, as its tokenizer has them. Joined, they are these bytes again.

        What UTF-8 has no form for is spelled by the longest tokens that fit. Bytes that no token has are left out.
        """
        runs = _RUNS.findall(data.decode("utf-8", "surrogateescape"))
        return [index for run in runs for index in self._of_run(run)]

    def _of_run(self, run: str) -> list[int]:
        data = run.encode("utf-8", "surrogateescape")
        if not "\udc80" <= run[0] <= "\udcff":
            # Sentencepiece puts a space in front of a text: behind a line break it is another token's, which goes.
            for before in ("", "\n"):
                found = self._behind(before, run, data)
                if found is not None:
                    return found
        return self._longest_first(data)

    def _behind(self, before: str, run: str, data: bytes) -> list[int] | None:
        """Return the last ids of `before` and a run whose bytes are the run's; None where no such ids are."""
        self._raw.encode_special_tokens = True  # a text that spells a mark's name is no mark
        ids = self._raw.encode(before + run, add_special_tokens=False).ids
        texts = [self.drafter.plain.get(index, b"") for index in ids]
        left, place = sum(map(len, texts)) - len(data), 0
        while left > 0:
            left -= len(texts[place])
            place += 1
        return ids[place:] if not left and b"".join(texts[place:]) == data else None

    def _longest_first(self, data: bytes) -> list[int]:
        """The longest token at each place: of a text that the tokenizer would change (NFC), and of half a character."""
        found, place = [], 0
        while place < len(data):
            sizes = range(min(self._most, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._ids), 0)
            if size:
                found.append(self._ids[data[place : place + size]])
            place += size or 1
        return found


def _paired_marks(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, ours: TokenBytes, theirs: TokenBytes
) -> dict[int, int]:
    """The pairs of special ids: of one name, and of the roles whose ids no name has paired."""
    ids = {name: index for index, name in theirs.marks.items()}
    pairs = {index: ids[name] for index, name in ours.marks.items() if name in ids}
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        own, other = getattr(target, role), getattr(drafter, role)
        if own in ours.marks and other in theirs.marks and own not in pairs and other not in pairs.values():
            pairs[own] = other
    return pairs
