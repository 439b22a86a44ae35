"""Run a frozen target once over its own answers and keep its hidden states, so that no training step has to.

    python -m opt_tree.training.heads.features --target DIR --answers FILE_OR_FOLDER... --output DIR \\
        [--layers=-1,1,14,26]

`--answers` reads rows with "prompt" and "answer" (`.jsonl`, `.jsonl.xz`) and the documents of
`opt_tree.training.outputs` (`.npz`). The documents are shuffled, then written in parts of about
`--part-tokens`: one safetensors file each, whole or not there, so that a run that was stopped goes on where it was.

A part holds `tokens` and `features.LAYER` [tokens, hidden] (bf16; layer -1 is the last one behind the final norm, the
others are outputs of that layer), document i being rows `starts[i]:starts[i + 1]`, its answer from `answers[i]` on.
"""

import sys
from pathlib import Path

from opt_tree.system.command_line import whole_numbers
from opt_tree.training.command_line import TrainingParser, command, existing, model_path
from opt_tree.training.plans import Cut


def new_parser() -> TrainingParser:
    parser = TrainingParser("Keep a target's hidden states of its own answers on disk.")
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--answers", type=existing, nargs="+", required=True, help=".jsonl, .jsonl.xz, .npz, folders")
    parser.add_argument("--output", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--layers", type=whole_numbers, default="-1", help="hidden states to keep (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=Cut.prompt, help="kept of a prompt (%(default)s)")
    parser.add_argument("--part-tokens", type=int, default=60_000, help="tokens a file (%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens a forward (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser


main = command(new_parser, "opt_tree.training.heads.features:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.models.text_states import check_layers_are_there, text_states
from opt_tree.system.files import whole
from opt_tree.training.answers import Example, read_examples
from opt_tree.training.files import working_dtype

COUNTS = "counts.npy"
"""How often each token stands in the answers of all parts: what a draft vocabulary is chosen by."""


class FeatureFile(NamedTuple):
    """One file of documents with their hidden states; the tensors are memory maps of it."""

    tokens: Int[Tensor, " tokens"]
    starts: Int[Tensor, " documents+1"]
    answers: Int[Tensor, " documents"]
    features: dict[int, Float[Tensor, "tokens hidden"]]


def split_parts(examples: Sequence[Example], part_tokens: int, seed: int) -> list[list[Example]]:
    """Shuffle, then cut into parts of about `part_tokens`; within a part the documents stand by length."""
    order = np.random.default_rng(seed).permutation(len(examples))
    ends = np.cumsum([len(examples[index].tokens) for index in order]) // part_tokens
    parts = (order[ends == part] for part in np.unique(ends))
    return [sorted((examples[index] for index in part), key=lambda one: len(one.tokens)) for part in parts]


def save_counts(examples: Iterable[Example], vocab: int, folder: Path) -> None:
    answers = np.concatenate([np.array(example.tokens[example.answer :]) for example in examples])
    with whole(folder / COUNTS) as partial, partial.open("wb") as file:
        np.save(file, np.bincount(answers, minlength=vocab))


def neighbours(lengths: Sequence[int], tokens: int) -> Iterator[tuple[int, int]]:
    """Yield first and last of the documents, which stand by length, that are padded to at most so many tokens."""
    first = 0
    for last in range(1, len(lengths) + 1):
        if last == len(lengths) or lengths[last] * (last + 1 - first) > tokens:
            yield first, last
            first = last


def run_part(
    target: PreTrainedModel,
    part: Sequence[Example],
    layers: Sequence[int],
    batch_tokens: int,
    done: Callable[[int], object],
) -> dict[str, Tensor]:
    """Return the tensors of one part: its documents in order, batched with their neighbours.

    `done` is told the tokens of each batch when its states are there.
    """
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for first, last in neighbours([len(example.tokens) for example in part], batch_tokens):
        group = [torch.tensor(example.tokens) for example in part[first:last]]
        rows = torch.nn.utils.rnn.pad_sequence(group, batch_first=True).to(target.device)
        for layer, states in text_states(target, rows, layers).items():
            states = states.to("cpu", torch.bfloat16)
            kept[layer] += [state[: len(own)] for state, own in zip(states, group, strict=True)]
        done(sum(map(len, group)))
    lengths = torch.tensor([0, *(len(example.tokens) for example in part)])
    return {
        "tokens": torch.tensor([token for example in part for token in example.tokens], dtype=torch.int32),
        "starts": lengths.cumsum(0),
        "answers": torch.tensor([example.answer for example in part]),
        **{f"features.{layer}": torch.cat(states) for layer, states in kept.items()},
    }


def load_part(path: Path) -> FeatureFile:
    """Map one part into memory; ValueError if it is something else."""
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        if not {"tokens", "starts", "answers"} <= names:
            raise ValueError(f"{path} is no part of `opt_tree.training.heads.features`")
        tensors = {name: file.get_tensor(name) for name in names}
    features = {int(name.partition(".")[2]): tensor for name, tensor in tensors.items() if name.startswith("features.")}
    return FeatureFile(tensors["tokens"], tensors["starts"], tensors["answers"], features)


def write(args: argparse.Namespace) -> None:
    """Write the parts that are not there yet."""
    tokenizer = load_tokenizer(str(args.target))
    target = load_weights(str(args.target), working_dtype()).eval()
    check_layers_are_there(target, args.layers)  # before anything is written
    examples = list(read_examples(args.answers, tokenizer, Cut(prompt=args.prompt_tokens)))
    if not examples:
        raise ValueError(f"no answers in {', '.join(map(str, args.answers))}")
    save_counts(examples, target.config.vocab_size, args.output)
    parts = split_parts(examples, args.part_tokens, args.seed)
    with tqdm(total=sum(len(e.tokens) for part in parts for e in part), unit="tok", unit_scale=True) as bar:
        for index, part in enumerate(parts):
            path = args.output / f"part-{index:04d}.safetensors"
            if path.exists():
                bar.update(sum(len(example.tokens) for example in part))
                continue
            with whole(path) as partial:
                save_file(run_part(target, part, args.layers, args.batch_tokens, bar.update), partial)
