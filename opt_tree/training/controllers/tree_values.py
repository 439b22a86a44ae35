"""Train the network that chooses delayed trees and their verifiers (arXiv:2602.16994, Appendix E).

    python -m opt_tree.training.controllers.tree_values --target demo --drafter eagle:demo \\
        --answers FILE_OR_FOLDER... --output DIR

The prompts of `--answers` are continued by sampling. Each step drafts one of a few large trees in turn. On what was
drawn, the exact block efficiency of every verifier is computed, without the noise of accepting and rejecting: for the
tree itself and for each smaller one inside it (fewer branches, shorter ones, a chain). A step teaches the actions that
its tree contains. What a verifier costs is measured on the way. One step in eight is held out.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import Parser, command, pair_parser


@dataclass(frozen=True)
class Plan:
    """What is chosen from, how many steps are surveyed, and how the network is trained."""

    trunks: str = "0,1,2,4"  # tokens before the branching point
    branches: str = "2,4"  # branches of a tree
    lengths: str = "2,4"  # tokens of a branch
    chains: str = "0,1,2,3,4,6,8"  # chains beside them; 0: no tree
    verifiers: str = "traversal,multi_round"
    temperature: float = 1.0
    steps: int = 3000
    tokens: int = 64  # a prompt
    width: int = 32
    epochs: int = 30
    lr: float = 1e-3
    seed: int = 0


def new_parser() -> Parser:
    return pair_parser("Train the network that chooses delayed trees and their verifiers.", Plan())


main = command(new_parser, "opt_tree.training.controllers.tree_values:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.optimize import nnls
from torch import Tensor
from tqdm import tqdm

from opt_tree.answers import LogProbs, probs_of
from opt_tree.decoder import Decoder
from opt_tree.methods.children.iid import IID
from opt_tree.methods.controllers.selected import KIND, Action, Choice, Informed, TreeValues
from opt_tree.methods.policies.delayed import Delayed
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.methods.verifiers.walks import block_efficiency
from opt_tree.policy import TreePolicy
from opt_tree.random import Random
from opt_tree.sampling import Logits, Sampling, whole
from opt_tree.system.command_line import from_fields, whole_numbers
from opt_tree.tools.pair import Pair, load_pair
from opt_tree.training.answers import read_examples
from opt_tree.training.files import write_checkpoint
from opt_tree.training.optimizer import epochs
from opt_tree.training.plans import Cut
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, Verifier, check

HELD_OUT = 8


def actions_of(plan: Plan) -> tuple[Action, ...]:
    """Everything that can be chosen; ValueError for a verifier that is not exact for drawn trees."""
    names = plan.verifiers.split(",")
    for name in names:
        if name not in VERIFIERS or VERIFIERS[name].make.greedy_only:
            raise ValueError(f"no verifier {name} for drawn children")
        try:
            check(VERIFIERS[name].make, IID((2,)))
        except TypeError as error:
            raise ValueError(str(error)) from error
    trunks, branches, lengths, chains = (
        whole_numbers(text) for text in (plan.trunks, plan.branches, plan.lengths, plan.chains)
    )
    shapes = [(1, chain, 0) for chain in chains]
    shapes += [(k, trunk, length) for trunk in trunks for k in branches for length in lengths]
    return tuple(Action(*shape, name) for shape in shapes for name in names if sum(shape[1:]) or name == names[0])


def surveys_of(plan: Plan) -> list[Delayed]:
    """The trees that are drawn: for each trunk the largest, and the longest chain."""
    branches, length = (max(whole_numbers(text)) for text in (plan.branches, plan.lengths))
    longest = max(whole_numbers(plan.chains))
    return [Delayed(trunk, branches, length) for trunk in whole_numbers(plan.trunks)] + [Delayed(longest, 1, 0)]


def inside(tree: Tree, trunk: int, action: Action) -> Bool[np.ndarray, " rows"] | None:
    """Return which rows of a delayed tree would have been drawn for an action; None where it is none of its parts.

    Branches are drawn independently, so the first of them, and their first tokens, are what a smaller tree draws.
    """
    branch, depths, count = np.zeros(len(tree), dtype=np.int64), tree.depths, 0
    for row in range(1, len(tree)):
        if depths[row] == trunk + 1:
            branch[row], count = count, count + 1
        elif depths[row] > trunk + 1:
            branch[row] = branch[tree.parents[row]]
    depth = action.trunk + action.length
    if depth > depths.max() or (action.length and action.trunk != trunk) or action.branches > max(count, 1):
        return None
    return (depths <= depth) & (branch < action.branches)


def part_of(tree: Tree, rows: Bool[np.ndarray, " rows"]) -> Tree:
    """Return the tree of some rows, closed under parents."""
    place = np.append(np.cumsum(rows) - 1, -1)
    kept = (tree.tokens[rows], place[tree.parents[rows]], tree.path_log_probs[rows], tree.draft_rows[rows])
    return Tree(*kept, tree.draft_log_probs)


class Surveyed(NamedTuple):
    """What was known before each step, and what each action would have brought."""

    facts: Float[Tensor, "steps facts"]
    features: Float[Tensor, "steps hidden"]
    tokens: Float[Tensor, "steps actions"]
    """Expected tokens; nan where the tree that was drawn does not contain the action's."""


class Survey(Informed):
    """Draws the large trees in turn, has the verifiers judge in turn, notes what every action would have brought."""

    def __init__(self, hidden: int, plan: Plan, actions: Sequence[Action]) -> None:
        super().__init__(hidden, plan.temperature)
        self.policies: tuple[TreePolicy, ...] = tuple(surveys_of(plan))
        self.actions = actions
        self.names = tuple(dict.fromkeys(action.verifier for action in actions))
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []
        self.timed: list[tuple[str, int, float]] = []
        """Verifier, nodes, and processor seconds of judging."""
        self.turn = 0

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        self._known = self.facts(context, root), self._feature
        self.turn += 1
        return self.policies[self.turn % len(self.policies)]

    def judge(self, tree: Tree, logits: Logits, random: Random) -> Verdict:
        """Judge as the verifier whose turn it is does, and note the expectations of all."""
        name = self.names[(self.turn // len(self.policies)) % len(self.names)]
        begin = time.process_time()
        verdict = VERIFIERS[name].make(tree, logits, random)
        self.timed.append((name, tree.nodes, time.process_time() - begin))
        probs = probs_of(whole(logits))
        policy = self.policies[self.turn % len(self.policies)]
        assert isinstance(policy, Delayed)
        tokens = [self._expected(tree, probs, policy.trunk, action) for action in self.actions]
        self.found.append((*self._known, torch.tensor([tokens])))
        return verdict

    def _expected(self, tree: Tree, probs: Float[Tensor, "rows vocab"], trunk: int, action: Action) -> float:
        rows = inside(tree, trunk, action)
        if rows is None:
            return float("nan")
        return block_efficiency(part_of(tree, rows), probs[torch.from_numpy(rows)], action.judge)

    def verdict_of(self) -> Verifier:
        """The judge as the loop takes it: exact where each of those that take turns is."""
        judge = lambda tree, logits, random: self.judge(tree, logits, random)  # noqa: E731
        judge.__dict__.update(vars(VERIFIERS[self.names[0]].make))
        return judge  # type: ignore[return-value]


def survey(
    pair: Pair, prompts: Sequence[list[int]], plan: Plan, actions: Sequence[Action]
) -> tuple[Surveyed, dict[str, tuple[float, float]]]:
    """Sample behind the prompts until there are steps enough; return what was seen, and what each verifier costs."""
    seen = Survey(pair.target.hidden, plan, actions)  # type: ignore[union-attr]
    decoder = Decoder(pair.target, pair.drafter, seen, seen.verdict_of())
    with tqdm(total=plan.steps, desc="survey", unit="step", disable=None) as bar:
        for seed, prompt in enumerate(prompts):
            decoder.generate(prompt, plan.tokens, Sampling(plan.temperature), pair.stop, seed=plan.seed + seed)
            bar.update(len(seen.found) - bar.n)
            if len(seen.found) >= plan.steps:
                break
    if not seen.found:
        raise ValueError("there are no prompts to sample behind")
    judging = {name: _line([(nodes, cost) for one, nodes, cost in seen.timed if one == name]) for name in seen.names}
    return Surveyed(*(torch.cat(parts).clone() for parts in zip(*seen.found, strict=True))), judging


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a tree and of a node of it, none below 0."""
    nodes, cost = np.array(points).T
    fixed, node = nnls(np.stack([np.ones(len(nodes)), nodes], 1), cost)[0]
    return float(fixed), float(node)


def loss_of(values: Float[Tensor, "steps actions"], tokens: Float[Tensor, "steps actions"]) -> Float[Tensor, ""]:
    """The mean square error where a step tells."""
    return (values - tokens)[~tokens.isnan()].square().mean()


@torch.no_grad()
def error_of(values: TreeValues, seen: Surveyed) -> float:
    """The mean square error of a network."""
    return float(loss_of(values(seen.facts, seen.features), seen.tokens))


def fit(seen: Surveyed, heldout: Surveyed, choice: Choice, plan: Plan) -> TreeValues:
    """Train the network. It begins at the means; of all epochs the one of least error on `heldout` is returned.

    What a drawn tree brings is mostly chance, so that a few thousand steps are learned by heart sooner than understood.
    """
    torch.manual_seed(plan.seed)
    values = TreeValues(seen.features.shape[1], choice, plan.width)
    values.mean.copy_(seen.facts.mean(0))
    values.scale.copy_(seen.facts.std(0) + 1e-3)
    means = seen.tokens.nanmean(0).nan_to_num(1.0)
    with torch.no_grad():
        values.leave.weight.mul_(0.1)
        values.leave.bias.copy_((means - 1).clamp_min(1e-3).expm1().log())

    def loss_of_rows(rows: Tensor) -> Tensor:
        features = torch.nn.functional.dropout(seen.features[rows], 0.5)
        return loss_of(values(seen.facts[rows], features), seen.tokens[rows])

    least, best = error_of(values, heldout), copy.deepcopy(values.state_dict())
    optimizer = torch.optim.AdamW(values.parameters(), plan.lr, weight_decay=0.1)
    for _ in epochs(optimizer, loss_of_rows, len(seen.facts), 256, plan.epochs):
        if (error := error_of(values, heldout)) < least:
            least, best = error, copy.deepcopy(values.state_dict())
    values.load_state_dict(best)
    return values.eval()


def save(values: TreeValues, facts: dict[str, Any], folder: Path) -> None:
    """Write a network, what it chooses from, and what is known of it."""
    choice = values.choice
    config = {
        "kind": KIND,
        "hidden": values.hidden,
        "width": values.width,
        "temperature": choice.temperature,
        "judging": choice.judging,
        "actions": choice.actions,
    }
    write_checkpoint(config | facts, values.state_dict(), folder, torch.float32)


def train(args: argparse.Namespace) -> None:
    """Survey, train, say what came of it, and write."""
    plan = from_fields(Plan, args)
    actions = actions_of(plan)  # refuses what is wrong before anything is loaded
    pair = load_pair(args.target, args.drafter, dtype=args.dtype)
    examples = read_examples(args.answers, pair.tokenizer, Cut(shortest=2))
    prompts = [example.tokens[: max(example.answer, 1)] for example in examples]
    seen, judging = survey(pair, prompts, plan, actions)
    held = torch.arange(len(seen.facts)) % HELD_OUT == 0
    kept, heldout = (Surveyed(*(part[rows] for part in seen)) for rows in (~held, held))
    values = fit(kept, heldout, Choice(actions, judging, plan.temperature), plan)
    means = kept.tokens.nanmean(0)
    facts = {
        "drafter": args.drafter,
        "steps": len(seen.facts),
        "error": round(error_of(values, heldout), 4),
        "error_of_means": round(float(loss_of(means.expand_as(heldout.tokens), heldout.tokens)), 4),
        "means": [round(value, 3) for value in means.tolist()],
    }
    save(values, facts, args.output)
    print(json.dumps(facts | {"judging": judging}))
