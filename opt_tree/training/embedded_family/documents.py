"""What a store is built of: the target's answers or any text, as token ids, document by document."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from opt_tree.training.answers import answer_of, documents, files_of, lines, opening
from opt_tree.training.stream import TokenDocuments


def read_answers(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield the answers in answer files and in folders of them, as token ids, each behind the template's opening."""
    opened = opening(tokenizer)
    for file in files_of(paths):
        if file.suffix == ".npz":
            kept = (prompt[len(prompt) - len(opened) :] + answer for prompt, answer in documents(file, tokenizer))
            yield from (np.array(tokens, np.int64) for tokens in kept)
            continue
        for record in lines(file):
            if "answer" in record:
                yield np.array(opened + answer_of(record, tokenizer), np.int64)
                continue
            if "choices" not in record:
                raise ValueError(f'{file} has a row with neither "answer" nor "choices"')
            turns = (turn for choice in record["choices"] for turn in choice["turns"])
            yield from (np.concatenate([np.array(opened, np.int64), ids]) for ids in _encode(tokenizer, turns))


def read_texts(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield text files as token ids, one document a file, or one a row of a `.jsonl` with a "text"."""
    for path in paths:
        rows = list(lines(path)) if path.suffix == ".jsonl" else [{"text": path.read_text(encoding="utf-8")}]
        if not all("text" in row for row in rows):
            raise ValueError(f'{path} has a row without "text"')
        yield from _encode(tokenizer, (row["text"] for row in rows))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[np.ndarray]:
    for text in texts:
        yield np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


def join(documents: Iterable[np.ndarray]) -> TokenDocuments:
    """Lay documents end to end; ValueError if there is not a token in them."""
    rows = list(documents)
    starts = np.cumsum([0, *map(len, rows)])
    if not starts[-1]:
        raise ValueError("there is no text to build a store of")
    return TokenDocuments(np.concatenate(rows), starts)
