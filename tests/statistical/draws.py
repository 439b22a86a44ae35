"""Whether the tokens that each verifier emits have the target's distribution: draws from real models, tested.

    python -m tests.statistical.draws   # the embedded pair, 20,000 draws each
    python -m tests.statistical.draws --drafter eagle:demo --verifiers block,traversal --output draws.json

Draw i is the first two tokens of the generation with seed `--seed` + i. The loop, trees, verifiers and randomness are
the library's; only the models are memoised (`memoised`). The target's own probabilities of the two tokens come from
plain causal forwards, and a chi-square test compares. Two pairs that are wrong on purpose are drawn from as well, to
show that the test would have noticed.

Exit status 1 if a lossless verifier's p-value is below 0.001 / (number of lossless verifiers), or a wrong pair's is
not. Divided (Bonferroni), because many tests are many chances of bad luck: where all verifiers are exact, at most one
choice of `--seed` in 1000 fails, however the tests depend on each other (they share their seeds). A seed keeps its
verdict.
"""

import dataclasses
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from evaluation.command_line import option, parse, print_json, run_command, table
from evaluation.run.models import load
from evaluation.run.options import Models
from opt_tree import CausalLM, Decoder, Drafter, OptTree, Random, Sampling, Static, Tree, TreePolicy
from opt_tree import verifiers as judges
from opt_tree.core.children import IID, Layer, Picked, TopK
from opt_tree.core.probabilities import probs_of
from opt_tree.decoding.generation import check_prompt
from opt_tree.policies import DySpec, Rheo, Sampled
from tests.statistical.chi_square import cells, fit
from tests.statistical.memoised import MemoisedDrafter, MemoisedTarget, Text

PROMPT = "Explain the `tar` command on Linux with examples."
"""One behind which the embedded drafters have none, one, two and three tokens accepted."""
LEVEL = 0.001
"""How often a run in which every verifier is exact may say otherwise."""


class BestAsDrawn(IID):
    """The most probable tokens passed off as independent draws, which `verifiers.check` cannot see."""

    def pick(self, layer: Layer, random: Random) -> Picked:
        """See `Children.pick`."""
        assert isinstance(self.per_node, int)
        picked = TopK(self.per_node).pick(layer, random)
        return picked._replace(reach=layer.above[picked.rows])


@dataclass(frozen=True)
class Case:
    """A verifier on a tree, two layers deep or more; `lossless`: whether the tree's children are of its kind."""

    verifier: judges.Verifier
    policy: TreePolicy
    lossless: bool = True


CASES: dict[str, Case] = {
    "match": Case(judges.match, OptTree(nodes=8, threshold=0.0, max_depth=3)),
    "naive": Case(judges.naive, Sampled.kary(2, 2)),
    "k_seq": Case(judges.k_seq, Sampled.chains(3, 2)),
    "multi_round": Case(judges.multi_round, Sampled.kary(2, 2)),
    "khisti": Case(judges.khisti, Sampled.kary(2, 2)),
    "without_replacement": Case(judges.without_replacement, DySpec(nodes=8, max_depth=3)),
    "traversal": Case(judges.traversal, Sampled.chains(2, 3)),
    "block": Case(judges.block, Sampled.chain(3)),
    "rheo": Case(judges.rheo, Rheo(nodes=8, threshold=0.0, max_depth=3)),
    "typical": Case(judges.typical, OptTree(nodes=8, threshold=0.0, max_depth=3), lossless=False),
    "mismatched": Case(judges.multi_round, Static(Static.kary(2, 2).paths, BestAsDrawn), lossless=False),
}
DEEPEST = max(case.policy.max_depth for case in CASES.values())


@dataclass(frozen=True)
class Draws:
    """How often each text of two tokens was emitted, and how many drafted tokens the first steps accepted."""

    texts: Counter[Text]
    accepted: Counter[int]


def draw(
    case: Case, target: CausalLM, drafter: Drafter, prompt: list[int], sampling: Sampling, seeds: range, name: str = ""
) -> Draws:
    """Begin a generation for each seed, as `Decoder.generate` would, and stop it behind its second token."""
    decoder = Decoder(target, drafter, case.policy, case.verifier, lossy=not case.lossless)
    drawn = Draws(Counter(), Counter())
    for seed in tqdm(seeds, desc=name, unit="draw", leave=False, disable=not name):
        tokens: list[int] = []
        for step in decoder.steps(prompt, None, sampling, Random(seed)):
            if not tokens:
                drawn.accepted[step.accepted] += 1
            tokens += step.tokens
            if len(tokens) > 1:
                break
        drawn.texts[tokens[0], tokens[1]] += 1
    return drawn


def target_probs(target: CausalLM, prompt: list[int], sampling: Sampling) -> dict[Text, float]:
    """Return the probabilities of two tokens behind the prompt, from plain forwards: no tree, no cache, no loop."""

    @torch.inference_mode()
    def after(text: Text) -> dict[int, float]:
        context = [*prompt, *text]
        logits = target.model(torch.tensor([context], device=target.device), use_cache=False).logits[0, -1:]
        alone = Tree(np.array(context[-1:]), np.array([-1]), np.zeros(1), np.zeros(1, dtype=np.int64))
        probs = probs_of(sampling.process(logits, alone, context))[0].tolist()
        return {token: prob for token, prob in enumerate(probs) if prob > 0}

    first = tqdm(after(()).items(), desc="the target's probabilities", unit="token", leave=False)
    return {(one, two): p * q for one, p in first for two, q in after((one,)).items()}


@dataclass(frozen=True)
class Options(Models):
    """What is drawn from, and how often."""

    prompt: str = option(PROMPT, "a user's message; its answer's tokens are drawn")
    draws: int = option(20_000, "generations a verifier")
    temperature: float = option(1.0, "above 0")
    top_k: int = option(8, "0 for all tokens: many texts, few draws of each")
    top_p: float = option(1.0, "nucleus")
    verifiers: str = option(",".join(CASES), "comma list; by default all, the wrong ones too")
    seed: int = option(0, "the first draw's; the next ones' follow")
    dtype: str = option("float32", "of the target; half precision rounds a row in a tree and alone differently")
    output: str | None = option(None, "a JSON file of all results, written anew after every verifier")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := sorted(set(self.verifiers.split(",")) - set(CASES)):
            raise ValueError(f"unknown verifiers {', '.join(unknown)}; there are {', '.join(CASES)}")
        if self.draws < 1 or self.sampling.greedy:
            raise ValueError(
                f"--draws must be at least 1 and --temperature above 0, got {self.draws} and {self.temperature:g}"
            )
        if self.output and not Path(self.output).parent.is_dir():
            raise FileNotFoundError(f"no folder {Path(self.output).parent} for --output {self.output}")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)


def run(options: Options) -> dict[str, Any]:
    """Draw from every verifier asked for; print a table, write the file, and return what it holds."""
    sampling, names = options.sampling, options.verifiers.split(",")
    pair = load(options, options.check_device())
    prompt = check_prompt(pair.encode(options.prompt), pair.target)
    if len(prompt) + 2 > pair.target.max_context:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for two in {pair.target.max_context}")
    expected = target_probs(pair.target, prompt, sampling)
    cells(expected, options.draws)  # before minutes of drawing, not after
    target = MemoisedTarget(pair.target)
    drafter = MemoisedDrafter(pair.drafter.at_temperature(sampling.temperature), pair.target)
    level = LEVEL / max(sum(CASES[name].lossless for name in names), 1)
    results: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        **{"target": options.base_model_path, "drafter": options.drafter, "prompt": options.prompt},
        "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        **{"draws": options.draws, "seed": options.seed, "texts": len(expected), "level": level},
        "machine": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        "results": results,
    }
    seeds = range(options.seed, options.seed + options.draws)
    for name in names:
        begin = time.perf_counter()
        drawn = draw(CASES[name], target, drafter, prompt, sampling, seeds, name)
        results.append(judged(name, drawn, expected, level) | {"seconds": time.perf_counter() - begin})
        if options.output:  # minutes of drawing are on disk before the next ones begin
            Path(options.output).write_text(json.dumps(document) + "\n")
    print(f"\n{options.draws} draws of two tokens out of {len(expected)} texts; refuted by p < {level:.1e}\n")
    print(table([row(result) for result in results]))
    return document


def judged(name: str, drawn: Draws, expected: dict[Text, float], level: float) -> dict[str, Any]:
    """What draws say of a case; `ok`: as was expected of it."""
    case, found = CASES[name], fit(drawn.texts, expected)
    return {
        **{"verifier": name, "tree": type(case.policy).__name__, "depth": case.policy.max_depth},
        **{"children": repr(case.policy.children), "lossless": case.lossless},
        **dataclasses.asdict(found),
        **{"accepted": dict(sorted(drawn.accepted.items())), "ok": (found.p_value >= level) == case.lossless},
    }


def row(result: dict[str, Any]) -> dict[str, float | int | str]:
    """A result for people."""
    total = sum(result["accepted"].values())
    verdict = {(True, True): "agrees", (True, False): "BIASED", (False, True): "refuted", (False, False): "MISSED"}
    return (
        {"verifier": result["verifier"], "tree": f"{result['tree']}, depth {result['depth']}"}
        | {"children": result["children"]}
        | {f"accepted {n}": f"{result['accepted'].get(n, 0) / total:.3f}" for n in range(DEEPEST + 1)}
        | {"chi-square": f"{result['statistic']:.1f}", "cells": result["cells"], "p": f"{result['p_value']:.2g}"}
        | {"verdict": verdict[result["lossless"], result["ok"]], "seconds": f"{result['seconds']:.0f}"}
    )


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every case is as it should be, 1 if one is not, 2 for bad input."""

    def command() -> int:
        options = parse(Options, "python -m tests.statistical.draws", __doc__, arguments)
        found = run(options)
        print_json(options.json, found)
        return 0 if all(result["ok"] for result in found["results"]) else 1

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
