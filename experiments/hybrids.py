"""Milliseconds to score a tree with a hybrid of gated delta nets: as one forward, and path by path.

    python -m experiments.hybrids [--hidden 1024] [--layers 12] [--context 200] [--rows 1,6,13,25,61]

A Qwen3-Next of random weights, three layers in four gated delta nets. The same random trees are scored both ways by
turns, in process time; the logits are compared, too.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import at_least, main_of, option


@dataclass(frozen=True)
class Options:
    """The sizes; a seed fixes the model and the trees."""

    hidden: int = option(1024, "size of the hidden state, a multiple of 128")
    layers: int = option(12, "of which every fourth is full attention")
    vocabulary: int = option(8192, "tokens that the model tells apart")
    context: int = option(200, "tokens before the tree")
    rows: str = option("1,6,13,25,61", "sizes of the trees, their root included")
    repeats: int = option(9, "times that each tree is scored each way")
    dtype: str = option("float32", "float32 or bfloat16")
    threads: int = option(1, "CPU threads")
    seed: int = option(0, "of the model and the trees")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        at_least(self, hidden=128, layers=4, vocabulary=64, context=1, repeats=1, threads=1)
        if self.hidden % 128:
            raise ValueError(f"--hidden must be a multiple of 128, got {self.hidden}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype must be float32 or bfloat16, got {self.dtype}")
        if not all(size.isdigit() and int(size) > 0 for size in self.rows.split(",")):
            raise ValueError(f"--rows takes sizes like 1,6,13, got {self.rows}")


main = main_of("experiments.hybrids", Options, __doc__, "experiments.hybrids:run")
if __name__ == "__main__":
    sys.exit(main())

import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from evaluation.command_line import table
from evaluation.timing import environment
from opt_tree import CausalLM, ChainLM, Tree


def model(options: Options) -> Qwen3NextForCausalLM:
    """Return the model, its heads of 64 as in larger ones."""
    heads = options.hidden // 64
    config = Qwen3NextConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=list(range(options.layers)),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        return Qwen3NextForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def random_tree(rows: int, options: Options) -> Tree:
    """Return a tree whose rows hang below random earlier ones."""
    random = np.random.default_rng(options.seed)
    parents = np.array([-1, *(random.integers(0, row) for row in range(1, rows))])
    return Tree(random.integers(0, options.vocabulary, rows), parents, np.zeros(rows), np.full(rows, -1))


def run(options: Options) -> dict[str, Any]:
    """Print the table; return its rows."""
    torch.set_num_threads(options.threads)
    built = model(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers names faster kernels, which are for GPUs
        whole, paths = CausalLM(built), ChainLM(built)
    whole.pack(False)  # the paths' forwards take the weights as they are
    context = [(7 * place + 3) % options.vocabulary for place in range(options.context)]
    for lm in (whole, paths):
        lm.append(context)
    rows = []
    for size in tqdm([int(size) for size in options.rows.split(",")], desc="sizes", leave=False, disable=None):
        tree = random_tree(size, options)
        taken: dict[str, list[float]] = {"one forward": [], "path by path": []}
        logits = {}
        for _ in range(options.repeats):
            for way, lm in zip(taken, (whole, paths), strict=True):
                begin = time.process_time()
                logits[way] = lm.score(tree).logits
                taken[way].append(1000 * (time.process_time() - begin))
                if size == 1:  # a root alone is always kept
                    lm.commit([0])
        one, other = (statistics.median(times) for times in taken.values())
        off = float((logits["one forward"] - logits["path by path"]).abs().max() / logits["path by path"].abs().max())
        leaves = len(np.setdiff1d(np.arange(size), tree.parents))
        rows.append(
            {"rows": size, "paths": leaves, "one forward, ms": round(one, 1), "path by path, ms": round(other, 1)}
        )
        rows[-1] |= {"times": round(other / one, 2), "logits off by": f"{off:.0e}"}
    place = environment(torch.device("cpu"))
    size_of = sum(weight.numel() for weight in built.parameters()) / 1e6
    print(f"{size_of:.0f} M parameters, {options.dtype}, behind {options.context} tokens; {place['device']}")
    print(table(rows))
    return {"rows": rows, "environment": place}
