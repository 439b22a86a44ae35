"""Which controller pays? Each is decoded with, and compared with the best fixed setting that it could have chosen.

Counts are the decoding's own; seconds are modelled, by the tables of costs that replays are priced by, so that the
figures do not depend on the machine's load. A controller that reads the costs is decoded with once a table. One that
draws is replayed with several seeds beside replayed settings, and decoded with once, for its texts.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from opt_tree import CausalLM, Controller, Decoder, Generation, OptTree, Pair, Static, TreePolicy
from opt_tree.controllers import Auto, BetaLength, CalibratedLength, LengthPredictor, PredictedLength
from opt_tree.decoding.recording import record, replay, seconds_of
from opt_tree.models.chain_lm import AnyLM
from opt_tree.policies import Costs, ThresholdChain

COSTS = {
    "eager": Costs.straight(5.4e-3, 5.5e-3, 1e-4, 1.05e-3, 3e-5, 3e-4, 2e-4),
    "compiled": Costs.straight(1.9e-3, 2e-3, 7e-5, 5.5e-4, 2e-5, 4e-4, 3e-4),
    "344M": Costs.straight(60e-3, 60e-3, 1e-3, 1.05e-3, 2.5e-5, 3e-4, 2e-4),
    "344M, compiled": Costs.straight(28e-3, 28e-3, 6e-4, 5.5e-4, 1.5e-5, 3e-4, 2e-4),
    "dear drafter": Costs.straight(5e-3, 5e-3, 8e-4, 4e-3, 1e-4),
}
"""Costs of the size of one CPU core's, and of a drafter that does not pay."""


def seconds(generations: Sequence[Generation], costs: Costs) -> float:
    """What the steps of these generations cost."""
    return sum(seconds_of(generation, costs) for generation in generations)


LONGEST = 8
CHAINS: dict[str, TreePolicy] = {
    "plain": Static.empty(),
    **{f"chain of {length}": Static.chain(length) for length in range(1, LONGEST + 1)},
}
TREES: dict[str, TreePolicy] = {
    "plain": Static.empty(),
    **{
        f"opt {nodes}/{threshold}": OptTree(nodes, threshold) for nodes, threshold in ((6, 0.45), (12, 0.45), (24, 0.3))
    },
}
PENALTY, THRESHOLD = 1.0, 0.4
"""Of the published rules: the penalty by tuning on other prompts, the threshold about what a layer costs."""


@dataclass(frozen=True)
class Materials:
    """What a controller is made of."""

    target: AnyLM
    predictor: LengthPredictor | None
    costs: Costs
    seed: int = 0

    def predicted(self, price: Costs | float, chain: Callable[[int], TreePolicy] = Static.chain) -> Controller:
        """A controller of predicted lengths."""
        assert self.predictor is not None and isinstance(self.target, CausalLM)
        return PredictedLength(self.predictor, self.target, price, chain)


@dataclass(frozen=True)
class Candidate:
    """A controller, or a rule that decides while it drafts."""

    build: Callable[[Materials], Controller | TreePolicy]
    fixed: Mapping[str, TreePolicy]
    """The settings that it chooses from, or stands beside."""
    priced: bool = False
    """Whether it reads the costs."""
    draws: bool = False
    """Whether a seed decides what it chooses."""


CONTROLLERS: dict[str, Candidate] = {
    "predicted": Candidate(lambda known: known.predicted(known.costs), CHAINS, True),
    "predicted, published": Candidate(lambda known: known.predicted(PENALTY), CHAINS),
    "predicted, published with threshold": Candidate(
        lambda known: known.predicted(PENALTY, lambda least: ThresholdChain(LONGEST, THRESHOLD, least)), CHAINS
    ),
    "threshold": Candidate(lambda known: ThresholdChain(LONGEST, THRESHOLD), CHAINS),
    "beta": Candidate(lambda known: BetaLength(LONGEST, seed=known.seed), CHAINS, draws=True),
    "calibrated": Candidate(lambda known: CalibratedLength(LONGEST, known.seed), CHAINS, draws=True),
    "auto": Candidate(lambda known: Auto(known.costs, 32), TREES, True),
}


@dataclass(frozen=True)
class Setting:
    """What is decoded."""

    pair: Pair
    prompts: Sequence[list[int]]
    max_new_tokens: int

    def decode(self, policy: TreePolicy | Controller) -> list[Generation]:
        """Decode the prompts greedily, in turn; a controller keeps what it learned, a drafter begins anew."""
        pair = self.pair
        pair.drafter.clear()
        decoder = Decoder(pair.target, pair.drafter, policy)
        return [decoder.generate(prompt, self.max_new_tokens, stop=pair.stop) for prompt in self.prompts]


def compare_controllers(
    setting: Setting, tables: Mapping[str, Costs], predictor: LengthPredictor | None, seeds: int
) -> list[dict[str, Any]]:
    """Return a row for each table of costs and each controller; of one that draws, over so many seeds."""
    target = setting.pair.target
    names = [name for name in CONTROLLERS if predictor is not None or not name.startswith("predicted")]
    runs = len(CHAINS | TREES) + sum(len(tables) if CONTROLLERS[name].priced else 1 for name in names)
    setting.pair.drafter.clear()
    texts = record(setting.pair, setting.prompts, setting.max_new_tokens)
    with tqdm(total=runs, unit="run", leave=False, disable=None) as bar:

        def run(name: str, policy: TreePolicy | Controller) -> list[Generation]:
            bar.set_postfix_str(name)
            found = setting.decode(policy)
            bar.update()
            return found

        fixed = {name: run(name, policy) for name, policy in (CHAINS | TREES).items()}
        replayed = {name: replay(texts, policy, target.vocab) for name, policy in (CHAINS | TREES).items()}
        plain = [generation.tokens for generation in fixed["plain"]]
        decoded: dict[str, list[Generation]] = {}
        drawn: dict[str, list[list[Generation]]] = {}
        rows = []
        for table, costs in tables.items():
            for name in names:
                candidate = CONTROLLERS[name]
                known = [Materials(target, predictor, costs, seed) for seed in range(seeds)]
                if candidate.priced or name not in decoded:
                    decoded[name] = run(name, candidate.build(known[0]))
                    if candidate.draws:
                        drawn[name] = [replay(texts, candidate.build(one), target.vocab) for one in known]
                row = {"costs": table, "controller": name}
                if candidate.draws:
                    row |= _figures(drawn[name], candidate, replayed, costs)
                else:
                    row |= _figures([decoded[name]], candidate, fixed, costs)
                equal = sum(ours.tokens == text for ours, text in zip(decoded[name], plain, strict=True))
                rows.append({**row, "= plain": f"{equal}/{len(plain)}"})
    return rows


def _figures(
    runs: Sequence[Sequence[Generation]], candidate: Candidate, fixed: Mapping[str, Sequence[Generation]], costs: Costs
) -> dict[str, Any]:
    """Of the runs of one controller with several seeds: means, and from where to where they lie."""
    plain = seconds(fixed["plain"], costs)
    rates = {name: plain / seconds(fixed[name], costs) for name in candidate.fixed}
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
