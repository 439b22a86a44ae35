"""The tree for this machine: what a second is worth is learned, and every node and layer has to pay for its seconds.

Nothing is tuned by hand. What steps cost is measured once (`opt_tree.pricing`); how far the drafter's probabilities can
be trusted, how much a further layer brings and how many tokens a second come out is learned from the steps.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.children import Few
from opt_tree.controllers.base import Controller
from opt_tree.hub import Table, meet
from opt_tree.policies import Costs, Priced, Static, TreePolicy
from opt_tree.policies.priced import KNOTS
from opt_tree.step import Outcome, Step
from opt_tree.target import Output

PRIOR = 3.0
"""Expected tokens that a knot's first factor, that of the next more probable one, counts for."""
LAYER_PRIOR = np.array([[2.0], [1.4]])
"""Surplus of a layer and of the one below it before any was seen."""
LESSON = 32
"""Steps that are learned from at once, as learning takes as long as one layer; at first, a quarter of those so far."""
PATIENCE = (8, 128)
"""Steps without a tree before drafting is tried again: at first, and at most, after trials that did not pay.

Of several lanes: a trial shows as many steps, and the first wait is as many times as long."""

UNSEEN = 0.1
"""What drafting costs lanes beyond their steps, in plain steps: the drafter takes in prompts, and lanes end apart."""

_BETWEEN = (np.array(KNOTS[1:]) + KNOTS[:-1]) / 2
"""From the middle between two knots on, a probability teaches about the higher one."""


class Auto(Controller, Table):
    """Chooses nodes and layers by their price, and no tree at all where drafting does not pay.

    The rate is tokens over *modelled* seconds, so that the same text is always decoded by the same trees, however busy
    the machine is. What was learned is kept from prompt to prompt.

        decoder = Decoder(pair.target, pair.drafter, Auto(Costs.straight(5.4e-3, 5.5e-3, 1e-4, 1e-3, 3e-5)))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    def __init__(
        self,
        costs: Costs,
        nodes: int = 64,
        max_depth: int = 10,
        decay: float = 0.99,
        in_lanes: Callable[[int], Costs] | None = None,
    ) -> None:
        """At most `nodes` a tree and `max_depth` layers; a step counts `decay` times as much as the next one.

        `in_lanes`: what a step of so many sequences side by side costs, by the rows of one; None: as alone.
        """
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.costs, self.decay, self._costs_in_lanes = costs, decay, in_lanes
        self._empty = Static.empty()
        # Picking children costs by the budget, so a budget not far above the need is chosen.
        self._sizes = tuple(Priced(costs, size, max_depth) for size in (8, 16, 32) if size < nodes)
        self._sizes += (Priced(costs, nodes, max_depth),)
        self.policies = (self._empty, *self._sizes)
        self._now, self._need = costs, 8.0
        # Discounted sums; before anything was seen, 20 steps at half again plain decoding's speed.
        self._tokens, self._seconds = 30.0, 20 * costs.plain
        self._accepted, self._expected = np.zeros((2, len(KNOTS)))
        self._layers = np.repeat(LAYER_PRIOR, max_depth, 1)
        self._drafted = (1.0, 0.0, 1.0)  # steps with a tree, what they brought beyond plain decoding, its squares
        self._patience, self._waited = PATIENCE[0], 0
        self._round: list[Step] = []  # of the lanes that decided together, those that are done
        self._lanes, self._unseen = 1, 0.0
        self._seen: list[Step] = []
        self._learned, self._lesson, self._stale = 0, 1, True
        self._due = 1  # steps in a round at which they are learned from
        self._kept: TreePolicy | None = None  # what one sequence is answered until then

    def __str__(self) -> str:
        largest = self._sizes[-1]
        return f"Auto, at most {largest.nodes} nodes and {largest.max_depth} layers"

    def in_lanes(self, lanes: int) -> "Auto":
        """One for all lanes of a batch, which decide in each round together: all draft, or none.

        It pays for a batch's step: where all lanes draft a row, that is `lanes` rows of the forward. Seconds are the
        batch's and tokens one lane's, in the rate as in the price. It trusts the drafter as this one does so far.
        """
        largest, costs = self._sizes[-1], self.costs if self._costs_in_lanes is None else self._costs_in_lanes(lanes)
        shared = Auto(costs, largest.nodes, largest.max_depth, self.decay)
        shared._accepted, shared._expected = self._accepted.copy(), self._expected.copy()
        shared._layers, shared._patience = self._layers.copy(), min(lanes * PATIENCE[0], PATIENCE[1])
        shared._unseen = UNSEEN
        return shared

    @property
    def rate(self) -> float:
        """Tokens a second, by the modelled seconds of the steps so far; plain decoding's at least."""
        return max(self._tokens / self._seconds, 1 / self._now.plain)

    @property
    def trust(self) -> tuple[float, ...]:
        """What the path log-probabilities of `KNOTS` have turned out to be.

        By probability, not by depth: that is what the demo drafters are wrong by (RESULTS.md).
        """
        factor, factors = 1.0, []
        for accepted, expected in zip(self._accepted[::-1].tolist(), self._expected[::-1].tolist(), strict=True):
            factor = (accepted + PRIOR * factor) / (expected + PRIOR)
            factors.append(factor)
        logs = np.minimum(np.array(KNOTS) + np.log(factors[::-1]), 0.0)
        return tuple(np.maximum.accumulate(logs).tolist())

    def reset(self, prompt: list[int], output: Output | None) -> None:
        """Prices are another prompt's."""
        self._kept = None

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        return meet(self, len(context), last=False)

    def decide(self, brought: Sequence[int]) -> list[TreePolicy]:
        """From the lengths of all lanes' contexts to the policy of the next step, one for all of them."""
        alone = len(brought) == 1
        if alone and self._kept is not None:
            return [self._kept]
        if self._lanes == 1:
            self._take()  # what the last prompt left
        self._round, self._lanes = [], len(brought)
        self._now = self.costs.at(sum(brought) // len(brought))
        policy = self._next()
        settled = alone and not self._waited and isinstance(policy, Priced)
        self._due = self._lesson - len(self._seen) if settled else len(brought)
        self._kept = policy if alone else None
        return [policy] * len(brought)

    def _next(self) -> TreePolicy:
        if self._waited < self._patience and self._best_guess() < 0:
            return self._empty
        if self._stale:
            self._trust, self._carry = self.trust, tuple((self._layers[1] / self._layers[0]).tolist())
            self._stale = False
        policy = next((one for one in self._sizes if one.nodes >= 1.5 * self._need), self._sizes[-1])
        return policy.at(self._now, self.rate, self._trust, self._carry)

    def _best_guess(self) -> float:
        """How many tokens a step with a tree may well bring beyond plain decoding: the mean and one standard error."""
        steps, worth, squares = self._drafted
        return worth / steps + math.sqrt(max(squares / steps - (worth / steps) ** 2, 0.0) / steps)

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Learn from a step, when those of all lanes that decided with it are done; of one, from several at once."""
        self._round.append(step)
        if len(self._round) >= self._due:
            self._take()

    def _take(self) -> None:
        """Learn from the steps that wait."""
        steps, self._round, self._kept = self._round, [], None
        for together in [[one] for one in steps] if self._lanes == 1 else [steps]:
            self._weigh(together)

    def _weigh(self, steps: list[Step]) -> None:
        """Learn from a round: what its tokens and its seconds say of the rate, and of what drafting brings."""
        seconds, fading = self._seconds_of(steps), self.decay ** len(steps)
        policy = steps[0].policy
        if isinstance(policy, Priced):
            self._compare([len(one.tokens) - seconds / self._now.plain - self._unseen for one in steps])
            for one in steps:
                self._learn(one, policy)
        else:
            self._waited += 1
            for sums in (self._expected, self._accepted):  # what is not looked at fades
                sums *= fading
            self._stale = True
        self._tokens = fading * self._tokens + sum(len(one.tokens) for one in steps)
        self._seconds = fading * self._seconds + len(steps) * seconds

    def _seconds_of(self, steps: list[Step]) -> float:
        """Modelled seconds of a round: its forwards are as long as the longest lane's."""
        if len(steps) == 1 or not isinstance(steps[0].policy, Priced):
            return self._now.of(steps[0])
        # What a lane's drafter has to catch up with is not a tree's to pay: it may be a whole prompt.
        rows = max(min(step.draft_tokens, len(step.tree)) for step in steps)
        layers = max(max(step.draft_forwards, *step.tree.depths.tolist(), 1) for step in steps)
        return self._now.score(max(len(step.tree) for step in steps)) + self._now.draft(layers, rows)

    def _compare(self, worths: list[float]) -> None:
        """Note what steps with a tree brought beyond plain decoding, and how soon to try again if that is too little.

        Not at the rate so far: at one that is too high the shortest step looks best, and nothing would mend it.
        """
        if self._waited:
            paid = sum(worths) > 0
            self._patience = min(len(worths) * PATIENCE[0] if paid else 2 * self._patience, PATIENCE[1])
        self._waited = 0
        fading = 0.97 ** (1 / len(worths))  # a round's, so that many lanes are soon sure
        for worth in worths:
            steps, mean, squares = self._drafted
            self._drafted = fading * steps + 1, fading * mean + worth, fading * squares + worth**2

    def _learn(self, step: Step, policy: Priced) -> None:
        """Keep the step, and learn from several of them at a time."""
        self._need += 0.1 * (step.tree.nodes - self._need)
        self._seen.append(step)
        if len(self._seen) >= self._lesson:
            self._digest(self._seen, policy)
            self._learned += len(self._seen)
            self._seen, self._lesson, self._stale = [], min(self._learned // 4 + 1, LESSON), True

    def _digest(self, seen: list[Step], policy: Priced) -> None:
        """Compare what trees said with what was accepted, and each layer with the one above it."""
        trees = [step.tree for step in seen]
        sizes = np.array([tree.nodes for tree in trees])
        logs = np.concatenate([tree.path_log_probs[1:] for tree in trees])
        depths = np.concatenate([tree.depths[1:] for tree in trees])
        accepted = np.zeros(len(logs))
        above = sizes.cumsum() - sizes - 1  # of a tree's nodes, row 1 is the first
        accepted[[int(begin) + row for begin, step in zip(above, seen, strict=True) for row in step.path[1:]]] = 1
        decay = self.decay ** len(seen)
        knots = _BETWEEN.searchsorted(logs)
        for sums, values in ((self._expected, np.exp(logs)), (self._accepted, accepted)):
            sums *= decay
            sums += np.bincount(knots, values, minlength=len(KNOTS))
        surplus = np.maximum(policy.surplus(logs), 0)
        # A table's layers are no forwards.
        layers = np.array([max(step.draft_forwards, *step.tree.depths.tolist()) for step in seen])
        below = np.repeat(layers, sizes) > depths
        most = self._layers.shape[1]
        self._layers *= self.decay ** (layers[:, None] > np.arange(1, most + 1)).sum(0)
        self._layers[0] += np.bincount(depths[below], surplus[below], minlength=most + 1)[1 : most + 1]
        self._layers[1] += np.bincount(depths, surplus, minlength=most + 2)[2 : most + 2]
