"""Milliseconds a step outside the forwards at a large vocabulary: what sampling costs there, verifier by verifier.

    python -m experiments.vocabulary [--vocabulary 128000] [--steps 6]

Models of random weights: the forwards are small and do not matter, a row's logits have a standard deviation of 6 (a
language model's own have some 3 to 6). Each verifier judges trees of its own kind: the most probable children for
`match`, parallel chains for `traversal`, distinct draws for `without_replacement`.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import check_bounds, main_of, option


@dataclass(frozen=True)
class Options:
    """The sizes."""

    vocabulary: int = option(128_000, "tokens that a model tells apart", least=64)
    steps: int = option(10, "measured of each verifier, behind two that are not", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)


main = main_of("experiments.vocabulary", Options, __doc__, "experiments.vocabulary:run")

if __name__ == "__main__":
    sys.exit(main())

import copy
import itertools
import statistics
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.command_line import Value, machine_of, table
from evaluation.timing import environment
from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree, Random, Sampling, TreePolicy, Verifier, match
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.methods.verifiers.traversal_verification import traversal

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_COLD = 2
"""Steps that pay for cold memory."""
NODES, SPREAD, SAMPLING = 60, 6.0, Sampling(1.0, 0.9)


@torch.no_grad()
def models(vocabulary: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a target and a drafter, the target with some noise, whose logits have this spread; float32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = LlamaForCausalLM(config).eval()
        # Behind the last norm a row has length sqrt(hidden), so that the logits spread as wide as asked.
        target.lm_head.weight.normal_(std=SPREAD / config.hidden_size**0.5)
        drafter = copy.deepcopy(target)
        drafter.lm_head.weight += 0.3 * torch.randn_like(drafter.lm_head.weight) * drafter.lm_head.weight.std()
    return target, drafter


CASES: list[tuple[Verifier, TreePolicy]] = [
    (match, OptTree(NODES, 0.0)),
    (traversal, Sampled.chains(NODES // 10, 10)),
    (without_replacement, DySpec(NODES)),
]
"""Verifiers with trees that they are meant for."""


def measure(options: Options) -> list[dict[str, Value]]:
    """Decode with each verifier; a line each, medians over the steps."""
    rows: list[dict[str, Value]] = []
    target, drafter = models(options.vocabulary)
    for verifier, policy in tqdm(CASES, desc="verifiers", leave=False, disable=None):
        lm = CausalLM(target)
        decoder = Decoder(lm, CausalLMDrafter(CausalLM(drafter), lm.vocab), policy, verifier)
        decoding = decoder.steps(_PROMPT, None, SAMPLING, Random(0), stop=None)
        steps = list(itertools.islice(decoding, _COLD, _COLD + options.steps))
        times = [step.times for step in steps]
        growing = [t.draft - t.draft_forward for t in times]
        rows.append(
            {
                "verifier": verifier.__name__,
                "tree": type(policy).__name__,
                "nodes": statistics.mean(step.tree.nodes for step in steps),
                "tokens/step": statistics.mean(len(step.tokens) for step in steps),
                "outside the forwards ms": 1000 * statistics.median(t.other for t in times),
                "growing the tree ms": 1000 * statistics.median(growing),
                "forwards ms": 1000 * statistics.median(t.draft_forward + t.target_forward for t in times),
            }
        )
    return rows


def run(options: Options) -> dict[str, Any]:
    """Measure, print the table and return it."""
    torch.set_num_threads(1)
    rows, place = measure(options), environment(torch.device("cpu"))
    laws = f"spread {SPREAD:g}, temperature {SAMPLING.temperature:g}, top-p {SAMPLING.top_p:g}"
    print(f"{options.vocabulary} tokens, {laws}; {machine_of(place)}", table(rows), sep="\n")
    return {"environment": place, "rows": rows}
