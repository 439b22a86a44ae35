"""Is `--nodes auto` as good as the best fixed setting? Exactly, without a clock: steps are replayed and priced.

    python -m experiments.replay --drafter eagle:demo --bench-name heldout --limit 20
    python -m experiments.replay --costs costs.json --json
    python -m experiments.replay --controllers --drafter eagle:demo --dtype float32 --bench-name heldout --limit 24

Plain decoding's texts are recorded once, greedily, with what the drafter says of every node that any tree of at most 32
nodes could ask for. Any policy is then replayed on them in seconds, and its steps are priced by tables of costs
(`opt_tree.policies.Costs`, seconds): the same figures on a busy machine and on a quiet one. With `--controllers` each
controller is decoded with instead, and priced by the same tables (`controllers`); one that draws is replayed with
several seeds.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import at_least, main_of, option, whole_numbers
from evaluation.run.options import Asked


@dataclass(frozen=True)
class Options(Asked):
    """What is recorded, and what is replayed on it."""

    max_new_tokens: int = option(96, "new tokens a question, at most")
    nodes: str = option("3,5,9,12,24,32", "comma list of the grid's budgets, 32 at most")
    thresholds: str = option("0.1,0.2,0.3,0.45,0.6,0.8", "comma list of the grid's thresholds")
    chains: str = option("1,2,3,4,6", "comma list of lengths of chains beside them")
    costs: str | None = option(None, "JSON file of tables by name, each with the fields of Costs, in seconds")
    controllers: bool = option(False, "compare every controller with the best fixed setting that it could have chosen")
    predictor: str | None = option(
        None, "with --controllers: folder of a predictor of draft lengths; by default the embedded one for eagle:demo"
    )
    seeds: int = option(8, "with --controllers: seeds that a controller which draws is replayed with")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, max_new_tokens=1, seeds=1)


main = main_of("experiments.replay", Options, __doc__, "experiments.replay.__main__:compare")

if __name__ == "__main__":
    sys.exit(main())

from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from evaluation.command_line import numbers, table
from evaluation.run.models import gather
from experiments.replay.controllers import COSTS, Setting, compare_controllers, seconds
from opt_tree import CausalLM, OptTree, Pair, Static, TreePolicy
from opt_tree.controllers import Auto, LengthPredictor
from opt_tree.decoding.cost_files import read_costs
from opt_tree.decoding.recording import LARGEST, record, replay
from opt_tree.models.named import resolve
from opt_tree.policies import Costs


def grid_of(options: Options) -> dict[str, TreePolicy]:
    """Every fixed setting, by its name. Raises ValueError for a tree that is larger than what is recorded."""
    nodes, thresholds = whole_numbers(options.nodes), numbers(options.thresholds)
    if max(nodes) > LARGEST:
        raise ValueError(f"--nodes {options.nodes}: trees of at most {LARGEST} nodes are recorded")
    found: dict[str, TreePolicy] = {"plain": Static.empty()}
    found |= {f"{n}/{t:g}": OptTree(n, t) for n in nodes for t in thresholds}
    return found | {f"chain of {n}": Static.chain(n) for n in whole_numbers(options.chains)}


def compare(options: Options) -> dict[str, Any]:
    """Print a line for each table of costs, with `--controllers` for each controller under it, and return them."""
    tables = read_costs(options.costs) if options.costs else COSTS
    fixed = grid_of(options)
    given = gather(options)
    pair, prompts, questions = given.pair, given.first_prompts(), given.questions
    setting = Setting(pair, prompts, options.max_new_tokens)
    if options.controllers:
        predictor = load_predictor(options, pair)
        rows = compare_controllers(setting, tables, predictor, options.seeds)
        grid = "each beside the settings that it could have chosen"
    else:
        rows = compare_auto(setting, fixed, tables)
        grid = f"the grid has {len(fixed)} settings"
    print(f"{options.drafter}, {len(prompts)} texts of {questions.name}, greedy; {grid}")
    print(table(rows, ".3f" if options.controllers else ".2f"))
    return {"rows": rows, "drafter": options.drafter, "questions": questions.name, "texts": len(prompts)}


def compare_auto(setting: Setting, grid: Mapping[str, TreePolicy], tables: Mapping[str, Costs]) -> list[dict[str, Any]]:
    """Record, replay the grid and `Auto`; return a row for each table of costs."""
    vocab = setting.pair.target.vocab
    texts = record(setting.pair, setting.prompts, setting.max_new_tokens)
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
    return rows


def load_predictor(options: Options, pair: Pair) -> LengthPredictor | None:
    """The predictor of draft lengths that was named, or that belongs to the drafter; None where there is none."""
    embedded = (options.base_model_path, options.drafter) == ("demo", "eagle:demo")
    path = options.predictor or ("demo" if embedded else None)
    if path is None:
        return None
    if not isinstance(pair.target, CausalLM):
        raise ValueError(f"a predictor of draft lengths reads hidden states, which {pair.target.name} does not show")
    return LengthPredictor.load(resolve(path, "length"), pair.target)
