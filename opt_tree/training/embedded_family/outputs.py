"""Write a target's own greedy answers to training prompts: the text on which a drafter has to agree with it.

    python -m opt_tree.training.embedded_family.outputs --target DIR --output DIR --prompts 6000 [--part 0/2]
    python -m opt_tree.training.embedded_family.outputs --target DIR --output DIR --questions FILE --minutes 20

Each part is one `.npz` file; parts are independent, so one process a core may write one each. With `--questions` every
batch is a file, those that are there are not written again, and the run ends after its minutes or tokens.
"""

import os
import sys
from pathlib import Path

from opt_tree.training.command_line import Parser, command, existing, model_path, read_part
from opt_tree.training.plans import VARIABLE, add_data


def new_parser() -> Parser:
    parser = Parser("Write a target's own greedy answers to training prompts.")
    add_data(parser)
    parser.set_defaults(data=os.environ.get(VARIABLE))  # None is no mistake here: --questions need no corpora
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--prompts", type=int, default=6000, help="prompts in all parts together")
    parser.add_argument("--questions", type=existing, nargs="+", help="answer these instead: .jsonl, or a line each")
    parser.add_argument("--minutes", type=float, help="with --questions: begin no batch after so many")
    parser.add_argument("--tokens", type=int, help="with --questions: begin no batch after so many tokens")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--max-new-tokens", "--new-tokens", type=int, default=144, help="longest answer")
    parser.add_argument("--batch", type=int, default=64, help="prompts answered at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw of prompts")
    parser.add_argument("--part", type=read_part, default="0/1", help="which part of how many, from 0")
    return parser


main = command(new_parser, "opt_tree.training.embedded_family.outputs:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import math
import time

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opt_tree.core.files import whole
from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.training.answers import question
from opt_tree.training.embedded_family.data import draw_prompts, read_prompts
from opt_tree.training.prompts import read_prompts as read_questions
from opt_tree.training.stream import TokenDocuments, load_part, narrow


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], new_tokens: int, batch: int = 64
) -> list[list[int]]:
    """Return each prompt with its greedy answer as the tokens of one document, bos first, up to and with the eos token.

    Documents come back in the order of `prompts`. Prompts of like length share a batch, so little of it is padding.
    """
    rows = [question(prompt, tokenizer) for prompt in prompts]
    stops = stop_tokens(target, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(stops, default=0))  # behind the mask, whatever it is
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    documents: dict[int, list[int]] = {}
    for start in tqdm(range(0, len(order), batch), desc="own outputs", unit="batch"):
        chosen = order[start : start + batch]
        padded = tokenizer.pad(
            {"input_ids": [rows[index] for index in chosen]}, padding_side="left", return_tensors="pt"
        )
        generated = target.generate(
            **padded.to(target.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=sorted(stops) or None,
            pad_token_id=tokenizer.pad_token_id,
        )
        for index, tokens in zip(chosen, generated[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            ends = [place for place, token in enumerate(tokens) if token in stops]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            documents[index] = rows[index] + tokens
    return [documents[index] for index in range(len(rows))]


def stop_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer, as model and tokenizer name them."""
    named = getattr(target.generation_config, "eos_token_id", None)
    found = set(named if isinstance(named, list) else [] if named is None else [named])
    return found | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def save_documents(documents: list[list[int]], path: Path) -> None:
    """Write documents as one `.npz` file."""
    starts = np.cumsum([0, *map(len, documents)])
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, tokens=narrow([token for row in documents for token in row]), starts=starts)


def load_documents(folder: Path) -> TokenDocuments:
    """Load all `.npz` parts of a folder, in the order of their names."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"no own outputs (*.npz) in {folder}")
    tokens, starts, total = [], [np.zeros(1, np.int64)], 0
    for path in paths:
        part = load_part(path)
        tokens.append(part.tokens)
        starts.append(part.starts[1:] + total)
        total += len(tokens[-1])
    return TokenDocuments(np.concatenate(tokens), np.concatenate(starts))


def write(args: argparse.Namespace) -> None:
    """Answer one part of the prompts, or batch after batch of the questions, and store the documents."""
    if args.questions:
        _write_batches(args)
        return
    if not args.data:
        raise ValueError(f"name a folder of corpora with --data or ${VARIABLE}, or a file of --questions")
    part, parts = args.part
    tokenizer = load_tokenizer(str(args.target))
    prompts = draw_prompts(tokenizer, read_prompts(args.data), args.prompts, seed=args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_weights(str(args.target), torch.bfloat16).to(device).eval()
    documents = answer(target, tokenizer, prompts[part::parts], args.max_new_tokens, args.batch)
    save_documents(documents, args.output / f"seed-{args.seed}-part-{part}-of-{parts}.npz")


def _write_batches(args: argparse.Namespace) -> None:
    tokenizer, prompts = load_tokenizer(str(args.target)), read_questions(args.questions)
    target = load_weights(str(args.target), torch.bfloat16).eval()
    target = target.to("cuda" if torch.cuda.is_available() else "cpu")
    begin, tokens = time.monotonic(), 0
    for start in range(0, len(prompts), args.batch):
        path = args.output / f"questions-{start:06d}.npz"
        late = time.monotonic() - begin > 60 * (args.minutes or math.inf)
        if tokens >= (args.tokens or math.inf) or (late and tokens):
            break
        if not path.exists():
            batch = answer(target, tokenizer, prompts[start : start + args.batch], args.max_new_tokens, args.batch)
            save_documents(batch, path)
        tokens += len(load_part(path).tokens)
    print(f"{tokens} tokens in {args.output}")
