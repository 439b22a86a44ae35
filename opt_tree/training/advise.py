"""Is a drafter worth it on this machine, and with which tree?

    opt-tree advise demo
    opt-tree advise MODEL --drafter DIR --prompts FILE... --compile --plots DIR --costs FILE

Prints how often drafted tokens are accepted, what steps cost, the best tree with its expected speed-up, and one
sentence: use it, with these settings, or do not. `opt_tree.advise` is the function; docs/advise.md the page.
"""

import sys
from pathlib import Path

from opt_tree.errors import counted
from opt_tree.training.command_line import TrainingParser, command, existing


def new_parser() -> TrainingParser:
    parser = TrainingParser("Is a drafter worth it on this machine, and with which tree?")
    parser.add_argument("model", nargs="?", default="demo", help="folder, .gguf, Hub id or known name (%(default)s)")
    parser.add_argument("--drafter", help="folder or spec; by default what belongs to the model")
    parser.add_argument("--prompts", type=existing, nargs="+", help="the kind of text you ask for: .jsonl, or .txt")
    parser.add_argument("--limit", type=int, default=24, help="prompts at most (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each text (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="no text is begun after so many (%(default)s)")
    parser.add_argument("--side-by-side", type=int, default=8, help="also for so many sequences at once; 1: do not")
    parser.add_argument("--costs", type=existing, nargs="+", help="other machines' costs, .json")
    parser.add_argument("--compile", action="store_true", help="with compiled forwards, as you would use them")
    parser.add_argument("--dtype", default="auto", help="of the target, as `load_pair` takes it")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--plots", type=Path, help="folder for two pictures (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, too")
    return parser


main = command(new_parser, "opt_tree.training.advise:run")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import json

import torch

from opt_tree.system.files import check_writable
from opt_tree.tools.advising import advise
from opt_tree.tools.cost_files import read_costs
from opt_tree.tools.display.advice import draw_advice
from opt_tree.tools.pair import load_pair
from opt_tree.training.prompts import default_prompts, read_prompts


def run(args: argparse.Namespace) -> None:
    """Load, ask, print."""
    if args.plots:
        check_writable(args.plots, folder=True)
    asked = read_prompts(args.prompts) if args.prompts else default_prompts(heldout=True)
    pair = load_pair(str(args.model), args.drafter, dtype=args.dtype, compile=args.compile)
    others = {name: costs for path in args.costs or () for name, costs in read_costs(path).items()}
    found = advise(pair, asked[: args.limit], args.max_new_tokens, args.seconds, args.side_by_side, others)
    forwards = "compiled" if args.compile else "eager"
    print(f"{forwards} forwards, {counted(torch.get_num_threads(), 'thread')}", found, sep="\n")
    if args.plots:
        print(*(f"written: {path}" for path in draw_advice(found, args.plots)), sep="\n")
    if args.json:
        print(json.dumps(found.to_dict()))
