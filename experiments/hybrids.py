"""Milliseconds to score a tree with a hybrid: as one forward, and path by path.

    python -m experiments.hybrids [--layers mamba-2] [--dtype bfloat16] [--repeats 9]

A Qwen3-Next of random weights, three layers in four gated delta nets; or a Granite 4 hybrid, three in four Mamba-2. The
same random trees are scored both ways by turns, in process time; the logits are compared, too.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option


@dataclass(frozen=True)
class Options:
    """The model and its arithmetic."""

    layers: str = option("delta nets", "with a state", choices=("delta nets", "mamba-2"))
    dtype: str = option("float32", "of the weights", choices=("float32", "bfloat16"))
    repeats: int = option(3, "times that each tree is scored each way; the medians are shown", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")


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
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from evaluation.command_line import table
from evaluation.timing import environment
from opt_tree import CausalLM, ChainLM, Tree

HIDDEN, LAYERS, VOCABULARY = 1024, 12, 8192
"""Every fourth layer is full attention."""
CONTEXT = 200
"""Tokens before the tree."""
ROWS = (1, 6, 13, 25, 61)
"""Sizes of the trees, their root included."""


def model(layers: str, dtype: str) -> PreTrainedModel:
    """Return the model, its heads of 64 as in larger ones."""
    heads = HIDDEN // 64
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if layers == "mamba-2":
            kinds = ["linear_attention"] * 3 + ["full_attention"]
            state = {"mamba_n_heads": 2 * heads, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
            granite = GraniteMoeHybridConfig(
                **sizes,
                **state,
                num_local_experts=0,
                shared_intermediate_size=3 * HIDDEN,
                layer_types=kinds * (LAYERS // 4),
            )
            built: PreTrainedModel = GraniteMoeHybridForCausalLM(granite)
        else:
            qwen = Qwen3NextConfig(
                **sizes,
                intermediate_size=3 * HIDDEN,
                head_dim=64,
                linear_num_key_heads=heads // 2,
                linear_num_value_heads=heads,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
                mlp_only_layers=list(range(LAYERS)),
            )
            built = Qwen3NextForCausalLM(qwen)
    return built.to(getattr(torch, dtype)).eval()


def random_tree(rows: int) -> Tree:
    """Return a tree whose rows hang below random earlier ones."""
    random = np.random.default_rng(0)
    parents = np.array([-1, *(random.integers(0, row) for row in range(1, rows))])
    return Tree(random.integers(0, VOCABULARY, rows), parents, np.zeros(rows), np.full(rows, -1))


def run(options: Options) -> dict[str, Any]:
    """Print the table; return its rows."""
    torch.set_num_threads(1)
    built = model(options.layers, options.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers names faster kernels, which are for GPUs
        whole, paths = CausalLM(built), ChainLM(built)
    whole.pack(False)  # the paths' forwards take the weights as they are
    context = [(7 * place + 3) % VOCABULARY for place in range(CONTEXT)]
    for lm in (whole, paths):
        lm.append(context)
    rows = []
    for size in tqdm(ROWS, desc="sizes", leave=False, disable=None):
        tree = random_tree(size)
        taken: dict[str, list[float]] = {"one forward": [], "path by path": []}
        logits, run = {}, paths.work
        for _ in range(options.repeats):
            for way, lm in zip(taken, (whole, paths), strict=True):
                begin = time.process_time()
                logits[way] = lm.score(tree).logits
                taken[way].append(1000 * (time.process_time() - begin))
                if size == 1:  # a root alone is always kept
                    lm.commit([0])
        one, other = (statistics.median(times) for times in taken.values())
        off = float((logits["one forward"] - logits["path by path"]).abs().max() / logits["path by path"].abs().max())
        several = (paths.work - run).tokens / options.repeats
        leaves = len(np.setdiff1d(np.arange(size), tree.parents))
        rows.append(
            {"rows": size, "paths": leaves, "rows path by path": round(several)}
            | {"one forward, ms": round(one, 1), "path by path, ms": round(other, 1)}
        )
        rows[-1] |= {"times": round(other / one, 2), "logits off by": f"{off:.0e}"}
    place = environment(torch.device("cpu"))
    print(f"{whole.size}, behind {CONTEXT} tokens; {place['device']}")
    print(table(rows))
    return {"rows": rows, "environment": place}
