"""Thompson sampling: draw what each choice may be worth from what was seen of it, and take the best draw.

The numbers drawn here are the controller's own. They decide what is drafted and never touch the randomness that the
tokens are drawn with, so the output stays exact, and with `match` or `greedy` it stays the same text.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from opt_tree.controllers.base import Controller
from opt_tree.controllers.hindsight import tells_of, tokens_of
from opt_tree.controllers.registry import Wanted, register
from opt_tree.core.children import Few
from opt_tree.core.step import Outcome, Step
from opt_tree.core.target import Output
from opt_tree.policies import Costs, Static, TreePolicy

MOST = 2
"""Tokens that a policy is thought to add at most before it was seen, of those that its further layers could add."""


class BetaLength(Controller):
    """How long a chain to draft, from a Beta posterior of the acceptance rate (EESD's Beta-TS, arXiv:2406.03853).

    Before each further token a rate is drawn from Beta(a, b), and drafting goes on with that probability; one token is
    drafted at least, `longest` at most. After a step with r of K tokens accepted, a grows by r, and b by 1 if r < K:
    what follows the first rejected token was never judged. Every prompt begins at Beta(1, 1). The paper's text could be
    had to its first page alone, so that its own update may be another one.

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
    """Which of some policies, by tokens over seconds; any trees, as long as the verifier takes them all.

    A step of a large tree tells of every smaller one inside it as well (`hindsight`). So what is learned of a policy is
    what it adds to the largest of the others inside it, seen on the same steps: a much surer number than what it
    brings in all. Before each step one draw is made of every such number, from a posterior of its mean (Student's t).
    The draws of trees inside one another are summed up, and the policy of most tokens for its seconds is taken.

    Each policy is tried `trials` times first, the last one before the others: put the largest there. What was seen is
    kept from prompt to prompt, and counts less by `decay` with every step: 0.999 remembers about 1,000 steps. 0.99
    follows a change of text sooner, and costs up to 2 % where nothing changes.
    Over the first 500 steps, trying costs 1 to 5 % of the best policy's speed, most where forwards are cheap.

    Which policy is taken depends on the clock: with verifiers of sampled children the text of a seed then differs from
    run to run, and its distribution does not. With `costs` the seconds are modelled ones, and nothing depends on the
    clock.

    Bandits choose elsewhere, too: a configuration in BanditSpec (arXiv:2505.15141), a rule for the draft length in
    TapOut (arXiv:2511.02017).

        arms = [Static.empty(), OptTree(6, 0.45), OptTree(12, 0.45), OptTree(24, 0.3)]
        answer = Decoder(pair.target, pair.drafter, Thompson(arms)).generate(pair.encode("Why is the sky blue?"))
        collections.Counter(step.policy.nodes for step in answer.steps)
    """

    def __init__(
        self,
        policies: Iterable[TreePolicy],
        seed: int = 0,
        trials: int = 1,
        decay: float = 0.999,
        costs: Costs | None = None,
    ) -> None:
        self.policies = tuple(policies)
        if not self.policies:
            raise ValueError("there must be at least one policy to choose from")
        if trials < 1 or not 0 < decay <= 1:
            raise ValueError(f"trials must be at least 1 and decay in (0, 1], got {trials} and {decay}")
        self.trials, self.decay, self.costs = trials, decay, costs
        self._numbers = np.random.default_rng(seed)
        arms = range(len(self.policies))
        self._told = [[arm for arm in arms if tells_of(self.policies[arm], drawn)] for drawn in self.policies]
        self._base = [self._largest_inside(arm) for arm in arms]
        self._inside = np.zeros((len(arms), len(arms)))
        """Of each policy: those whose additions are summed up to its tokens. The empty tree adds nothing."""
        for arm in sorted(arms, key=lambda arm: len(self._told[arm])):
            base = self._base[arm]
            if base is not None:
                self._inside[arm] = self._inside[base]
            self._inside[arm, arm] = self.policies[arm].max_depth > 0
        self._chosen = 0
        self._tried = np.zeros(len(arms), dtype=np.int64)
        # Discounted sums. Of each policy's own steps: how many, and their seconds.
        self._own = np.zeros((2, len(arms)))
        # Of all steps that tell of it: how many, what it added, its squares. One step is made up: half of it adds
        # nothing, half as much as is thought possible.
        self._added = np.zeros((3, len(arms)))
        most = np.array([min(self._layers(arm), MOST) for arm in arms])
        self._made_up = np.stack([np.ones(len(arms)), most / 2, most**2 / 2])

    def _largest_inside(self, arm: int) -> int | None:
        """The policy that this one adds to: of those that its steps tell of, the one that tells of most itself."""
        told = self._told
        return max(
            (one for one in told[arm] if len(told[one]) < len(told[arm])), key=lambda one: len(told[one]), default=None
        )

    def _layers(self, arm: int) -> int:
        """By how many a policy is deeper than the one inside; at least one, as it may also be wider."""
        base = self._base[arm]
        return max(self.policies[arm].max_depth - (0 if base is None else self.policies[base].max_depth), 1)

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        self._now = None if self.costs is None else self.costs.at(len(context))
        if self._tried.min() < self.trials:
            self._chosen = len(self._tried) - 1 - int(self._tried[::-1].argmin())
        else:
            steps, added, squares = self._added + self._made_up
            mean = added / steps
            error = np.sqrt((squares / steps - mean**2) / steps)
            tokens = 1 + self._inside @ (mean + error * self._numbers.standard_t(steps))
            own, seconds = self._own
            self._chosen = int((tokens * own / seconds).argmax())
        return self.policies[self._chosen]

    def observe(self, step: Step, outcome: Outcome) -> None:
        seconds = step.times.total if self._now is None else self._now.of(step)
        self._tried[self._chosen] += 1
        own = self._own[:, self._chosen]
        own *= self.decay
        own += 1, seconds
        tokens = {arm: tokens_of(self.policies[arm], step) for arm in self._told[self._chosen]}
        self._added *= self.decay
        for arm, brought in tokens.items():
            base = self._base[arm]
            more = brought - (1 if base is None else tokens[base])
            self._added[:, arm] += 1, more, more**2


@register("beta", about="the length of a chain, by a posterior of the acceptance rate (EESD)", paper="2406.03853")
def _make_beta(path: str, wanted: Wanted) -> BetaLength:
    return BetaLength(wanted.tree.max_depth, seed=wanted.seed)


@register("thompson", about="no tree, a quarter of the tree, half of it or all, by tokens over seconds drawn")
def _make_thompson(path: str, wanted: Wanted) -> Thompson:
    sizes = sorted({max(wanted.tree.nodes // part, 1) for part in (4, 2, 1)})
    trees = [replace(wanted.tree, nodes=nodes) for nodes in sizes]
    return Thompson([Static.empty(), *trees], wanted.seed, costs=wanted.costs(1))
