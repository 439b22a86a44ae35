"""What every verifier would emit on the trees that one of them judges: the exact expectation, no noise of accepting."""

import time

from evaluation.compare.combinations import VERIFIERS
from opt_tree import Random, Tree, Verdict, Verifier
from opt_tree.core.children import Children
from opt_tree.core.probabilities import probs_of
from opt_tree.core.sampling import Logits, whole
from opt_tree.verifiers import block_efficiency, check


class Expectation:
    """A verifier that also computes, on every n-th tree it judges, how many tokens each valid verifier would emit.

    The same trees for all, and no noise of accepting and rejecting (arXiv:2602.16994). Its own time is in `seconds`.
    """

    def __init__(self, verifier: Verifier, children: Children, every: int) -> None:
        self.__dict__.update(vars(verifier))
        self.__name__ = verifier.__name__
        self.verifier, self.every, self.calls, self.seconds = verifier, every, 0, 0.0
        self.judges = {name: judge for name, judge in VERIFIERS.items() if name != "greedy" and _exact(judge, children)}
        self.values: dict[str, list[float]] = {name: [] for name in self.judges}

    def __call__(self, tree: Tree, logits: Logits, random: Random) -> Verdict:
        if self.calls % self.every == 0:
            begin = time.perf_counter()
            probs = probs_of(whole(logits))
            for name, judge in self.judges.items():
                self.values[name].append(round(block_efficiency(tree, probs, judge), 4))
            self.seconds += time.perf_counter() - begin
        self.calls += 1
        return self.verifier(tree, logits, random)

    def take(self) -> dict[str, list[float]]:
        """Hand out what was computed since the last time."""
        values, self.values = self.values, {name: [] for name in self.judges}
        return values


def _exact(verifier: Verifier, children: Children) -> bool:
    try:
        check(verifier, children)
    except TypeError:
        return False
    return True
