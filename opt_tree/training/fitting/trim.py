"""Trim a drafter's output layer to the tokens that a target writes most (FR-Spec, arXiv:2502.14856).

    python -m opt_tree.training.fitting.trim --draft DIR --answers FILE_OR_FOLDER... --vocab 2048 --output DIR

Nothing is trained: the output folder is the draft model with a list of tokens, `draft_vocabulary.safetensors`, and
`--drafter lm:DIR` drafts these only. So does `eagle:DIR` of an EAGLE head, for which `--tokenizer` names its target:
heads have none. `--answers` are the target's own, as for `opt_tree.training.heads.features`. A
temperature stored beside the model is copied; `opt_tree.training.fitting.calibrate` fits it again.
"""

import sys
from pathlib import Path

from opt_tree.training.command_line import Parser, command, existing, model_path


def new_parser() -> Parser:
    parser = Parser("Trim the output layer of a draft model or head to frequent tokens.")
    parser.add_argument("--draft", type=model_path, required=True, help="draft model or head: folder or known name")
    parser.add_argument("--tokenizer", type=existing, help="folder of the tokenizer (default: the draft model's own)")
    parser.add_argument("--answers", type=existing, nargs="+", required=True, help=".jsonl, .jsonl.xz, .npz, folders")
    parser.add_argument("--vocab", type=int, default=2048, help="tokens that are kept (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the trimmed model")
    parser.set_defaults(replaces=True)
    return parser


main = command(new_parser, "opt_tree.training.fitting.trim:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import shutil
from collections.abc import Sequence

import numpy as np
from safetensors.torch import save_file

from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY, vocabulary_tensors
from opt_tree.models.checkpoints import load_config, load_tokenizer
from opt_tree.system.files import whole
from opt_tree.training.answers import read_examples
from opt_tree.training.heads.batches import most_frequent
from opt_tree.training.plans import Cut


def trim(draft: Path, answers: Sequence[Path], count: int, output: Path, tokenizer: Path | None = None) -> None:
    """Write the trimmed draft model, and say what share of the answers' tokens it can still draft.

    Raises ValueError for a draft model that is no folder, more tokens than it has, or no answers.
    """
    if output.resolve() == draft.resolve():
        raise ValueError(f"{output} is the draft model itself, which would be deleted: name another folder")
    vocab = load_config(str(draft)).get_text_config().vocab_size
    examples = read_examples(answers, load_tokenizer(str(tokenizer or draft)), Cut(shortest=1))
    counts = np.zeros(vocab, np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.answer :], minlength=vocab)[:vocab]
    if not counts.sum():
        raise ValueError(f"no answers in {', '.join(map(str, answers))}")
    kept = most_frequent(counts, count, "model")
    with whole(output) as partial:
        shutil.copytree(draft, partial)
        save_file(dict(vocabulary_tensors(kept, vocab)), partial / VOCABULARY)


def write(args: argparse.Namespace) -> None:
    trim(args.draft, args.answers, args.vocab, args.output, args.tokenizer)
