"""EESD's calibrated Thompson sampling of a chain's length (arXiv:2406.03853), as far as its description goes.

The paper draws whether to go on from what the drafting model predicts of a token, corrected by a normal posterior of
what was sampled. Only the first page of its text could be had, so that the update below is written from descriptions of
others and may differ: here the exit's own probability of a token is the prediction, and the posterior is that of its
mean error.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from opt_tree.children import LogProbs
from opt_tree.generation import Outcome, Step
from opt_tree.methods.controllers.registry import ControllerRequest, register
from opt_tree.methods.policies.threshold_chain import Chain
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.target import Output


@dataclass(frozen=True)
class ScoredChain(Chain):
    """Draft on while the drafter gives its newest token enough probability, depth by depth.

    `ScoredChain(4, (0.3, 0.8, 0.1))`, probabilities of the tokens (not of their paths):

        root - .6 - .7        .6 >= .3: on; .7 < .8: nothing is drafted below it
    """

    least: tuple[float, ...] = field(default=(), compare=False)
    """Least probability of the token at depth 1, 2, ... for one more below it; what is not named is 0."""

    def goes_on(self, pool: CandidatePool) -> bool:
        row = pool.newest[0]
        least = self.least[pool.depth - 1] if pool.depth <= len(self.least) else 0.0
        return math.exp(pool.path_log_probs[row] - pool.path_log_probs[pool.parents[row]]) >= least


class CalibratedLength(TreePolicy):
    """How long a chain to draft: by the drafter's probability of each token, and how far it was off so far.

    Behind a token of probability m drafting goes on with probability m + e, cut to [0, 1], e drawn for each token from
    a normal posterior of the mean error. An error is 1 - m of an accepted token and -m of the first rejected one; what
    follows that one was never judged. One token is drafted at least, `longest` at most. Every prompt begins with one
    made-up error of 0, whose variance is 1/4.

        decoder = Decoder(pair.target, pair.drafter, CalibratedLength(longest=8))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    def __init__(self, longest: int = 8, seed: int = 0) -> None:
        self.chain = ScoredChain(longest)
        self.policies = (self.chain,)
        self._numbers = np.random.default_rng(seed)
        self.begin([], None)

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._errors: Float[np.ndarray, " 3"] = np.array([1.0, 0.0, 0.25])
        """How many errors were seen, their sum, and that of their squares."""

    def posterior(self) -> tuple[float, float]:
        """Return mean and standard deviation of the drafter's mean error."""
        count, total, squares = self._errors
        mean = total / count
        return float(mean), math.sqrt(max(squares / count - mean**2, 0.0) / count)

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        depths = self.chain.nodes - 1
        errors = self._numbers.normal(*self.posterior(), depths)
        # u < m + e, with what is drawn on one side: the policy sees m only while it drafts.
        return replace(self.chain, least=tuple((self._numbers.random(depths) - errors).tolist()))

    def observe(self, step: Step, outcome: Outcome) -> None:
        judged = min(step.accepted + 1, step.tree.nodes)
        said = np.exp(np.diff(step.tree.path_log_probs)[:judged])
        errors: Float[np.ndarray, " judged"] = (np.arange(judged) < step.accepted) - said
        self._errors += judged, errors.sum(), (errors**2).sum()


@register(
    "calibrated", about="the length of a chain, by the drafter's probabilities and their error", paper="2406.03853"
)
def _make(path: str, wanted: ControllerRequest) -> CalibratedLength:
    return CalibratedLength(wanted.tree.max_depth, wanted.seed)
