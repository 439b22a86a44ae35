"""Which controller pays? Each is compared with the best fixed setting that it could have chosen, without a clock.

    python -m experiments.controllers --drafter eagle:demo --dtype float32 --bench-name heldout --limit 24

Counts are the decoding's own; seconds are modelled, by tables of costs (`Costs`, seconds), so that the figures do not
depend on the machine's load. A controller that reads the costs is decoded with once a table. One that draws is walked
along the texts with several seeds (`opt_tree/tools/along.py`), and decoded with once, for its texts.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import main_of, option
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is decoded, and the prices."""

    max_new_tokens: int = option(96, "new tokens a question, at most", least=1)
    costs: str | None = option(None, "JSON file of tables by name, each with the fields of Costs, in seconds")
    predictor: str | None = option(
        None, "folder of a predictor of draft lengths; by default the embedded one for eagle:demo"
    )
    seeds: int = option(8, "seeds that a controller which draws is walked with", least=1)


main = main_of("experiments.controllers", Options, __doc__, "experiments.controllers:run")

if __name__ == "__main__":
    sys.exit(main())

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from evaluation.command_line import table
from evaluation.run.models import gather
from opt_tree import CausalLM, Decoder, Generation, OptTree, Pair, Static, TreePolicy
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.controllers.predicted import LengthPredictor, PredictedLength
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.threshold_chain import ThresholdChain
from opt_tree.models.named import resolve
from opt_tree.tools.along import along
from opt_tree.tools.cost_files import read_costs
from opt_tree.tools.stored_text import written

COSTS = {
    "eager": Costs.straight(5.4e-3, 5.5e-3, 1e-4, 1.05e-3, 3e-5, 3e-4, 2e-4),
    "compiled": Costs.straight(1.9e-3, 2e-3, 7e-5, 5.5e-4, 2e-5, 4e-4, 3e-4),
    "344M": Costs.straight(60e-3, 60e-3, 1e-3, 1.05e-3, 2.5e-5, 3e-4, 2e-4),
    "344M, compiled": Costs.straight(28e-3, 28e-3, 6e-4, 5.5e-4, 1.5e-5, 3e-4, 2e-4),
    "dear drafter": Costs.straight(5e-3, 5e-3, 8e-4, 4e-3, 1e-4),
}
"""Costs of the size of one CPU core's, and of a drafter that does not pay."""
LONGEST = 8
PLAIN: dict[str, TreePolicy] = {"plain": Static.empty()}
CHAINS = PLAIN | {f"chain of {length}": Static.chain(length) for length in range(1, LONGEST + 1)}
TREES = PLAIN | {f"opt {n}/{threshold}": OptTree(n, threshold) for n, threshold in ((6, 0.45), (12, 0.45), (24, 0.3))}
THRESHOLD = 0.4
"""About what a layer costs."""


@dataclass(frozen=True)
class Materials:
    """What a controller is made of."""

    pair: Pair
    predictor: LengthPredictor | None
    costs: Costs
    seed: int = 0

    def predicted(self, chain: Callable[[int], TreePolicy] = Static.chain) -> TreePolicy:
        """A controller of predicted lengths."""
        assert self.predictor is not None and isinstance(self.pair.target, CausalLM)
        return PredictedLength(self.predictor, self.pair.target, chain)


@dataclass(frozen=True)
class Candidate:
    """A controller, or a rule that decides while it drafts."""

    build: Callable[[Materials], TreePolicy]
    fixed: Mapping[str, TreePolicy]
    """The settings that it chooses from, or stands beside."""
    priced: bool = False
    """Whether it reads the costs."""
    draws: bool = False
    """Whether a seed decides what it chooses."""


CONTROLLERS: dict[str, Candidate] = {
    "predicted": Candidate(lambda known: known.predicted(), CHAINS),
    "predicted with threshold": Candidate(
        lambda known: known.predicted(lambda least: ThresholdChain(LONGEST, THRESHOLD, least)), CHAINS
    ),
    "threshold": Candidate(lambda known: ThresholdChain(LONGEST, THRESHOLD), CHAINS),
    "beta": Candidate(lambda known: BetaLength(LONGEST, seed=known.seed), CHAINS, draws=True),
    "calibrated": Candidate(lambda known: CalibratedLength(LONGEST, known.seed), CHAINS, draws=True),
    "auto": Candidate(lambda known: Auto(known.costs, 32), TREES, True),
}


def decode(pair: Pair, prompts: Sequence[list[int]], limit: int, policy: TreePolicy) -> list[Generation]:
    """Decode the prompts greedily, in turn; a controller keeps what it learned, a drafter begins anew."""
    pair.drafter.clear()
    decoder = Decoder(pair.target, pair.drafter, policy)
    return [decoder.generate(prompt, limit, stop=pair.stop) for prompt in prompts]


def seconds(generations: Sequence[Generation], costs: Costs) -> float:
    """What the steps of these generations cost."""
    return sum(map(costs.of_all, generations))


def walk(
    pair: Pair, prompts: Sequence[list[int]], limit: int, policies: Mapping[str, TreePolicy]
) -> dict[str, list[Generation]]:
    """What decoding each prompt with each policy would be, along plain decoding's texts."""
    found = {name: list[Generation]() for name in policies}
    for prompt in tqdm(prompts, desc="along texts", leave=False, disable=None):
        text = written(pair.target, prompt, limit, pair.stop)
        for name, generation in along(pair.drafter, text, policies, pair.target).items():
            found[name].append(generation)
    return found


def run(options: Options) -> dict[str, Any]:
    """Print a line for each table of costs and each controller, and return them."""
    tables = read_costs(options.costs) if options.costs else COSTS
    given = gather(options)
    pair, prompts, limit = given.pair, given.first_prompts(), options.max_new_tokens
    predictor = load_predictor(options, pair)
    names = [name for name in CONTROLLERS if predictor is not None or not name.startswith("predicted")]
    settings = tqdm((CHAINS | TREES).items(), desc="fixed settings", leave=False, disable=None)
    fixed = {name: decode(pair, prompts, limit, policy) for name, policy in settings}
    plain = [generation.tokens for generation in fixed["plain"]]
    decoded: dict[str, list[Generation]] = {}
    seeded = {
        f"{name}, seed {seed}": CONTROLLERS[name].build(Materials(pair, predictor, next(iter(tables.values())), seed))
        for name, seed in itertools.product((name for name in names if CONTROLLERS[name].draws), range(options.seeds))
    }
    pair.drafter.clear()
    walked = walk(pair, prompts, limit, seeded)
    rows = []
    for costs_name, costs in tables.items():
        for name in tqdm(names, desc=costs_name, leave=False, disable=None):
            candidate = CONTROLLERS[name]
            if candidate.priced or name not in decoded:
                decoded[name] = decode(pair, prompts, limit, candidate.build(Materials(pair, predictor, costs)))
            runs = [decoded[name]]
            if candidate.draws:
                runs = [walked[f"{name}, seed {seed}"] for seed in range(options.seeds)]
            found = figures(runs, {one: fixed[one] for one in candidate.fixed}, costs)
            equal = sum(ours.tokens == text for ours, text in zip(decoded[name], plain, strict=True))
            rows.append({"costs": costs_name, "controller": name, **found, "= plain": f"{equal}/{len(plain)}"})
    questions = given.questions.name
    print(f"{options.drafter}, {len(prompts)} texts of {questions}, greedy; each beside what it could have chosen")
    print(table(rows, ".3f"))
    return {"rows": rows, "drafter": options.drafter, "questions": questions, "texts": len(prompts)}


def figures(
    runs: Sequence[Sequence[Generation]], fixed: Mapping[str, Sequence[Generation]], costs: Costs
) -> dict[str, Any]:
    """Of the runs of one controller with several seeds: means, and from where to where they lie."""
    plain = seconds(fixed["plain"], costs)
    rates = {name: plain / seconds(generations, costs) for name, generations in fixed.items()}
    best = max(rates, key=lambda name: rates[name])
    ours = [plain / seconds(run, costs) for run in runs]
    steps = [step for run in runs for generation in run for step in generation.steps]
    return {
        "tokens/step": len(runs) * sum(len(generation.tokens) for generation in fixed["plain"]) / len(steps),
        "nodes": sum(step.tree.nodes for step in steps) / len(steps),
        "x plain": statistics.fmean(ours),
        "best fixed": best,
        "its x plain": rates[best],
        "of best": statistics.fmean(ours) / rates[best],
        "from": min(ours) / rates[best],
        "to": max(ours) / rates[best],
    }


def load_predictor(options: Options, pair: Pair) -> LengthPredictor | None:
    """The predictor of draft lengths that was named, or that belongs to the drafter; None where there is none."""
    embedded = (options.base_model_path, options.drafter) == ("demo", "eagle:demo")
    path = options.predictor or ("demo" if embedded else None)
    if path is None:
        return None
    if not isinstance(pair.target, CausalLM):
        raise ValueError(f"a predictor of draft lengths reads hidden states, which {pair.target.name} does not show")
    return LengthPredictor.load(resolve(path, "length"), pair.target)
