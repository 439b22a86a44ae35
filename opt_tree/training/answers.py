"""A target's own answers, and other texts, as they lie on disk: read as tokens, document by document.

Owns where an answer begins: rows of prompt and answer, documents of both, and answer files of `evaluation`.
"""

import json
import lzma
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from opt_tree.errors import one_line
from opt_tree.tools.chat_template import render
from opt_tree.tools.pair import encode
from opt_tree.training.plans import Cut

_KINDS = ("*.npz", "*.jsonl", "*.jsonl.xz")


@dataclass(frozen=True)
class TokenDocuments:
    """Documents laid end to end: document i is `tokens[starts[i]:starts[i + 1]]`."""

    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int | np.integer) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))


def load_part(file: Path) -> TokenDocuments:
    """Load the documents of one `.npz` file; ValueError for what is none."""
    try:
        with np.load(file) as part:
            return TokenDocuments(part["tokens"], part["starts"])
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} holds no documents: {one_line(error)}") from error


def narrow(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return tokens in 16 bits each where they fit, as in most vocabularies, else in 32."""
    wide = np.asarray(tokens, np.uint32)
    return wide.astype(np.uint16) if wide.max(initial=0) < 1 << 16 else wide


class Example(NamedTuple):
    """One document as tokens, and where its answer begins."""

    tokens: list[int]
    answer: int


def read_examples(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, cut: Cut) -> Iterator[Example]:
    """Yield the documents of files and folders; ValueError for a file of an unknown kind or a row without an answer."""
    for file in files_of(paths):
        for prompt, answer in documents(file, tokenizer) if file.suffix == ".npz" else _rows(file, tokenizer):
            if len(answer) >= cut.shortest:
                prompt = prompt[-cut.prompt :]
                yield Example(prompt + answer[: cut.answer], len(prompt))


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files, and those in folders; ValueError for a folder without any."""
    for path in paths:
        found = sorted(file for kind in _KINDS for file in path.glob(kind)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"no answers ({', '.join(_KINDS)}) in {path}")
        yield from found


def documents(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the documents of a `.npz` file as prompt and answer, which begins behind the template's last opening."""
    opened = opening(tokenizer)
    for document in load_part(file):
        tokens, first = document.tolist(), 0
        if 0 < len(opened) < len(document):
            found = (np.lib.stride_tricks.sliding_window_view(document[:-1], len(opened)) == opened).all(1).nonzero()[0]
            first = int(found[-1]) + len(opened) if len(found) else 0
        yield tokens[:first], tokens[first:]


def _rows(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    for number, row in enumerate(lines(file), 1):
        if not {"prompt", "answer"} <= row.keys():
            raise ValueError(f'{file}:{number} has no "prompt" and "answer"')
        yield encode(tokenizer, row["prompt"]), answer_of(row, tokenizer)


def answer_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a row's "answer", with the stop token where it is "finished"."""
    answer = list(tokenizer(row["answer"], add_special_tokens=False, verbose=False)["input_ids"])
    return answer + ([tokenizer.eos_token_id] if row.get("finished") and tokenizer.eos_token_id is not None else [])


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.jsonl` or `.jsonl.xz` file; ValueError for any other."""
    read = 0
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield dict(json.loads(line))
                read += 1
    except (ValueError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is no JSONL, line {read + 1}: {one_line(error)}") from error


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens with which the chat template opens an answer; [] where there is none or no opening."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    message = [{"role": "user", "content": "x"}]
    closed, opened = (
        list(tokenizer(render(tokenizer, message, opens), add_special_tokens=False).input_ids)
        for opens in (False, True)
    )
    return [int(token) for token in opened[len(closed) :]] if opened[: len(closed)] == closed else []


def read_answers(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield the answers in answer files and in folders of them, as token ids, each behind the template's opening."""
    opened = opening(tokenizer)
    for file in files_of(paths):
        if file.suffix == ".npz":
            kept = (prompt[len(prompt) - len(opened) :] + answer for prompt, answer in documents(file, tokenizer))
            yield from (np.array(tokens, np.int64) for tokens in kept)
            continue
        for record in lines(file):
            if "answer" not in record and "choices" not in record:
                raise ValueError(f'{file} has a row with neither "answer" nor "choices"')
            turns = ({"answer": turn} for choice in record.get("choices", ()) for turn in choice["turns"])
            for row in [record] if "answer" in record else turns:
                yield np.array(opened + answer_of(row, tokenizer), np.int64)


def read_texts(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield text files as token ids, one document a file, or one a row of a `.jsonl` with a "text"."""
    for path in paths:
        rows = list(lines(path)) if path.suffix == ".jsonl" else [{"text": path.read_text(encoding="utf-8")}]
        if not all("text" in row for row in rows):
            raise ValueError(f'{path} has a row without "text"')
        for row in rows:
            yield np.array(tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def join(documents: Iterable[np.ndarray]) -> TokenDocuments:
    """Lay documents end to end; ValueError if there is not a token in them."""
    rows = list(documents)
    starts = np.cumsum([0, *map(len, rows)])
    if not starts[-1]:
        raise ValueError("there is no text to build a store of")
    return TokenDocuments(np.concatenate(rows), starts)
