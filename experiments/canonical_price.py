"""What canonical arithmetic costs: the same decoding with and without it, in turn, plainly and by trees.

    python -m experiments.canonical_price --base-model-path smollm2 [--compile] [--contexts 100,1000,4000]

Prompts are the questions' texts one after the other, cut to each context, each prompt from another question on. The two
take turns step by step. Times are medians, that of the first step has the prefill; tokens a second are over whole
texts. Without it a tree's text may leave plain decoding's, and tokens a step differ with it, so that a step's time is
the figure of the price.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option, whole_numbers
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """The pair, and the contexts."""

    dtype: str = option("bfloat16", "of the target: bfloat16 or float32")
    contexts: str = option("100,1000,4000", "comma list: tokens of the prompts; those that the models do not hold drop")
    prompts: int = option(3, "of each context", least=1)
    max_new_tokens: int = option(48, "behind each prompt", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(whole_numbers(self.contexts)) < 1:
            raise ValueError(f"--contexts must be at least 1 each, got {self.contexts}")


main = main_of("experiments.canonical_price", Options, __doc__, "experiments.canonical_price:run")

if __name__ == "__main__":
    sys.exit(main())

import statistics
import time
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from evaluation.command_line import Value, table
from evaluation.run.models import Material, gather, load
from evaluation.timing import environment, schedule
from opt_tree import Decoder, OptTree, Pair
from opt_tree.methods.drafters.around import described
from opt_tree.tools.presets import plain

NODES, THRESHOLD = (5, 12, 60), 0.2
"""Of the trees, beside plain decoding."""
WAYS = ("today", "canonical")
RATIOS = ("first ms", "step ms", "tokens/s")


class Run(NamedTuple):
    """A text, and the seconds of each of its steps; the first one has the prefill."""

    tokens: list[int]
    seconds: list[float]


def prompts_of(given: Material, length: int, number: int) -> list[list[int]]:
    """Prompts of one length: the questions one after the other, each prompt from another one on."""
    asked = given.first_prompts()
    turns = [[*asked[first:], *asked[:first]] for first in (7 * place % len(asked) for place in range(number))]
    return [(list(chain(*turn)) * (1 + length // sum(map(len, turn))))[:length] for turn in turns]


def in_lockstep(decoders: dict[str, Decoder], prompt: list[int], limit: int) -> dict[str, Run]:
    """Decode by each, a step of one after a step of the other, so that a busy machine hurts them alike."""
    runs = {way: Run([], []) for way in decoders}
    going = {way: decoder.steps(prompt, limit, stop=None) for way, decoder in decoders.items()}
    for way, _ in schedule(WAYS, range(limit + 1)):  # a step has a token at least; one more ends the generators
        begin = time.perf_counter()
        if (step := next(going[way], None)) is not None:
            runs[way].seconds.append(time.perf_counter() - begin)
            runs[way].tokens.extend(step.tokens)
    return {way: run._replace(tokens=run.tokens[:limit]) for way, run in runs.items()}


def measured(pairs: dict[str, Pair], nodes: int, prompts: list[list[int]], options: Options) -> dict[str, list[Run]]:
    """Decode all prompts by trees of so many nodes, plainly for 0; the first one once more, which does not count."""

    def decoder(pair: Pair) -> Decoder:
        return Decoder(pair.target, pair.drafter, OptTree(nodes, THRESHOLD)) if nodes else plain(pair.target)

    decoders = {way: decoder(pair) for way, pair in pairs.items()}
    in_lockstep(decoders, prompts[0][:100], 8)
    runs = [in_lockstep(decoders, prompt, options.max_new_tokens) for prompt in prompts]
    return {way: [run[way] for run in runs] for way in decoders}


def figures(runs: list[Run], plainly: list[Run]) -> dict[str, Value]:
    """What the runs of one way come to; `plainly`: those of plain decoding in the same way."""
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(sum(run.seconds) for run in runs)
    same = sum(run.tokens == one.tokens for run, one in zip(runs, plainly, strict=True))
    return {
        "first ms": 1000 * statistics.median(run.seconds[0] for run in runs),
        "step ms": 1000 * statistics.median(chain(*(run.seconds[1:] for run in runs))),
        "tokens/s": tokens / seconds,
        "tokens/step": tokens / sum(len(run.seconds) for run in runs),
        "as plain": f"{same} of {len(runs)}",
    }


def row_of(found: dict[str, dict[str, Value]]) -> dict[str, Value]:
    """Canonical beside today, and their ratios."""
    row: dict[str, Value] = {}
    for name in found["today"]:
        values = [found[way][name] for way in WAYS]
        row |= {f"{name}, {way}": value for way, value in zip(WAYS, values, strict=True)}
        if name in RATIOS:
            row[f"{name}, canonical / today"] = values[1] / values[0]  # type: ignore[operator]
    return row


def run(options: Options) -> dict[str, Any]:
    """Measure, print the table and return it."""
    device = options.check_device()
    given = gather(replace(options, canonical=True))
    pairs = dict(zip(WAYS, (load(replace(options, no_exact=True), device), given.pair), strict=True))
    target = given.pair.target
    print(f"{target.name}, {target.backend.name}; {described(given.pair.drafter)}")
    rows = []
    for context in whole_numbers(options.contexts):
        if context + options.max_new_tokens + max(NODES) > target.max_context:
            print(f"{context} tokens: {target.name} holds {target.max_context}", file=sys.stderr)
            continue
        prompts = prompts_of(given, context, options.prompts)
        runs = {nodes: measured(pairs, nodes, prompts, options) for nodes in (0, *NODES)}
        found: list[dict[str, Value]] = []
        for nodes, by_way in runs.items():
            sides = {way: figures(by_way[way], runs[0][way]) for way in WAYS}
            found.append({"context": context, "nodes": nodes or "plain", **row_of(sides)})
        print(table(found), flush=True)
        rows += found
    return {"environment": environment(target.device), "engine": target.backend.name, "rows": rows}
