"""Thompson sampling: draw what each choice may be worth from what was seen of it, and take the best draw.

The numbers drawn here are the controller's own. They decide what is drafted and never touch the randomness that the
tokens are drawn with, so the output stays exact, and with `match` or `greedy` it stays the same text.
"""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.children import Few
from opt_tree.controllers.base import Controller
from opt_tree.controllers.hindsight import tells_of, tokens_of
from opt_tree.policies import Costs, Static, TreePolicy
from opt_tree.step import Outcome, Step
from opt_tree.target import Output

BOOTSTRAPS = 64


class BetaLength(Controller):
    """How long a chain to draft, from a Beta posterior of the acceptance rate (EESD's Beta-TS, arXiv:2406.03853).

    Before each further token a rate is drawn from Beta(a, b), and drafting goes on with that probability; one token is
    drafted at least, `longest` at most. After a step with r of K tokens accepted, a grows by r, and b by 1 if r < K:
    what follows the first rejected token was never judged. Every prompt begins at Beta(1, 1).

        decoder = Decoder(pair.target, pair.drafter, BetaLength(longest=8))
        [step.tree.nodes for step in decoder.generate(pair.encode("Why is the sky blue?")).steps]
    """

    def __init__(self, longest: int = 8, chain: Callable[[int], TreePolicy] = Static.chain, seed: int = 0) -> None:
        """`chain` makes the policy of a length: `Static.chain`, or `Sampled.chain` where children are drawn."""
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}")
        self.policies = tuple(chain(length) for length in range(1, longest + 1))
        self._numbers = np.random.default_rng(seed)
        self._accepted = self._rejected = 1.0

    def reset(self, prompt: list[int], output: Output | None) -> None:
        self._accepted = self._rejected = 1.0

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        length = 1
        while length < len(self.policies) and self._numbers.random() < self._rate():
            length += 1
        return self.policies[length - 1]

    def _rate(self) -> float:
        return self._numbers.beta(self._accepted, self._rejected)

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._accepted += step.accepted
        self._rejected += step.accepted < step.tree.nodes


class Thompson(Controller):
    """Which of some policies, by tokens against seconds; any trees, as long as the verifier takes them all.

    A step is worth its tokens less what its time would have brought at the rate so far: tokens - rate * seconds. What
    is seen is summed up 64 times, each time with other random weights of the steps; a step follows one of these sums,
    and takes the policy that is worth most in it (a bootstrap in place of a posterior, arXiv:1410.4009). A step of a
    large tree tells of every smaller one inside it as well (`hindsight`). Hence each policy is tried `trials` times
    first, the last one before the others: put the largest there. What was seen counts less by `decay` with every step,
    so that a change of text is followed, and it is kept from prompt to prompt.

    Which policy is taken depends on the clock: with verifiers of sampled children the text of a seed then differs from
    run to run, and its distribution does not. With `costs` the seconds are modelled ones, and nothing depends on the
    clock.

        arms = [Static.empty(), OptTree(6, 0.45), OptTree(12, 0.45), OptTree(24, 0.3)]
        answer = Decoder(pair.target, pair.drafter, Thompson(arms)).generate(pair.encode("Why is the sky blue?"))
        collections.Counter(step.policy.nodes for step in answer.steps)
    """

    def __init__(
        self,
        policies: Iterable[TreePolicy],
        seed: int = 0,
        trials: int = 1,
        decay: float = 0.99,
        costs: Costs | None = None,
    ) -> None:
        self.policies = tuple(policies)
        if not self.policies:
            raise ValueError("there must be at least one policy to choose from")
        if trials < 1 or not 0 < decay <= 1:
            raise ValueError(f"trials must be at least 1 and decay in (0, 1], got {trials} and {decay}")
        self.trials, self.decay, self.costs = trials, decay, costs
        self._numbers = np.random.default_rng(seed)
        arms = len(self.policies)
        self._told = [[arm for arm in range(arms) if tells_of(self.policies[arm], drawn)] for drawn in self.policies]
        self._chosen = 0
        self._tried = np.zeros(arms, dtype=np.int64)
        # Discounted sums. Of each policy's own steps:
        self._steps, self._seconds, self._emitted = np.zeros((3, arms))
        # And of all steps that tell of it, in each bootstrap:
        self._weights, self._tokens = np.zeros((2, BOOTSTRAPS, arms))
        # A made-up step for each, so that no policy is given up after one bad step (arXiv:1507.00300).
        self._prior = self._numbers.standard_normal((BOOTSTRAPS, arms))

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        self._now = None if self.costs is None else self.costs.at(len(context))
        if self._tried.min() < self.trials:
            self._chosen = len(self._tried) - 1 - int(self._tried[::-1].argmin())
        else:
            one = self._numbers.integers(BOOTSTRAPS)
            weights = self._weights[one]
            worth = self._tokens[one] - weights * self.rate * self._seconds / self._steps
            self._chosen = int(((worth + self._prior[one]) / (weights + 1)).argmax())
        return self.policies[self._chosen]

    @property
    def rate(self) -> float:
        """Tokens a second over all steps, newer ones counting more."""
        return float(self._emitted.sum() / self._seconds.sum())

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._tried[self._chosen] += 1
        for sums in (self._steps, self._seconds, self._emitted, self._weights, self._tokens):
            sums *= self.decay
        self._steps[self._chosen] += 1
        self._emitted[self._chosen] += len(step.tokens)
        self._seconds[self._chosen] += step.times.total if self._now is None else self._now.of(step)
        weights = self._numbers.exponential(size=BOOTSTRAPS)
        for arm in self._told[self._chosen]:
            self._weights[:, arm] += weights
            self._tokens[:, arm] += weights * tokens_of(self.policies[arm], step)
