"""The tree for this machine: what a second is worth is learned, and every node and layer has to pay for its seconds.

Nothing is tuned by hand. What steps cost is measured once (`opt_tree.tools.step_costs`); how far the drafter's
probabilities can be trusted, how much a further layer brings and how many tokens a second come out is learned from the
steps.
"""

import math
from dataclasses import replace

import numpy as np

from opt_tree.children import LogProbs
from opt_tree.errors import counted
from opt_tree.generation import Outcome, Step
from opt_tree.methods.controllers.registry import ControllerRequest, register
from opt_tree.methods.policies.costs import DECAY, Costs
from opt_tree.methods.policies.priced import KNOTS, Priced
from opt_tree.methods.policies.static import Static
from opt_tree.policy import TreePolicy

PRIOR = 3.0
"""Expected tokens that a knot's first factor, that of the next more probable one, counts for."""
LAYER_PRIOR = np.array([[2.0], [1.4]])
"""Surplus of a layer and of the one below it before any was seen."""
PATIENCE = (8, 128)
"""Steps without a tree before drafting is tried again: at first, and at most, after trials that did not pay."""

_BETWEEN = (np.array(KNOTS[1:]) + KNOTS[:-1]) / 2
"""From the middle between two knots on, a probability teaches about the higher one."""


class Auto(TreePolicy):
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
    ) -> None:
        """At most `nodes` a tree and `max_depth` layers. `costs`: those of this target, drafter and machine."""
        self.costs = costs
        self._empty = Static.empty()
        # Picking children costs by the budget, so a budget not far above the need is chosen.
        self._sizes = tuple(Priced(costs, size, max_depth) for size in (8, 16, 32) if size < nodes)
        self._sizes += (Priced(costs, nodes, max_depth),)
        self.policies = (self._empty, *self._sizes)
        self._now, self._need = costs, 8.0
        # Discounted sums; before anything was seen, 6 steps at half again plain decoding's speed.
        self._tokens, self._seconds = 9.0, 6 * costs.plain
        self._accepted, self._expected = np.zeros((2, len(KNOTS)))  # nodes by knot: accepted, and as trees promised
        # Column d - 1, over the steps that drafted a layer below layer d: the surplus of layer d, and of that one.
        self._layers = np.repeat(LAYER_PRIOR, max_depth, 1)
        self._drafted = (1.0, 0.0, 1.0)  # steps with a tree, what they brought beyond plain decoding, its squares
        self._patience, self._waited = PATIENCE[0], 0

    def __str__(self) -> str:
        largest = self._sizes[-1]
        return f"Auto, at most {counted(largest.nodes, 'node')} and {counted(largest.max_depth, 'layer')}"

    @property
    def rate(self) -> float:
        """Tokens a second, by the modelled seconds of the steps so far; plain decoding's at least."""
        return max(self._tokens / self._seconds, 1 / self._now.plain)

    @property
    def trust(self) -> tuple[float, ...]:
        """What the path log-probabilities of `KNOTS` have turned out to be.

        By probability, not by depth: that is what the demo drafters are wrong by.
        """
        factor, factors = 1.0, []
        for accepted, expected in zip(self._accepted[::-1].tolist(), self._expected[::-1].tolist(), strict=True):
            factor = (accepted + PRIOR * factor) / (expected + PRIOR)
            factors.append(factor)
        logs = np.minimum(np.array(KNOTS) + np.log(factors[::-1]), 0.0)
        return tuple(np.maximum.accumulate(logs).tolist())

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        self._now = self.costs.at(len(context))
        if not self._drafts():
            return self._empty
        carry = tuple((self._layers[1] / self._layers[0]).tolist())
        policy = next((one for one in self._sizes if one.nodes >= 1.5 * self._need), self._sizes[-1])
        return replace(policy, now=self._now, rate=self.rate, trust=self.trust, carry=carry)

    def _drafts(self) -> bool:
        """Whether a step with a tree may well bring more than plain decoding: at the mean and one standard error.

        Where it does not, that is tried again after `_patience` steps.
        """
        steps, worth, squares = self._drafted
        guess = worth / steps + math.sqrt(max(squares / steps - (worth / steps) ** 2, 0.0) / steps)
        return bool(guess >= 0 or self._waited >= self._patience)

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Learn what a step's tokens and its seconds say of the rate, and of what drafting brings."""
        seconds = self._now.of(step)
        if isinstance(step.policy, Priced):
            self._compare(len(step.tokens) - seconds / self._now.plain)
            self._learn(step, step.policy)
        else:
            self._waited += 1
            for sums in (self._expected, self._accepted):  # what is not looked at fades
                sums *= DECAY
        self._tokens = DECAY * self._tokens + len(step.tokens)
        self._seconds = DECAY * self._seconds + seconds

    def _compare(self, worth: float) -> None:
        """Note what a step with a tree brought beyond plain decoding, and how soon to try again if that is too little.

        Not at the rate so far: at one that is too high the shortest step looks best, and nothing would mend it.
        """
        if self._waited:
            self._patience = PATIENCE[0] if worth > 0 else min(2 * self._patience, PATIENCE[1])
        self._waited = 0
        steps, mean, squares = self._drafted
        self._drafted = 0.97 * steps + 1, 0.97 * mean + worth, 0.97 * squares + worth**2

    def _learn(self, step: Step, policy: Priced) -> None:
        """Learn how large trees are, which nodes were accepted, and what each layer and the next was worth."""
        self._need += 0.1 * (step.tree.nodes - self._need)
        logs, depths = step.tree.path_log_probs[1:], step.tree.depths[1:]
        accepted = np.zeros(len(logs))
        accepted[[row - 1 for row in step.path[1:]]] = 1
        knots = _BETWEEN.searchsorted(logs)
        for sums, values in ((self._expected, np.exp(logs)), (self._accepted, accepted)):
            sums *= DECAY
            sums += np.bincount(knots, values, minlength=len(KNOTS))
        surplus = np.maximum(policy.surplus(logs), 0)
        # Layers that were drafted: also those of which no node was selected, and a table's, which are no forwards.
        layers = max(step.draft_forwards, *step.tree.depths.tolist())
        below = depths < layers  # nodes of a layer that had another one below it
        most = self._layers.shape[1]
        # A layer's sums fade by the steps alone that say something of it.
        self._layers[:, : max(layers - 1, 0)] *= DECAY
        self._layers[0] += np.bincount(depths[below], surplus[below], minlength=most + 1)[1 : most + 1]
        self._layers[1] += np.bincount(depths, surplus, minlength=most + 2)[2 : most + 2]


@register("auto", about="nodes and layers by what they cost on this machine, no tree where drafting does not pay")
def _make(path: str, wanted: ControllerRequest) -> Auto:
    return Auto(wanted.costs(), wanted.tree.nodes, wanted.tree.max_depth)
