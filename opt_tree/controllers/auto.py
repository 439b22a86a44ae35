"""The tree for this machine: what a second is worth is learned, and every node and layer has to pay for its seconds.

Nothing is tuned by hand. What steps cost is measured once (`opt_tree.pricing`); how far the drafter's probabilities can
be trusted, how much a further layer brings and how many tokens a second come out is learned from the steps.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.children import Few
from opt_tree.controllers.base import Controller
from opt_tree.policies import Costs, Priced, Static, TreePolicy
from opt_tree.policies.priced import KNOTS
from opt_tree.step import Outcome, Step

PRIOR = 3.0
"""Expected tokens that a knot's first factor, that of the next more probable one, counts for."""
LAYER_PRIOR = np.array([[2.0], [1.4]])
"""Surplus of a layer and of the one below it before any was seen."""
PATIENCE = (8, 128)
"""Steps without a tree before drafting is tried again: at first, and at most, after trials that did not pay."""


class Auto(Controller):
    """Chooses nodes and layers by their price, and no tree at all where drafting does not pay.

    The rate is tokens over *modelled* seconds, so that the same text is always decoded by the same trees, however busy
    the machine is. What was learned is kept from prompt to prompt.

        decoder = Decoder(pair.target, pair.drafter, Auto(Costs(5.4e-3, 5.5e-3, 1e-4, 1e-3, 3e-5)))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    def __init__(self, costs: Costs, nodes: int = 64, max_depth: int = 10, decay: float = 0.99) -> None:
        """At most `nodes` a tree and `max_depth` layers; a step counts `decay` times as much as the next one."""
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.costs, self.decay = costs, decay
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
        self._drafted = np.array([1.0, 0.0, 1.0])  # steps with a tree, what they were worth, and its squares
        self._patience, self._waited = PATIENCE[0], 0

    def __str__(self) -> str:
        largest = self._sizes[-1]
        return f"Auto, at most {largest.nodes} nodes and {largest.max_depth} layers"

    @property
    def rate(self) -> float:
        """Tokens a second, by the modelled seconds of the steps so far."""
        return self._tokens / self._seconds

    @property
    def trust(self) -> tuple[float, ...]:
        """What the path log-probabilities of `KNOTS` have turned out to be.

        By probability, not by depth: that is what the demo drafters are wrong by (RESULTS.md).
        """
        factor, factors = 1.0, []
        for accepted, expected in zip(self._accepted[::-1], self._expected[::-1], strict=True):
            factor = (accepted + PRIOR * factor) / (expected + PRIOR)
            factors.append(factor)
        logs = np.minimum(np.array(KNOTS) + np.log(factors[::-1]), 0.0)
        return tuple(np.maximum.accumulate(logs).tolist())

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        self._now = self.costs.at(len(context))
        if self._waited < self._patience and self._best_guess() < 1 - self.rate * self._now.plain:
            return self._empty
        carry = tuple((self._layers[1] / self._layers[0]).tolist())
        policy = next((one for one in self._sizes if one.nodes >= 1.5 * self._need), self._sizes[-1])
        return replace(policy, rate=self.rate, context=len(context), trust=self.trust, carry=carry)

    def _best_guess(self) -> float:
        """What a step with a tree may well be worth: its mean and one standard error."""
        steps, worth, squares = self._drafted
        return worth / steps + np.sqrt((squares / steps - (worth / steps) ** 2) / steps)

    def observe(self, step: Step, outcome: Outcome) -> None:
        layers = max(step.draft_forwards, int(step.tree.depths.max()))  # tables draft without forwards
        seconds = self._now.score(len(step.tree)) + self._now.draft(layers, step.draft_tokens)
        tokens = len(step.tokens)
        if isinstance(step.policy, Priced):
            self._weigh(tokens - self.rate * seconds)
            self._learn(step, step.policy, layers)
        else:
            self._waited += 1
            for sums in (self._expected, self._accepted):  # what is not looked at fades
                sums *= self.decay
        self._tokens = self.decay * self._tokens + tokens
        self._seconds = self.decay * self._seconds + seconds

    def _weigh(self, worth: float) -> None:
        """Note what a step with a tree was worth, and how soon to try again where they are worth less than none."""
        if self._waited:
            pays = worth > 1 - self.rate * self._now.plain
            self._patience = PATIENCE[0] if pays else min(2 * self._patience, PATIENCE[1])
        self._waited = 0
        self._drafted = 0.97 * self._drafted + (1.0, worth, worth**2)

    def _learn(self, step: Step, policy: Priced, layers: int) -> None:
        """Compare what the tree's probabilities said with what was accepted, and a layer with the one above it."""
        logs, depths = step.tree.path_log_probs[1:], step.tree.depths[1:]
        self._need += 0.1 * (len(logs) - self._need)
        accepted = np.zeros(len(logs))
        accepted[np.array(step.path[1:], dtype=int) - 1] = 1
        knots = np.abs(logs[:, None] - np.array(KNOTS)).argmin(1)
        for sums, values in ((self._expected, np.exp(logs)), (self._accepted, accepted)):
            sums *= self.decay
            sums += np.bincount(knots, values, minlength=len(KNOTS))
        surplus = np.maximum(policy.surplus(logs), 0)
        by_depth = np.bincount(depths, surplus, minlength=self._layers.shape[1] + 1)[1:]
        seen = min(layers, len(by_depth)) - 1
        if seen > 0:  # layers below which there was another one
            self._layers[:, :seen] *= self.decay
            self._layers[:, :seen] += np.stack([by_depth[:seen], by_depth[1 : seen + 1]])
