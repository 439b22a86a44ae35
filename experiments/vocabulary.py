"""Milliseconds a step outside the forwards at a large vocabulary: what sampling costs there, verifier by verifier.

    python -m experiments.vocabulary [--vocabulary 128000] [--nodes 60] [--spread 6]

Models of random weights: the forwards are small and do not matter, the laws have the spread that is asked for (a
language model's own logits have some 3 to 6; 1 is nearly flat, the worst case). Each verifier judges trees of its own
kind: the most probable children for `match`, parallel chains for `traversal`, distinct draws for `without_replacement`.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import at_least, main_of, option


@dataclass(frozen=True)
class Options:
    """The sizes; a seed fixes the models and the draws."""

    vocabulary: int = option(128_000, "tokens that a model tells apart")
    nodes: int = option(60, "drafted nodes a step, about")
    temperature: float = option(1.0, "of the target")
    top_p: float = option(0.9, "of the target")
    spread: float = option(6.0, "standard deviation of the logits of a row")
    steps: int = option(10, "measured of each verifier, behind two that are not")
    threads: int = option(1, "CPU threads")
    seed: int = option(0, "of models and draws")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        at_least(self, vocabulary=64, nodes=4, steps=1, threads=1)
        if not 0 < self.spread <= 100:
            raise ValueError(f"--spread must lie in (0, 100], got {self.spread}")


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
from opt_tree.policies import DySpec, Sampled
from opt_tree.verifiers import traversal, without_replacement

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_COLD = 2
"""Steps that pay for cold memory."""


@torch.no_grad()
def models(vocabulary: int, spread: float, seed: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
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
        torch.manual_seed(seed)
        target = LlamaForCausalLM(config).eval()
        # Behind the last norm a row has length sqrt(hidden), so that the logits spread as wide as asked.
        target.lm_head.weight.normal_(std=spread / config.hidden_size**0.5)
        drafter = copy.deepcopy(target)
        drafter.lm_head.weight += 0.3 * torch.randn_like(drafter.lm_head.weight) * drafter.lm_head.weight.std()
    return target, drafter


def cases(nodes: int) -> list[tuple[Verifier, TreePolicy]]:
    """Verifiers with trees that they are meant for."""
    chains = max(1, nodes // 10)
    return [
        (match, OptTree(nodes, 0.0)),
        (traversal, Sampled.chains(chains, max(1, nodes // chains))),
        (without_replacement, DySpec(nodes)),
    ]


def measure(options: Options) -> list[dict[str, Value]]:
    """Decode with each verifier; a line each, medians over the steps."""
    sampling, rows = Sampling(options.temperature, options.top_p), []
    if sampling.greedy:
        raise ValueError("--temperature must be above 0: greedy decoding draws nothing")
    target, drafter = models(options.vocabulary, options.spread, options.seed)
    for verifier, policy in tqdm(cases(options.nodes), desc="verifiers", leave=False, disable=None):
        lm = CausalLM(target)
        decoder = Decoder(lm, CausalLMDrafter(CausalLM(drafter), lm.vocab), policy, verifier)
        decoding = decoder.steps(_PROMPT, None, sampling, Random(options.seed))
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
    torch.set_num_threads(options.threads)
    rows, place = measure(options), environment(torch.device("cpu"))
    laws = f"spread {options.spread:g}, temperature {options.temperature:g}, top-p {options.top_p:g}"
    print(f"{options.vocabulary} tokens, {laws}; {machine_of(place)}", table(rows), sep="\n")
    return {"environment": place, "rows": rows}
