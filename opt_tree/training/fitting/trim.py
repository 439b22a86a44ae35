"""Trim a drafter's output layer to the tokens that a target writes most (FR-Spec, arXiv:2502.14856).

    python -m opt_tree.training.fitting.trim --draft DIR --answers FILE_OR_FOLDER... --vocab 2048 --output DIR

Nothing is trained. Of a draft model the output folder has a list of tokens, `draft_vocabulary.safetensors`, and the
model's name: `--drafter trimmed:DIR` drafts these tokens only. Of an EAGLE head it has a copy with the list, for
`eagle:DIR`; `--tokenizer` names its target, as heads have none. `--answers` are the target's own or the draft model's,
as for `opt_tree.training.heads.features`. A temperature stored beside the model is copied;
`opt_tree.training.fitting.calibrate` fits it again.
"""

import sys
from pathlib import Path

from opt_tree.training.command_line import TrainingParser, command, existing


def new_parser() -> TrainingParser:
    parser = TrainingParser("Trim the output layer of a draft model or head to frequent tokens.")
    parser.add_argument("--draft", required=True, help="draft model or head: folder or known name")
    parser.add_argument("--tokenizer", type=existing, help="of a head: the folder of its target's tokenizer")
    parser.add_argument("--answers", type=existing, nargs="+", required=True, help=".jsonl, .jsonl.xz, .npz, folders")
    parser.add_argument("--vocab", type=int, default=2048, help="tokens that are kept (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the trimmed model")
    parser.set_defaults(replaces=True)
    return parser


main = command(new_parser, "opt_tree.training.fitting.trim:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import json
import os
import shutil
from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import save_file

from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY, vocabulary_tensors
from opt_tree.methods.drafters.registry import is_whole
from opt_tree.methods.drafters.small_models.loading import NOTE
from opt_tree.models.checkpoints import CALIBRATION, load_config, load_tokenizer
from opt_tree.models.known import KNOWN
from opt_tree.models.named import resolve
from opt_tree.system.files import whole
from opt_tree.training.answers import read_examples
from opt_tree.training.heads.batches import most_frequent
from opt_tree.training.plans import Cut


def trim(draft: str, answers: Sequence[Path], count: int, output: Path, tokenizer: Path | None = None) -> None:
    """Write what trims a draft model, or a trimmed head, and say what share of the answers' tokens it can still draft.

    `tokenizer`: of the target of a head; None: a model is trimmed. Raises ValueError for what is no folder, a model
    with a tokenizer beside it, more tokens than the model has, or no answers.
    """
    folder = Path(resolve(draft, "draft"))
    if not folder.is_dir():
        raise ValueError(f"{draft} is no folder and no known name")
    if tokenizer is not None and is_whole(str(folder)):
        raise ValueError(f"{draft} is a whole model with its own tokenizer: leave out --tokenizer, which is a head's")
    if output.resolve() == folder.resolve():
        raise ValueError(f"{output} is the draft model itself, which would be deleted: name another folder")
    vocab = load_config(str(folder)).get_text_config().vocab_size
    examples = read_examples(answers, load_tokenizer(str(tokenizer or folder)), Cut(shortest=1))
    counts = np.zeros(vocab, np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.answer :], minlength=vocab)[:vocab]
    if not counts.sum():
        raise ValueError(f"no answers in {', '.join(map(str, answers))}")
    kept = vocabulary_tensors(most_frequent(counts, count, "model"), vocab)
    with whole(output) as partial:
        if tokenizer is not None:
            shutil.copytree(folder, partial)
            save_file(dict(kept), partial / VOCABULARY)
            return
        partial.mkdir()
        save_file({"d2t": kept["d2t"].to(torch.int32)}, partial / VOCABULARY)
        named = draft if draft in ("demo", *KNOWN) else os.path.abspath(draft)
        (partial / NOTE).write_text(json.dumps({"model": named}) + "\n", encoding="utf-8")
        if (folder / CALIBRATION).is_file():
            shutil.copy(folder / CALIBRATION, partial)


def write(args: argparse.Namespace) -> None:
    trim(args.draft, args.answers, args.vocab, args.output, args.tokenizer)
