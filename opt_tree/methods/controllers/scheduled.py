"""Policies in turn: for measuring several in one generation, and as the smallest controller that changes its mind."""

from collections.abc import Iterable

from opt_tree.children import LogProbs
from opt_tree.errors import require
from opt_tree.generation import Outcome, Step
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.target import Output


class Scheduled(TreePolicy):
    """The policies one after the other, a step each, then from the first again. Every prompt begins at the first.

    Two trees by turns, on the same text and the same machine:

        decoder = Decoder(pair.target, pair.drafter, Scheduled([OptTree(12), Eagle2(nodes=12)]))
        answer = decoder.generate(pair.encode("Why is the sky blue?"))
        [(type(step.policy).__name__, len(step.tokens)) for step in answer.steps]
    """

    def __init__(self, policies: Iterable[TreePolicy]) -> None:
        require(Iterable, policies=policies)
        self.policies = tuple(policies)
        for policy in self.policies:
            check_grows(policy)
        if not self.policies:
            raise ValueError("a schedule needs at least one policy")
        self._steps = 0

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self._steps = 0

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        return self.policies[self._steps % len(self.policies)]

    def observe(self, step: Step, outcome: Outcome) -> None:
        self._steps += 1
