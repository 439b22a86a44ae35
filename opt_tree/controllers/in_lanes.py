"""`Auto` for the lanes of a batch: they draft together or not at all, and what trials lose stays small.

Owns whether lanes draft, by what came of it. Trees and their prices are those of `Auto`.
"""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from opt_tree.controllers.auto import Auto
from opt_tree.controllers.base import DECAY
from opt_tree.core.children import Few
from opt_tree.core.meeting import meet
from opt_tree.core.step import Outcome, Step
from opt_tree.policies import Costs, Priced, TreePolicy

SHARE = 0.01
"""Trials may lose this part of all that was decoded."""
STAKE = 2.0
"""Plain steps that a trial is thought to lose: drafters take in the texts, and lanes that draft end apart, so that the
next texts begin one by one."""
PROMISE = 0.1
"""Tokens a step that trees have to promise beyond plain ones where none were drafted."""
ACCEPTED, STEPS = 0.5, 4.0
"""How probable a drafted token is thought to be before any was seen, and for how many steps this counts."""
TEXT = 32.0
"""Rounds that share what drafters take to read the texts, before more is known."""


class InLanes(Auto):
    """What lanes share: in each round all draft, or none.

    It pays for a batch's step: where all lanes draft a row, that is a row of each in the forward. Seconds are the
    batch's and tokens one lane's. Costs are those of as many lanes as are under way.
    """

    def __init__(self, alone: Auto, costs: Costs, lanes: int) -> None:
        """`costs`: of a step of so many `lanes`. It trusts the drafter as `alone` does so far."""
        largest = alone._sizes[-1]
        super().__init__(costs, largest.nodes, largest.max_depth)
        self._accepted, self._expected = alone._accepted.copy(), alone._expected.copy()
        self._layers = alone._layers.copy()
        self._fewest, self._lanes, self._most = alone.costs, 1, lanes
        self._by_lanes: dict[int, Costs] = {}
        self._brought = (STEPS, STEPS * ACCEPTED, STEPS * ACCEPTED, STEPS)
        """Of steps with a tree, discounted: how many, drafted tokens accepted, their squares, and what they cost beyond
        plain ones in parts of what a tree of one node does."""
        self._read = (TEXT, 0.0)
        """Of rounds with a tree, discounted: how many, and the plain steps that drafters took to read texts."""
        self._lost, self._spent, self._stake = 0.0, 0.0, STAKE
        """Plain steps: what drafting lost so far, what all rounds took, and the most that a trial lost."""
        self._drafting = False
        self._round: list[Step] = []
        """Of the round under way: the steps with a tree that are done."""

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        return meet(self.decide, len(context))

    def decide(self, lengths: Sequence[int]) -> TreePolicy:
        """From the lengths of all lanes' contexts to the policy of their next step."""
        before, self._lanes = self._lanes, len(lengths)
        context = sum(lengths) // len(lengths)
        self._now = self._costs(max(before, self._lanes)).at(context)  # some may be reading a text just now
        self._unit = self.costs.at(context).plain / self._now.plain
        policy = self._next()
        if not isinstance(policy, Priced):
            self._go_without()
        return policy

    def _costs(self, lanes: int) -> Costs:
        """Of so many lanes: between those of one and those of the most."""
        if lanes not in self._by_lanes:
            share = (lanes - 1) / (self._most - 1) if self._most > 1 else 1.0
            self._by_lanes[lanes] = self._fewest.between(self.costs, share)
        return self._by_lanes[lanes]

    def _go_without(self) -> None:
        """Keep account of a round without a tree."""
        self._spent += 1
        fading = DECAY**self._lanes
        self._tokens = fading * self._tokens + self._lanes
        self._seconds = fading * self._seconds + self._lanes * self._now.plain * self._unit
        self._fade(self._lanes)

    @property
    def _one_node(self) -> float:
        """What a tree of one node costs beyond a plain step, in plain steps."""
        return max((self._now.score(2) + self._now.draft(1, 0)) / self._now.plain - 1, 0.01)

    def _drafts(self) -> bool:
        """Go on while it pays, or may well pay and has lost little; begin where it should pay, or a trial is cheap."""
        steps, tokens, squares, price = self._brought
        mean = tokens / steps
        error = math.sqrt(max(squares / steps - mean**2, 0.0) / steps)
        worth = mean - price / steps * self._one_node - self._read[1] / self._read[0]
        affordable = SHARE * self._spent - self._lost
        if self._drafting:
            self._drafting = bool(worth > 0 or (worth + error > 0 and affordable > -STAKE))
        else:
            self._drafting = bool(worth > PROMISE or affordable > self._stake)
        return self._drafting

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Learn from a round with trees, when the steps of all lanes that decided together are done."""
        if not isinstance(step.policy, Priced):
            return
        self._round.append(step)
        if len(self._round) < self._lanes:
            return
        steps, self._round = self._round, []
        seconds, read = self._modelled_seconds(steps), self._reading(steps)
        self._weigh_round([len(one.tokens) - 1.0 for one in steps], seconds / self._now.plain, read / self._now.plain)
        for one in steps:
            self._learn(one, step.policy)
        fading = DECAY ** len(steps)
        self._tokens = fading * self._tokens + sum(len(one.tokens) for one in steps)
        self._seconds = fading * self._seconds + len(steps) * seconds * self._unit

    def _weigh_round(self, gains: list[float], cost: float, read: float) -> None:
        """Keep account of what a round with trees brought, for so many plain steps."""
        self._spent += cost + read
        loss = cost + read - 1 - sum(gains) / len(gains)
        self._lost = max(self._lost + loss, 0.0)
        self._stake = max(self._stake, self._lost)
        self._read = 0.97 * self._read[0] + 1, 0.97 * self._read[1] + read
        fading = 0.97 ** (1 / len(gains))  # a round's, so that many lanes are soon sure
        for gain in gains:
            seen = 1.0, gain, gain**2, (cost - 1) / self._one_node
            steps, tokens, squares, price = (fading * old + new for old, new in zip(self._brought, seen, strict=True))
            self._brought = steps, tokens, squares, price

    def _modelled_seconds(self, steps: list[Step]) -> float:
        """Of a round: its forwards are as long as the longest lane's. Without what drafters read of the texts."""
        rows = max(min(step.draft_tokens, len(step.tree)) for step in steps)
        layers = max(max(step.draft_forwards, *step.tree.depths.tolist(), 1) for step in steps)
        return self._now.score(max(len(step.tree) for step in steps)) + self._now.draft(layers, rows - 1)

    def _reading(self, steps: list[Step]) -> float:
        """Seconds in which drafters took in what they had not seen of the texts: a forward as long as the longest."""
        rows = max(step.draft_tokens - len(step.tree) for step in steps)
        read = self._now.layers(max(rows, 0) + 1)
        return float(read[-1] - read[0])
