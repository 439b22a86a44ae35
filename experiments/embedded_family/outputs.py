"""Write a model's own greedy answers to training prompts, as `opt_tree.training.outputs` does to questions.

    python -m experiments.embedded_family.outputs --target DIR --output DIR --prompts 6000 [--part 0/2]

Each part is one `.npz` file; parts are independent, so one process a core may write one each.
"""

import sys
from pathlib import Path

from experiments.embedded_family.plans import add_data, read_part
from opt_tree.training.command_line import TrainingParser, command, model_path


def new_parser() -> TrainingParser:
    parser = TrainingParser("Write a model's own greedy answers to training prompts of the corpora.")
    add_data(parser)
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--prompts", type=int, default=6000, help="prompts in all parts together")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--max-new-tokens", type=int, default=144, help="longest answer")
    parser.add_argument("--batch", type=int, default=64, help="prompts answered at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw of prompts")
    parser.add_argument("--part", type=read_part, default="0/1", help="which part of how many, from 0")
    return parser


main = command(new_parser, "experiments.embedded_family.outputs:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse

from experiments.embedded_family.data import draw_prompts, read_prompts
from opt_tree.models.checkpoints import load_tokenizer
from opt_tree.training.answers import TokenDocuments, join, load_part
from opt_tree.training.outputs import answer, load_target, save_documents


def load_documents(folder: Path) -> TokenDocuments:
    """Load all `.npz` parts of a folder, in the order of their names."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no own outputs (*.npz) in {folder}")
    return join(document for path in paths for document in load_part(path))


def write(args: argparse.Namespace) -> None:
    """Answer one part of the prompts and store the documents."""
    part, parts = args.part
    tokenizer = load_tokenizer(str(args.target))
    prompts = draw_prompts(tokenizer, read_prompts(args.data), args.prompts, seed=args.seed)
    documents = answer(load_target(args.target), tokenizer, prompts[part::parts], args.max_new_tokens, args.batch)
    save_documents(documents, args.output / f"seed-{args.seed}-part-{part}-of-{parts}.npz")
