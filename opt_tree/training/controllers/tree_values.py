"""Train the neural selector of delayed trees for a pair and a verifier (arXiv:2602.16994, section 6 and Appendix E).

    python -m opt_tree.training.controllers.tree_values --target demo --drafter lm:demo \\
        --answers FILE_OR_FOLDER... --output DIR [--costs FILE]

The prompts of `--answers` are continued by sampling. Every `--every` tokens a comb of trees is drawn: a trunk, and
branches from each of its nodes, so that every (K, L1, L2) is a part of it. On what was drawn, the exact block
efficiency of each is computed, without the noise of accepting and rejecting (equation 3). The network's choice is
trained to bring more tokens a second than the best single tree does, and nowhere to fall far behind it (equation 12).
One root in eight is held out. The paper averages four draws a root, here is one. It does not say the penalty's weight
and share, the optimizer, nor the dropout: those are ours.
"""

import sys
from dataclasses import dataclass

from opt_tree.training.command_line import TrainingParser, command, existing, pair_parser


@dataclass(frozen=True)
class TreeValuesPlan:
    """What is chosen from, how many roots are surveyed, and how the network is trained."""

    branches: int = 4  # K at most
    trunk: int = 8  # L1 at most
    length: int = 8  # L2 at most
    verifier: str = "multi_round"  # judges the trees: SpecInfer's rule
    temperature: float = 1.0
    roots: int = 1000
    every: int = 16  # tokens between two roots
    tokens: int = 64  # a prompt
    width: int = 128  # of a projected hidden state
    inner: int = 512  # of the first inner layer; the second one has 32
    epochs: int = 60
    lr: float = 1e-3
    dropout: float = 0.1
    penalty: float = 1.0  # weight of falling behind the best single tree
    worst: float = 0.2  # share of a batch that is penalised, the worst of it
    seed: int = 0


def new_parser() -> TrainingParser:
    parser = pair_parser("Train the neural selector of delayed trees for a pair and a verifier.", TreeValuesPlan())
    parser.add_argument("--costs", type=existing, help="JSON table of what steps cost; by default they are measured")
    return parser


main = command(new_parser, "opt_tree.training.controllers.tree_values:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from opt_tree.children import LogProbs
from opt_tree.decoder import Decoder
from opt_tree.generation import Outcome, Step
from opt_tree.methods.children.draws import probs_of, whole
from opt_tree.methods.children.iid import IID
from opt_tree.methods.controllers.selected import SelectedTree
from opt_tree.methods.controllers.selector import Action, RootFacts, Selector, TreeMenu
from opt_tree.methods.drafters.seen import Seen
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.methods.verifiers.rules import branching_of
from opt_tree.methods.verifiers.walks import reached
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.sampling import Temperature
from opt_tree.system.command_line import from_fields
from opt_tree.target import Output
from opt_tree.tools.cost_files import read_costs
from opt_tree.tools.pair import Pair, load_pair
from opt_tree.tools.step_costs import costs_of
from opt_tree.training.answers import read_examples
from opt_tree.training.files import write_checkpoint
from opt_tree.training.optimizer import epochs
from opt_tree.training.plans import Cut
from opt_tree.tree import Tree
from opt_tree.verify import Verifier, check

HELD_OUT, BATCH = 8, 128


def actions_of(plan: TreeValuesPlan) -> tuple[Action, ...]:
    """Every tree that can be chosen, each once: with one branch (K, L1, L2) is a chain. The empty one is the first."""
    chains = [Action(1, length, 0) for length in range(plan.trunk + plan.length + 1)]
    sizes = [(k, trunk) for k in range(2, plan.branches + 1) for trunk in range(plan.trunk + 1)]
    return (*chains, *(Action(k, trunk, length) for k, trunk in sizes for length in range(1, plan.length + 1)))


def judge_of(name: str) -> Verifier:
    """The verifier of a name; ValueError for one that is not exact for drawn trees, or does not walk down them."""
    if name not in VERIFIERS or VERIFIERS[name].make.greedy_only:
        raise ValueError(f"no verifier {name} for drawn children")
    try:
        check(VERIFIERS[name].make, IID((2,)))
    except TypeError as error:
        raise ValueError(str(error)) from error
    if branching_of(VERIFIERS[name].make) is None:
        raise ValueError(f"the selector is trained for verifiers that walk down a tree, which {name} does not")
    return VERIFIERS[name].make


@dataclass(frozen=True)
class Comb(TreePolicy):
    """A trunk, and below its root and each node of it `branches` branches: the union of all delayed trees of the sizes.

    Trunk 1, two branches of length 1; the trunk goes on at a node's last child:

              root
             /  |  \\
            a   b   c
                   / \\
                  a   b
    """

    branches: int
    trunk: int
    length: int

    @property
    def children(self) -> IID:
        return IID((self.branches + 1,) * self.max_depth)

    @property
    def max_depth(self) -> int:
        return self.trunk + self.length

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        starts, _ = self.places(pool.parents, pool.depths)
        newest = pool.newest
        trunk = (starts[newest] < 0) & (pool.depth <= self.trunk)
        branches = (starts[newest] >= 0) & (starts[newest] <= self.trunk) & (pool.depth - starts[newest] < self.length)
        return newest[trunk | branches] if pool.depth < self.max_depth else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        starts, _ = self.places(pool.parents, pool.depths)
        return (starts <= self.trunk).nonzero()[0]

    def places(
        self, parents: Int[np.ndarray, " rows"], depths: Int[np.ndarray, " rows"]
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """Of every row the depth of the trunk's node that its branch leaves, -1 for the trunk itself and `max_depth`
        for what is not of the comb; and the branch's number there."""
        starts, ranks = np.full(len(parents), -1), np.arange(len(parents)) - np.searchsorted(parents, parents)
        for row, above in enumerate(parents[1:], start=1):  # siblings stand together
            if starts[above] >= 0:  # a branch goes on at its first child
                starts[row], ranks[row] = (self.max_depth, 0) if ranks[row] else (starts[above], ranks[above])
            elif ranks[row] < self.branches:
                starts[row] = depths[above]
            elif depths[row] > self.trunk:
                starts[row] = self.max_depth
        return starts, ranks


def part_of(tree: Tree, rows: Bool[np.ndarray, " rows"]) -> Tree:
    """Return the tree of some rows, closed under parents."""
    place = np.append(np.cumsum(rows) - 1, -1)
    kept = (tree.tokens[rows], place[tree.parents[rows]], tree.path_log_probs[rows], tree.draft_rows[rows])
    return Tree(*kept, tree.draft_log_probs)


def expectations(comb: Comb, tree: Tree, probs: Float[Tensor, "rows vocab"], judge: Verifier) -> dict[Action, float]:
    """The exact block efficiency of every action on what was drawn.

    Branches are drawn independently, so that the first of them are what a tree of fewer branches draws. Where a token
    ends the text nothing stands below it, and a longer tree brings no more.
    """
    starts, ranks = comb.places(tree.parents, tree.depths)
    found: dict[Action, float] = {}

    def judged(rows: Bool[np.ndarray, " rows"]) -> list[float]:
        return np.cumsum(reached(part_of(tree, rows), probs[torch.from_numpy(rows)], judge)).tolist()

    chain = judged((starts < 0) | ((starts == comb.trunk) & (ranks == 0)))
    found |= {Action(1, length, 0): chain[min(length, len(chain) - 1)] for length in range(comb.max_depth + 1)}
    for trunk in range(comb.trunk + 1):
        above = (starts < 0) & (tree.depths <= trunk)
        for branches in range(2, comb.branches + 1):
            tokens = judged(above | ((starts == trunk) & (ranks < branches)))
            for length in range(1, comb.length + 1):
                found[Action(branches, trunk, length)] = tokens[min(trunk + length, len(tokens) - 1)]
    return found


class Surveyed(NamedTuple):
    """What was known before each root, what each action would have brought there, and what it would have cost."""

    known: RootFacts
    tokens: Float[Tensor, "roots actions"]
    seconds: Float[Tensor, "roots actions"]

    def at(self, rows: Tensor) -> "Surveyed":
        known = RootFacts(tuple(states[rows] for states in self.known.states), self.known.scalars[rows])
        return Surveyed(known, self.tokens[rows], self.seconds[rows])


class Survey(SelectedTree):
    """Draws a comb every so many tokens and chains between, and notes what every action would have brought."""

    def __init__(self, selector: Selector, seen: Seen, plan: TreeValuesPlan) -> None:
        super().__init__(selector, seen)
        self.plan, self.comb = plan, Comb(plan.branches, plan.trunk, plan.length)
        self.policies = (self.comb, Sampled.chain(2))
        self.found: list[tuple[RootFacts, Tensor, Tensor]] = []
        self.sampling, self._context = Temperature(plan.temperature), list[int]()
        self._due, self._root, self._end = 0, None, 0

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        super().begin(prompt, prefill)
        self._end = len(prompt) + self.plan.tokens

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        room = len(context) + self.comb.max_depth < self._end  # a comb that is cut tells nothing, and costs the most
        self._root = self.known(context, root) if root is not None and self._due <= 0 and room else None
        self._context = context
        return self.policies[0 if self._root is not None else 1]

    def observe(self, step: Step, outcome: Outcome) -> None:
        """At a root, note the expectations of all actions; a comb that has no room left tells nothing."""
        super().observe(step, outcome)
        tree, choice = outcome.tree, self.selector.choice
        if self._root is not None and tree.depths.max() == self.comb.max_depth:
            scores = self.sampling.process(outcome.logits, tree, self._context)
            told = expectations(self.comb, tree, probs_of(whole(scores)), choice.judge)
            costs = choice.costs.at(len(self._context))
            rows = ([told[one] for one in choice.actions], [one.seconds(costs) for one in choice.actions])
            self.found.append((self._root, *(torch.tensor([row], dtype=torch.float32) for row in rows)))
        self._due = self.plan.every if self._root is not None else self._due - len(step.tokens)


def survey(pair: Pair, prompts: Sequence[list[int]], plan: TreeValuesPlan, choice: TreeMenu) -> Surveyed:
    """Sample behind the prompts until there are roots enough; return what was seen."""
    seen = Seen(pair.drafter)
    watching = Survey(Selector((1, 1, 1), choice, 1, (1,)), seen, plan)  # nothing asks the network
    decoder = Decoder(pair.target, seen, watching, choice.judge)
    with tqdm(total=plan.roots, desc="survey", unit="root", disable=None) as bar:
        for seed, prompt in enumerate(prompts):
            decoder.generate(prompt, plan.tokens, watching.sampling, pair.stop, seed=plan.seed + seed)
            bar.update(len(watching.found) - bar.n)
            if len(watching.found) >= plan.roots:
                break
    if not watching.found:
        raise ValueError("there are no prompts to sample behind")
    known, *rest = zip(*watching.found, strict=True)
    states = tuple(torch.cat(parts).clone() for parts in zip(*(one.states for one in known), strict=True))
    scalars = torch.cat([one.scalars for one in known]).clone()
    return Surveyed(RootFacts(states, scalars), *(torch.cat(parts).clone() for parts in rest))


def speeds(weights: Float[Tensor, "roots actions"], seen: Surveyed) -> Float[Tensor, " roots"]:
    """Tokens a second where actions are taken with these probabilities (equation 4)."""
    return (weights * seen.tokens).sum(1) / (weights * seen.seconds).sum(1)


def best_single(seen: Surveyed) -> int:
    """The action of most tokens a second where it is taken at every root: what the selector is compared with."""
    return int((seen.tokens.mean(0) / seen.seconds.mean(0)).argmax())


def loss_of(
    logits: Float[Tensor, "roots actions"], seen: Surveyed, base: int, plan: TreeValuesPlan
) -> Float[Tensor, ""]:
    """Equation 12: minus the logarithm of the speed over the single tree's, and the worst shortfalls squared."""
    single = seen.tokens[:, base] / seen.seconds[:, base]
    ratio = speeds(logits.softmax(1), seen) / single
    short = (1 - ratio).clamp_min(0).square()
    worst = short.topk(max(1, round(plan.worst * len(short)))).values
    return -ratio.log().mean() + plan.penalty * worst.mean()


@torch.no_grad()
def speed_of(selector: Selector, seen: Surveyed) -> float:
    """Tokens a second over all roots, the action of largest logit being taken at each."""
    chosen = selector(seen.known).argmax(1, keepdim=True)
    return float(seen.tokens.gather(1, chosen).sum() / seen.seconds.gather(1, chosen).sum())


def fit(seen: Surveyed, heldout: Surveyed, choice: TreeMenu, plan: TreeValuesPlan) -> Selector:
    """Train the network; of all epochs the one of least loss on `heldout` is returned."""
    torch.manual_seed(plan.seed)
    selector = Selector([states.shape[1] for states in seen.known.states], choice, plan.width, (plan.inner, 32))
    selector.mean.copy_(seen.known.scalars.mean(0))
    selector.scale.copy_(seen.known.scalars.std(0) + 1e-3)
    base = best_single(seen)
    with torch.no_grad():  # it begins at the single tree
        selector.leave.weight.mul_(0.1)
        selector.leave.bias.zero_()[base] = 2.0

    def loss_of_rows(rows: Tensor) -> Tensor:
        some = seen.at(rows)
        return loss_of(selector(some.known, plan.dropout), some, base, plan)

    least, best = float("inf"), copy.deepcopy(selector.state_dict())
    optimizer = torch.optim.AdamW(selector.parameters(), plan.lr, weight_decay=0.1)
    for _ in epochs(optimizer, loss_of_rows, len(seen.tokens), BATCH, plan.epochs):
        with torch.no_grad():
            error = float(loss_of(selector(heldout.known), heldout, base, plan))
        if error < least:
            least, best = error, copy.deepcopy(selector.state_dict())
    selector.load_state_dict(best)
    return selector.eval()


def save(selector: Selector, facts: dict[str, Any], folder: Path) -> None:
    """Write a network, what it chooses from, and what is known of it."""
    write_checkpoint(selector.config | facts, selector.state_dict(), folder, torch.float32)


def train(args: argparse.Namespace) -> None:
    """Survey, train, say what came of it, and write."""
    plan = from_fields(TreeValuesPlan, args)
    judge_of(plan.verifier)  # refuses what is wrong before anything is loaded
    tables = read_costs(args.costs) if args.costs else {}
    pair = load_pair(args.target, args.drafter, dtype=args.dtype)
    costs = next(iter(tables.values())) if tables else costs_of(pair.target, pair.drafter)
    choice = TreeMenu(actions_of(plan), plan.verifier, costs, plan.temperature)
    examples = read_examples(args.answers, pair.tokenizer, Cut(shortest=2))
    seen = survey(pair, [example.tokens[: max(example.answer, 1)] for example in examples], plan, choice)
    held = torch.arange(len(seen.tokens)) % HELD_OUT == 0
    kept, heldout = seen.at(~held), seen.at(held)
    selector = fit(kept, heldout, choice, plan)
    base = best_single(kept)
    single = float(heldout.tokens[:, base].sum() / heldout.seconds[:, base].sum())
    facts = {
        "drafter": args.drafter,
        "roots": len(seen.tokens),
        "single": choice.actions[base],
        "of_single": round(speed_of(selector, heldout) / single, 4),
    }
    save(selector, facts, args.output)
    print(json.dumps(facts))
