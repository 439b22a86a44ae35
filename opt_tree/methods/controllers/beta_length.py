"""EESD's Beta-TS: the length of a chain by Thompson sampling of its acceptance rate (arXiv:2406.03853).

The numbers drawn here are the controller's own. They decide what is drafted and never touch the randomness that the
tokens are drawn with, so the output stays exact, and with `match` or `greedy` it stays the same text.
"""

import numpy as np

from opt_tree.children import LogProbs
from opt_tree.generation import Outcome, Step
from opt_tree.methods.controllers.registry import ControllerRequest, register
from opt_tree.methods.policies.static import Static
from opt_tree.policy import TreePolicy
from opt_tree.target import Output


class BetaLength(TreePolicy):
    """How long a chain to draft, from a Beta posterior of the acceptance rate (EESD's Beta-TS, arXiv:2406.03853).

    Before each further token a rate is drawn from Beta(a, b), and drafting goes on with that probability; one token is
    drafted at least, `longest` at most. After a step with r of K tokens accepted, a grows by r, and b by 1 if r < K:
    what follows the first rejected token was never judged. Every prompt begins at Beta(1, 1). The paper's text could be
    had to its first page alone, so that its own update may be another one.

        decoder = Decoder(pair.target, pair.drafter, BetaLength(longest=8))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    def __init__(self, longest: int = 8, seed: int = 0) -> None:
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}")
        self.policies = tuple(Static.chain(length) for length in range(1, longest + 1))
        self._numbers = np.random.default_rng(seed)
        self._accepted = self._rejected = 1.0

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._accepted = self._rejected = 1.0

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        length = 1
        draw = self._numbers
        while length < len(self.policies) and draw.random() < draw.beta(self._accepted, self._rejected):
            length += 1
        return self.policies[length - 1]

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._accepted += step.accepted
        self._rejected += step.accepted < step.tree.nodes


@register("beta", about="the length of a chain, by a posterior of the acceptance rate (EESD)", paper="2406.03853")
def _make(path: str, wanted: ControllerRequest) -> BetaLength:
    return BetaLength(wanted.tree.max_depth, seed=wanted.seed)
