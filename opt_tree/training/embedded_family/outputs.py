"""Write a target's own greedy answers to training prompts: the text on which a drafter has to agree with it.

    python -m opt_tree.training.embedded_family.outputs --target DIR --output DIR --prompts 6000 [--part 0/2]

Each part is one `.npz` file; parts are independent, so one process a core may write one each.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.training.command_line import Parser, model_path, read_part, run_command
from opt_tree.training.embedded_family.data import Draw, add_data, draw_prompts, read_prompts
from opt_tree.training.files import whole
from opt_tree.training.stream import TokenDocuments, load_part, narrow


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], new_tokens: int, batch: int = 64
) -> list[list[int]]:
    """Return each prompt with its greedy answer as the tokens of one document, bos first, up to and with the eos token.

    Documents come back in the order of `prompts`. Prompts of like length share a batch, so little of it is padding.
    """
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
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
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        for index, tokens in zip(chosen, generated[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            if tokenizer.eos_token_id in tokens:
                tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
            documents[index] = rows[index] + tokens
    return [documents[index] for index in range(len(rows))]


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


def new_parser() -> Parser:
    parser = Parser("Write a target's own greedy answers to training prompts.")
    add_data(parser)
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--prompts", type=int, default=6000, help="prompts in all parts together")
    parser.add_argument("--new-tokens", type=int, default=144, help="longest answer")
    parser.add_argument("--batch", type=int, default=64, help="prompts answered at once")
    parser.add_argument("--split", choices=("train", "heldout"), default="train", help="side of the corpus split")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw of prompts")
    parser.add_argument("--part", type=read_part, default="0/1", help="which part of how many, from 0")
    return parser


def write(args: argparse.Namespace) -> None:
    """Answer one part of the prompts and store it."""
    part, parts = args.part
    tokenizer = load_tokenizer(str(args.target))
    prompts = draw_prompts(tokenizer, read_prompts(args.data, args.split), Draw(args.prompts, seed=args.seed))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_weights(str(args.target), torch.bfloat16).to(device).eval()
    documents = answer(target, tokenizer, prompts[part::parts], args.new_tokens, args.batch)
    save_documents(documents, args.output / f"seed-{args.seed}-part-{part}-of-{parts}.npz")


if __name__ == "__main__":
    run_command(new_parser(), write)
