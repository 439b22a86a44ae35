"""A target's own answers as they lie on disk, read as tokens: rows of prompt and answer, and documents of both.

Owns where an answer begins. Answer files of `evaluation` are read by `opt_tree.training.fitting.store`, which needs no
prompts.
"""

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from opt_tree.core.errors import one_line
from opt_tree.training.plans import Cut
from opt_tree.training.stream import load_part

_KINDS = ("*.npz", "*.jsonl", "*.jsonl.xz")


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
        yield question(row["prompt"], tokenizer), answer_of(row, tokenizer)


def question(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a prompt's tokens: by the chat template, or the bare text where there is none, as `Pair.encode` does."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


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
        list(tokenizer.apply_chat_template(message, add_generation_prompt=opens, return_dict=False))
        for opens in (False, True)
    )
    return [int(token) for token in opened[len(closed) :]] if opened[: len(closed)] == closed else []
