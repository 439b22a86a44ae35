"""EESD as a whole: an early exit drafts a chain, whose length is fixed, or drawn from its two posteriors.

    python -m experiments.early_exit [--bench-name demo] [--limit 40]

Each fixed length and each controller is walked along plain decoding's greedy texts, those that draw with several seeds
(`opt_tree/tools/along.py`): the steps that decoding with it takes. Times plain decoding count layers, as if a
forward's time were that of its layers whatever its rows: a chain of k tokens costs k (depth + 1) layers to draft, and
all layers of the target to score, whose lower ones run for the last token alone. Beside the exit's own depth, as if it
stood elsewhere.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is written, and what is walked along it."""

    drafter: str = option("exit:demo", "an early exit")
    max_new_tokens: int = option(64, "new tokens a question, at most", least=1)
    longest: int = option(8, "longest chain", least=1, most=10)
    seeds: int = option(8, "that each controller is walked with", least=1)


main = main_of("experiments.early_exit", Options, __doc__, "experiments.early_exit:run")
if __name__ == "__main__":
    sys.exit(main())

import statistics
from collections.abc import Sequence
from typing import Any

from evaluation.command_line import table
from evaluation.run.models import gather
from experiments.controllers import walk
from opt_tree import Generation, Static, TreePolicy
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.drafters.heads.early_exit import EarlyExit

PLACES = ((4, 12), (5, 80))
"""Layers below the exit, and of the target, to count by."""


def figures(generations: Sequence[Generation]) -> dict[str, float]:
    """Tokens and nodes a step, and how many times faster than plain decoding that is by layers.

    A step without a draft, at a text's end, costs the target's layers alone.
    """
    steps = [step for generation in generations for step in generation.steps]
    tokens, drafted = sum(len(step.tokens) for step in steps), sum(step.tree.nodes for step in steps)
    found = {"tokens/step": tokens / len(steps), "nodes/step": drafted / len(steps)}
    for depth, layers in PLACES:
        found[f"x plain, {depth}/{layers}"] = tokens * layers / (drafted * (depth + 1) + len(steps) * layers)
    return found


def run(options: Options) -> dict[str, Any]:
    """Print a line for each length and each controller; return them."""
    given = gather(options)
    pair = given.pair
    if not isinstance(pair.drafter.bare, EarlyExit):
        raise ValueError(f"--drafter {options.drafter} is no early exit")
    chains: dict[str, TreePolicy] = {f"of {n}": Static.chain(n) for n in range(1, options.longest + 1)}
    drawn: dict[str, dict[str, TreePolicy]] = {
        name: {f"{name}, seed {seed}": kind(options.longest, seed=seed) for seed in range(options.seeds)}
        for name, kind in (("Beta", BetaLength), ("calibrated", CalibratedLength))
    }
    settings = {name: policy for group in (chains, *drawn.values()) for name, policy in group.items()}
    prompts = given.first_prompts()
    made = walk(pair, prompts, options.max_new_tokens, settings)
    rows: list[dict[str, Any]] = [{"chain": name, **figures(made[name])} for name in chains]
    for name, seeds in drawn.items():
        each = [figures(made[one]) for one in seeds]
        row = {"chain": name, **{key: statistics.fmean(one[key] for one in each) for key in each[0]}}
        rows.append(
            row | {"from": min(one["tokens/step"] for one in each), "to": max(one["tokens/step"] for one in each)}
        )
    print(f"{options.drafter}, {len(prompts)} texts of {given.questions.name}, greedy; mean of {options.seeds} seeds")
    print(table(rows))
    return {"rows": rows, "drafter": options.drafter, "questions": given.questions.name, "texts": len(prompts)}
