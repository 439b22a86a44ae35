"""Corpus rows, the held-out split, and prompts drawn from either side of it.

A corpus folder holds `chat_*.jsonl.xz` (`{"messages": [...]}`) and `text_*.jsonl.xz` (`{"text": ...}`). This module
owns what a document is and on which side of the split it lies; it knows nothing of token streams (`stream.py`).
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from experiments.embedded_family.plans import corpus_names

HELD_OUT_PER_MILLE = 15
Split = Literal["train", "heldout"]

# Chat corpora whose answers stand by themselves; the others quote long passages or lean on earlier turns.
PROMPT_CORPORA = (
    "chat_oasst_sampled",
    "chat_gpteacher",
    "chat_gsm8k_train",
    "chat_selfdialogue",
    "chat_wordnet",
    "chat_tldr_pages",
    "chat_creak",
    "chat_factbook",
)


@dataclass(frozen=True)
class Document:
    """One conversation (`messages`) or one piece of prose (`text`); exactly one of the two is set."""

    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None

    @property
    def split(self) -> Split:
        """Return the side of the split, a function of the first user turn (chat) or of the text (prose) alone.

        Several answers may share a prompt, so hashing anything more than the prompt would let a held-out prompt be
        trained on. Case, spaces and punctuation are ignored for the same reason.
        """
        key = self.messages[0]["content"] if self.messages else self.text or ""
        plain = "".join(filter(str.isalnum, key.lower()))
        digest = hashlib.blake2b(plain.encode(), digest_size=8).digest()
        return "heldout" if int.from_bytes(digest) % 1000 < HELD_OUT_PER_MILLE else "train"


def read_corpus(folder: Path, name: str) -> Iterator[Document]:
    """Yield the documents of one corpus in file order."""
    with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "messages" in row:
                yield Document(messages=tuple(row["messages"]))
            else:
                yield Document(text=row["text"])


def render(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the training text of a document, special tokens included; prose is opened by the bos token alone."""
    if document.messages:
        return str(tokenizer.apply_chat_template(list(document.messages), tokenize=False))
    return f"{tokenizer.bos_token}{document.text}"


def read_prompts(folder: Path) -> list[list[str]]:
    """Return the distinct first user turns of the training side, one sorted list per corpus.

    Of the corpora in `PROMPT_CORPORA`; of a folder without any of these, of every `chat_` corpus. Raises ValueError
    where there is none.
    """
    pools, names = [], corpus_names(folder)
    chats = [name for name in PROMPT_CORPORA if name in names] or [name for name in names if name.startswith("chat_")]
    for name in chats:
        documents = (document for document in read_corpus(folder, name) if document.split == "train")
        pools.append(sorted({document.messages[0]["content"] for document in documents if document.messages}))
    if not any(pools):
        raise ValueError(
            f"{folder} has no prompts to train on: they are the first turns of chat_*.jsonl.xz, a line a conversation "
            f'({{"messages": [{{"role": "user", "content": ...}}, ...]}}), of which {HELD_OUT_PER_MILLE} in 1000 are '
            f"held out; it has {', '.join(names)}"
        )
    return pools


def draw_prompts(
    tokenizer: PreTrainedTokenizerBase, pools: list[list[str]], count: int, max_tokens: int = 300, seed: int = 0
) -> list[str]:
    """Draw prompts shorter than `max_tokens` from each pool in turn, each once, until there are enough or no more."""
    rng = np.random.default_rng(seed)
    pools = [[pool[index] for index in rng.permutation(len(pool))] for pool in pools]
    chosen: list[str] = []
    while len(chosen) < count and any(pools):
        for pool in pools:
            while pool and len(chosen) < count:
                turn = pool.pop()
                if len(tokenizer(turn)["input_ids"]) < max_tokens:
                    chosen.append(turn)
                    break
    return chosen
