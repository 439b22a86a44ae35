"""How many tokens each valid verifier would emit on the trees that one of them judges, computed exactly."""

import time

from evaluation.compare.combinations import verifier_of
from opt_tree import Random, Tree, Verdict, Verifier
from opt_tree.children import Children
from opt_tree.methods.children.draws import probs_of, whole
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.methods.verifiers.walks import block_efficiency
from opt_tree.sampling import Logits
from opt_tree.verify import check


class Expectation:
    """A verifier that also computes, on every n-th tree it judges, how many tokens each valid verifier would emit.

    The same trees for all, and no noise of accepting and rejecting (arXiv:2602.16994). Its own time is `spent`.
    """

    def __init__(self, own: str, children: Children, every: int) -> None:
        """`own` is the name of the verifier that judges."""
        verifier = verifier_of(own)
        self.__dict__.update(vars(verifier))
        self.__name__ = verifier.__name__
        self.verifier, self.every, self.calls, self.seconds = verifier, every, 0, 0.0
        judges = {name: method.make for name, method in VERIFIERS.items()} | {own: verifier}
        self.judges = {
            name: judge for name, judge in judges.items() if not judge.greedy_only and _exact(judge, children)
        }
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

    def spent(self) -> float:
        """Seconds of its own since this was last asked."""
        spent, self.seconds = self.seconds, 0.0
        return spent


def _exact(verifier: Verifier, children: Children) -> bool:
    try:
        check(verifier, children)
    except TypeError:
        return False
    return True
