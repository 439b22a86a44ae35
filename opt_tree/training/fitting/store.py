"""Build a store of what followed what, for `StoreDrafter`.

    python -m opt_tree.training.fitting.store --target DIR --answers FILE_OR_FOLDER... | --text FILE... --output DIR
        [--max-mib 64] [--order 5] [--beta 30,20,10,6,4]

`--answers` reads the target's own answers: the answer files of `evaluation` (`.jsonl`), rows of "prompt" and "answer"
(`.jsonl`, `.jsonl.xz`) or the documents of `opt_tree.training.outputs` (`.npz`: `tokens` and `starts`,
token ids of any width). Their prompts are left out: they cost more room than they are worth. `--text` reads plain text,
or `.jsonl` rows with a "text". The target's own answers are worth far more than other text of the same size.

A store is pruned to its size by what an entry is worth: c log(1 + c / (beta_k p_{k-1}(w))), the likelihood that the
text it was counted in loses without it (weighted difference pruning, Seymore and Rosenfeld, 1996).
"""

import sys
from pathlib import Path

from opt_tree.training.command_line import TrainingParser, command, existing, model_path


def new_parser() -> TrainingParser:
    parser = TrainingParser("Build a store of what followed what, for drafting without a model.")
    parser.add_argument("--target", type=model_path, required=True, help="model or tokenizer: whose tokens these are")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--answers", type=existing, nargs="+", help="the target's own answers: .jsonl, .npz, folders")
    source.add_argument("--text", type=existing, nargs="+", help='any text: .txt, or .jsonl with a "text" a row')
    parser.add_argument("--output", type=Path, required=True, help="folder of the store")
    parser.add_argument("--order", type=int, default=5, help="longest match, in tokens")
    parser.add_argument("--max-mib", type=float, default=64, help="size to prune to")
    parser.add_argument("--vocab", type=int, help="logits of the target, where it has more than its tokenizer tokens")
    parser.add_argument("--beta", help="what a shorter match is worth, by length: 30,20,10,6,4 (default: these)")
    return parser


main = command(new_parser, "opt_tree.training.fitting.store:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from opt_tree.errors import counted
from opt_tree.methods.drafters.tables.file_format import Table, fingerprint, save_table
from opt_tree.methods.drafters.tables.store import BETA, FILE, FOLLOWERS, extend_hashes
from opt_tree.models.checkpoints import load_tokenizer
from opt_tree.training.answers import TokenDocuments, join, read_answers, read_texts


@dataclass(frozen=True)
class Recipe:
    """How a store is made of documents."""

    vocab: int
    tokenizer: str | None = None
    """The tokenizer's fingerprint; None: unknown, and never checked."""
    order: int = 5
    """Length of the longest runs, in tokens."""
    max_bytes: int | None = None
    beta: tuple[float, ...] = BETA

    def __post_init__(self) -> None:
        if not 1 <= self.order <= len(self.beta):
            raise ValueError(f"the order must lie in 1..{len(self.beta)} (there are as many beta), got {self.order}")


class Entries(NamedTuple):
    """What followed runs of one length: one entry a run and follower, sorted by both."""

    runs: Int[np.ndarray, " entries"]
    tokens: Int[np.ndarray, " entries"]
    counts: Int[np.ndarray, " entries"]
    totals: Int[np.ndarray, " entries"]
    """Of the entry's run."""
    states: UInt[np.ndarray, " entries"]
    """Hashes of the entry's run."""
    values: Float[np.ndarray, " entries"]
    """What the entry is worth, in nats."""


def count(documents: TokenDocuments, recipe: Recipe) -> Iterator[Entries]:
    """Count the runs of 1, 2, ... `order` tokens, none of them across two documents."""
    tokens = documents.tokens.astype(np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < recipe.vocab:
        raise ValueError(f"token {tokens.max()} is outside the vocabulary of {recipe.vocab}")
    offsets = np.arange(len(tokens)) - np.repeat(documents.starts[:-1], np.diff(documents.starts))
    runs = np.zeros(len(tokens), np.int64)
    states = np.zeros(len(tokens), np.uint64)
    shorter = np.full(len(tokens), 1 / recipe.vocab)  # p_{k-1} of each token where it stands
    for length in range(1, recipe.order + 1):
        here = (offsets >= length).nonzero()[0]
        before = tokens[here - length]
        # Numbers of runs stay below the number of tokens, so that no product overflows, whatever the vocabulary.
        _, runs[here] = np.unique(runs[here] * recipe.vocab + before, return_inverse=True)
        states[here] = extend_hashes(states[here], before.astype(np.uint64))
        pairs, at, entry, counts = np.unique(
            runs[here] * recipe.vocab + tokens[here], return_index=True, return_inverse=True, return_counts=True
        )
        own, at = pairs // recipe.vocab, here[at]
        totals = np.bincount(runs[here])[own] if len(here) else counts
        rest = recipe.beta[length - 1] * shorter[at]
        yield Entries(own, tokens[at], counts, totals, states[at], counts * np.log1p(counts / np.maximum(rest, 1e-12)))
        shorter[here] = ((counts + rest) / (totals + recipe.beta[length - 1]))[entry]


def prune(entries: Entries, max_bytes: int | None) -> Entries:
    """Keep the entries of greatest value that fit; of every run the `FOLLOWERS` most frequent at most."""
    order = np.lexsort((-entries.counts, entries.runs))
    entries = Entries(*(array[order] for array in entries))
    rank = np.arange(len(order)) - np.searchsorted(entries.runs, entries.runs)
    entries = Entries(*(array[rank < FOLLOWERS] for array in entries))
    if max_bytes is None:
        return entries
    order = np.argsort(-entries.values, kind="stable")
    _, opening = np.unique(entries.runs[order], return_index=True)
    sizes = np.full(len(order), _size(entries.tokens) + _size(entries.counts))
    sizes[opening] += _key_bytes(entries) + 1 + _size(entries.totals)
    kept = np.sort(order[: np.searchsorted(sizes.cumsum(), max_bytes, side="right")])
    return Entries(*(array[kept] for array in entries))


def build(documents: TokenDocuments, recipe: Recipe) -> Table:
    """Return the store of documents; see `opt_tree.methods.drafters.tables.store` for its arrays."""
    lengths = list(count(documents, recipe))
    offsets = np.cumsum([0, *(each.runs.max(initial=-1) + 1 for each in lengths)])
    joined = Entries(*(np.concatenate(arrays) for arrays in zip(*lengths, strict=True)))
    shift = np.repeat(offsets[:-1], [len(each.runs) for each in lengths])
    # The header and the arrays' own descriptions take a little of the size that was asked for.
    entries = prune(joined._replace(runs=joined.runs + shift), recipe.max_bytes and max(recipe.max_bytes - 2048, 0))
    bits = 8 * _key_bytes(entries)
    states = entries.states >> np.uint64(64 - bits)
    # Sorted by key; two runs of one key (they are rare) would hide each other, so the more frequent one has it.
    order = np.lexsort((entries.runs, -entries.totals, states))
    entries, states = Entries(*(array[order] for array in entries)), states[order]
    kept = entries.runs == entries.runs[np.searchsorted(states, states)]
    entries = Entries(*(array[kept] for array in entries))
    keys, first = np.unique(states[kept], return_index=True)
    header = {
        "vocab": recipe.vocab,
        "tokenizer": recipe.tokenizer,
        "order": recipe.order,
        "bits": bits,
        "beta": list(recipe.beta[: recipe.order]),
        "text_tokens": len(documents.tokens),
        "documents": len(documents),
    }
    arrays = {
        "keys": keys.astype(f"<u{bits // 8}"),
        "sizes": _narrow(np.diff(first, append=len(entries.runs))),
        "totals": _narrow(entries.totals[first]),
        "tokens": _narrow(entries.tokens),
        "counts": _narrow(entries.counts),
    }
    return Table(header, arrays)


def _key_bytes(entries: Entries) -> int:
    """32 bits while a run that is not in the store is taken for one that is less than once in a thousand times."""
    return 4 if len(entries.runs) < 1 << 22 else 8


def _size(values: np.ndarray) -> int:
    return _narrow(values).itemsize


def _narrow(values: np.ndarray) -> np.ndarray:
    """The same numbers in the narrowest unsigned integers that hold them; safetensors' own take two bytes or more."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def parse_beta(text: str | None, order: int) -> tuple[float, ...]:
    """Read constants by length; ValueError unless there is one a length, all of them positive."""
    try:
        beta = BETA if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        beta = ()
    if text is not None and (len(beta) != order or not all(0 < number < math.inf for number in beta)):
        raise ValueError(f"--beta takes {order} positive numbers, one a length up to --order, got {text}")
    return beta


def write(args: argparse.Namespace) -> None:
    tokenizer, beta = load_tokenizer(str(args.target)), parse_beta(args.beta, args.order)
    size = int(args.max_mib * 2**20)
    recipe = Recipe(args.vocab or len(tokenizer), fingerprint(tokenizer), args.order, size, beta)
    documents = read_answers(args.answers, tokenizer) if args.answers else read_texts(args.text, tokenizer)
    table = build(join(documents), recipe)
    save_table(args.output / FILE, "store", table)
    print(
        f"{args.output / FILE}: {counted(len(table.arrays['keys']), 'run')}, {len(table.arrays['tokens'])} entries of "
        f"{counted(table.header['text_tokens'], 'token')} in {counted(table.header['documents'], 'document')}, "
        f"{table.nbytes / 2**20:.2f} MiB"
    )
