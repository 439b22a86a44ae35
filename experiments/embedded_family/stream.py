"""Token streams: documents tokenised once, mixed, laid end to end and cut into blocks.

Owns the cache of tokens on disk and the order of a stream; which documents are held out is `data.py`'s to say.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from experiments.embedded_family.data import HELD_OUT_PER_MILLE, Split, read_corpus, render
from experiments.embedded_family.plans import OWN
from opt_tree.system.files import whole
from opt_tree.training.answers import TokenDocuments, narrow

FORMAT = 1  # part of every cache key: raise it when the split or the rendering changes


def tokenize_corpus(
    tokenizer: PreTrainedTokenizerBase, folder: Path, name: str, split: Split, cache: Path
) -> TokenDocuments:
    """Tokenise one side of one corpus, or load it from `cache` if the corpus and the tokenizer are unchanged."""
    source = folder / f"{name}.jsonl.xz"
    path = cache / f"{name}-{split}-{_key(tokenizer, source.stat().st_size)}.npz"
    if not path.exists():
        texts = [render(document, tokenizer) for document in read_corpus(folder, name) if document.split == split]
        rows: list[list[int]] = []
        for start in tqdm(range(0, len(texts), 1000), desc=f"tokenise {name} {split}", unit="k rows"):
            rows += tokenizer(texts[start : start + 1000], add_special_tokens=False, verbose=False)["input_ids"]
        starts = np.cumsum([0, *(len(row) for row in rows)])
        tokens = narrow(np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(starts[-1])))
        with whole(path) as partial, partial.open("wb") as file:
            np.savez(file, tokens=tokens, starts=starts)
    with np.load(path) as arrays:
        return TokenDocuments(arrays["tokens"], arrays["starts"])


@dataclass(frozen=True)
class Mixture:
    """How a stream is put together.

    `epochs` gives the passes over each corpus (fractions take part of it; a corpus not named is left out). `slope` in
    [0, 1] moves prose to the front and chat to the end: 0 mixes evenly, 1 leaves no prose in the last tokens.
    """

    epochs: dict[str, float]
    slope: float = 0.0
    seed: int = 0


def build_stream(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    split: Split,
    mixture: Mixture,
    cache: Path,
    own: TokenDocuments | None = None,
) -> np.ndarray:
    """Return the token stream of a mixture; no token of a chosen document is lost.

    The corpus "own" stands for the documents passed as `own`; the others are tokenised once, into `cache`.
    """
    rng = np.random.default_rng(mixture.seed)
    pieces: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for name, epochs in sorted(mixture.epochs.items()):
        documents = own if own and name == OWN else tokenize_corpus(tokenizer, folder, name, split, cache)
        count = round(epochs * len(documents))
        chosen = np.concatenate([rng.permutation(len(documents)) for _ in range(int(epochs) + 1)])
        pieces += [documents[index] for index in chosen[:count]]
        places.append(_places(rng.random(count), mixture.slope * (-1 if name.startswith("text_") else 1)))
    if not pieces:
        raise ValueError(_nothing(folder, split, [name for name in mixture.epochs if name != OWN]))
    return np.concatenate([pieces[index] for index in np.argsort(np.concatenate(places), kind="stable")])


def _nothing(folder: Path, split: Split, names: list[str]) -> str:
    """Say how many documents there are of these corpora, and why none of them is on this side."""
    sides = [document.split for name in names for document in read_corpus(folder, name)]
    return (
        f"there are no {split} documents in what was asked for of {', '.join(names)}: {sides.count(split)} of its "
        f"{len(sides)} are {split}. A hash of a text, or of a conversation's first turn, says which are held out, "
        f"{HELD_OUT_PER_MILLE} in 1000: give some hundreds that differ"
    )


def _places(uniform: np.ndarray, slope: float) -> np.ndarray:
    """Map uniform draws to draws of density `1 + slope * (2 x - 1)` on [0, 1] (its distribution function inverted)."""
    if slope == 0:
        return uniform
    return (-(1 - slope) + np.sqrt((1 - slope) ** 2 + 4 * slope * uniform)) / (2 * slope)


def _key(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """Return a cache key that changes with the tokenizer, its chat template, the format and the corpus's size."""
    parts = (FORMAT, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, size)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Blocks(Dataset[dict[str, Tensor]]):
    """A stream cut into blocks of `length` tokens; the last block overlaps its neighbour instead of dropping a tail.

    A block is read as equal rows. `rows` lists (share of the blocks, row length): a run may train on short rows first
    and on the full length at the end without changing the tokens of a batch. The shares must sum to 1.
    `tokens` other than 0 keeps only so many.
    """

    def __init__(
        self, stream: np.ndarray, length: int, rows: Sequence[tuple[float, int]] = (), tokens: int = 0
    ) -> None:
        rows = tuple(rows) or ((1.0, length),)
        stream = stream[: tokens or None]
        if len(stream) < length:
            raise ValueError(f"a stream of {len(stream)} tokens holds no block of {length}")
        if any(length % row for _, row in rows) or abs(sum(share for share, _ in rows) - 1) > 1e-6:
            raise ValueError(f"rows {rows}: lengths must divide the block length {length}, shares must sum to 1")
        self.stream, self.length = stream, length
        self.row_lengths = [row for _, row in rows]
        self.row_ends = np.cumsum([share for share, _ in rows])[:-1] * len(self)

    def __len__(self) -> int:
        return (len(self.stream) + self.length - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = min(index * self.length, len(self.stream) - self.length)
        block = torch.from_numpy(self.stream[start : start + self.length].astype(np.int64))
        row = self.row_lengths[int(np.searchsorted(self.row_ends, index, side="right"))]
        return {"input_ids": block.view(-1, row)}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Shaped[Tensor, "rows length"]]:
    """Stack the rows of several blocks; a batch across the change of row length is cut to the shorter rows."""
    length = min(item["input_ids"].shape[1] for item in items)
    batch = {name: torch.cat([item[name].view(-1, length) for item in items]) for name in items[0]}
    return {"labels": batch["input_ids"], **batch}
