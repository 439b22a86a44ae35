"""Write a target's own greedy answers to questions: the text on which a drafter has to agree with it.

    python -m opt_tree.training.outputs --target DIR --questions FILE... --output DIR [--minutes 20] [--tokens 100000]

Every batch is a `.npz` file of its own. Those that are there are not written again; the run ends after its minutes or
tokens.
"""

import sys
from pathlib import Path

from opt_tree.training.command_line import TrainingParser, command, existing, model_path


def new_parser() -> TrainingParser:
    parser = TrainingParser("Write a target's own greedy answers to questions.")
    parser.add_argument("--target", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--questions", type=existing, nargs="+", required=True, help=".jsonl, or a line each")
    parser.add_argument("--output", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--minutes", type=float, help="begin no batch after so many")
    parser.add_argument("--tokens", type=int, help="begin no batch after so many tokens")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--max-new-tokens", "--new-tokens", type=int, default=144, help="longest answer")
    parser.add_argument("--batch", type=int, default=64, help="prompts answered at once")
    return parser


main = command(new_parser, "opt_tree.training.outputs:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import math
import time

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opt_tree.errors import counted
from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.system.files import whole
from opt_tree.tools.pair import encode, stop_tokens
from opt_tree.training.answers import load_part, narrow
from opt_tree.training.files import working_dtype
from opt_tree.training.prompts import read_prompts


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], new_tokens: int, batch: int = 64
) -> list[list[int]]:
    """Return each prompt with its greedy answer as the tokens of one document, bos first, up to and with the eos token.

    Documents come back in the order of `prompts`. Prompts of like length share a batch, so little of it is padding.
    """
    rows = [list(encode(tokenizer, prompt)) for prompt in prompts]
    stops = stop_tokens(target, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(stops, default=0))  # behind the mask, whatever it is
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in tqdm(range(0, len(order), batch), desc="own outputs", unit="batch"):
        chosen = order[start : start + batch]
        asked = {"input_ids": [rows[index] for index in chosen]}
        padded = tokenizer.pad(asked, padding_side="left", return_tensors="pt")
        generated = target.generate(
            **padded.to(target.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=sorted(stops) or None,
            pad_token_id=tokenizer.pad_token_id,
        )
        for index, tokens in zip(chosen, generated[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            ends = [place for place, token in enumerate(tokens) if token in stops]
            rows[index] += tokens[: ends[0] + 1] if ends else tokens
    return rows


def save_documents(documents: list[list[int]], path: Path) -> None:
    """Write documents as one `.npz` file."""
    starts = np.cumsum([0, *map(len, documents)])
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, tokens=narrow([token for row in documents for token in row]), starts=starts)


def load_target(folder: Path) -> PreTrainedModel:
    """Load a model that answers, in `working_dtype`, on an accelerator where there is one."""
    target = load_weights(str(folder), working_dtype()).eval()
    return target.to("cuda" if torch.cuda.is_available() else "cpu")


def write(args: argparse.Namespace) -> None:
    """Answer batch after batch of the questions and store the documents of each."""
    tokenizer, prompts = load_tokenizer(str(args.target)), read_prompts(args.questions)
    target = load_target(args.target)
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
    print(f"{counted(tokens, 'token')} in {args.output}")
