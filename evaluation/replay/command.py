"""Is `--nodes auto` as good as the best fixed setting? Exactly, without a clock: steps are replayed and priced.

    python -m evaluation.replay --drafter eagle:demo --bench-name heldout --limit 20
    python -m evaluation.replay --costs costs.json --json

Plain decoding's texts are recorded once, greedily, with what the drafter says of every node that any tree of at most 32
nodes could ask for. Any policy is then replayed on them in seconds, and its steps are priced by tables of costs
(`opt_tree.policies.Costs`, seconds): the same figures on a busy machine and on a quiet one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.command_line import at_least, numbers, option, parse, print_json, run_command, table
from evaluation.replay.recording import LARGEST, record, replay
from evaluation.run.material import gather
from evaluation.run.options import Asked
from opt_tree import Generation, OptTree, Static, TreePolicy
from opt_tree.controllers import Auto
from opt_tree.policies import Costs

COSTS = {
    "eager": Costs(5.4e-3, 5.5e-3, 1e-4, 1.05e-3, 3e-5, 3e-4, 2e-4),
    "compiled": Costs(1.9e-3, 2e-3, 7e-5, 5.5e-4, 2e-5, 4e-4, 3e-4),
    "344M": Costs(60e-3, 60e-3, 1e-3, 1.05e-3, 2.5e-5, 3e-4, 2e-4),
    "344M, compiled": Costs(28e-3, 28e-3, 6e-4, 5.5e-4, 1.5e-5, 3e-4, 2e-4),
    "dear drafter": Costs(5e-3, 5e-3, 8e-4, 4e-3, 1e-4),
}
"""About what was measured on one CPU core (RESULTS.md), and a drafter that does not pay."""


@dataclass(frozen=True)
class Options(Asked):
    """What is recorded, and what is replayed on it."""

    max_new_tokens: int = option(96, "new tokens a question, at most")
    nodes: str = option("3,5,9,12,24,32", "comma list of the grid's budgets, 32 at most")
    thresholds: str = option("0.1,0.2,0.3,0.45,0.6,0.8", "comma list of the grid's thresholds")
    chains: str = option("1,2,3,4,6", "comma list of lengths of chains beside them")
    costs: str | None = option(None, "JSON file of tables by name, each with the fields of Costs, in seconds")
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, max_new_tokens=1)
        if max(numbers(self.nodes)) > LARGEST:
            raise ValueError(f"--nodes {self.nodes}: trees of at most {LARGEST} nodes are recorded")

    def tables(self) -> Mapping[str, Costs]:
        """The tables of costs. ValueError for a file that holds none."""
        if self.costs is None:
            return COSTS
        try:
            return {name: Costs(**known) for name, known in json.loads(Path(self.costs).read_text()).items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{self.costs} is no table of costs: {error}") from error

    def grid(self) -> dict[str, TreePolicy]:
        """Every fixed setting, by its name."""
        found: dict[str, TreePolicy] = {"plain": Static.empty()}
        found |= {f"{n}/{t:g}": OptTree(int(n), t) for n in numbers(self.nodes) for t in numbers(self.thresholds)}
        return found | {f"chain of {n}": Static.chain(int(n)) for n in numbers(self.chains)}


def seconds(generations: Sequence[Generation], costs: Costs) -> float:
    """What the steps of these generations cost."""
    total = 0.0
    for generation in generations:
        context = len(generation.prompt)
        for step, emitted in zip(generation.steps, generation.accept_lengths, strict=True):
            now = costs.at(context)
            total += now.score(len(step.tree)) + now.draft(step.draft_forwards, step.draft_tokens)
            context += emitted
    return total


def compare(options: Options) -> dict[str, Any]:
    """Record, replay the grid and `Auto`, print a line for each table of costs, and return them."""
    tables, grid = options.tables(), options.grid()
    given = gather(options)
    questions, vocab = given.questions, given.pair.target.vocab
    texts = record(given.pair, given.first_prompts(), options.max_new_tokens)
    fixed = {name: replay(texts, policy, vocab) for name, policy in tqdm(grid.items(), disable=None, leave=False)}
    rows = []
    for name, costs in tables.items():
        plain = seconds(fixed["plain"], costs)
        rates = {one: plain / seconds(generations, costs) for one, generations in fixed.items()}
        best = max(rates, key=lambda one: rates[one])
        ours = replay(texts, Auto(costs, LARGEST), vocab)
        steps = [step for generation in ours for step in generation.steps]
        rows.append(
            {
                "costs": name,
                "auto x plain": plain / seconds(ours, costs),
                "best x plain": rates[best],
                "best fixed": best,
                "auto/best": plain / seconds(ours, costs) / rates[best],
                "tokens/step": sum(len(text.tokens) for text in texts) / len(steps),
                "nodes": sum(step.tree.nodes for step in steps) / len(steps),
                "layers": sum(step.draft_forwards for step in steps) / len(steps),
            }
        )
    print(f"{options.drafter}, {len(texts)} texts of {questions.name}, greedy; the grid has {len(grid)} settings")
    print(table(rows))
    return {"rows": rows, "drafter": options.drafter, "questions": questions.name, "texts": len(texts)}


def main(arguments: list[str] | None = None) -> int:
    """Compare. Returns 0, or 2 for bad input."""

    def command() -> int:
        options = parse(Options, "python -m evaluation.replay", __doc__, arguments)
        print_json(options.json, compare(options))
        return 0

    return run_command(command)
