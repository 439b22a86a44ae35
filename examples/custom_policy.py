"""A tree policy of one's own: one trunk, and the runners-up of every node on it.

    python -m examples.custom_policy
    python -m evaluation.compare --policies examples/custom_policy.py:Trunk,opt:0.2 --budgets 24

A policy is a frozen dataclass without state. The pool holds everything that was drafted in this step; the policy reads
it and never writes it.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

import opt_tree
from opt_tree.children import TopK
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class Trunk(TreePolicy):
    """Follow the best child of the best child, and keep the siblings on the way. With `width=2`:

          root
         /    \\
       .6      .3
      /  \\
    .4    .1        the next layer is drafted below .4, if .4 is at least `least`
    """

    nodes: int = 24
    """Drafted nodes sent to the target in a step, at most: the budget, root excluded."""
    width: int = 3
    """Children of every node on the trunk."""
    least: float = 0.1
    """Path probability below which the trunk ends."""

    @property
    def max_depth(self) -> int:
        """Layers drafted at most."""
        return self.nodes // self.width

    @property
    def children(self) -> TopK:
        """The most probable tokens. This type decides which verifiers may judge the tree."""
        return TopK(per_node=self.width)

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        """Return the rows whose children are drafted next, or None to stop."""
        newest = pool.newest
        if not len(newest):
            return None  # the drafter knew nothing
        best = newest[pool.path_log_probs[newest].argmax()]
        return np.array([best]) if pool.path_log_probs[best] >= math.log(self.least) else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        """Return the rows that go to the target: here all of them. A row never comes without its parent."""
        return np.arange(len(pool.tokens))


def main() -> "dict[str, opt_tree.Generation]":
    pair = opt_tree.load_pair("demo", dtype="float32")
    prompt = pair.encode("What does the word lantern mean?")
    answers = {}
    for policy in (Trunk(), opt_tree.OptTree(nodes=Trunk.nodes, threshold=0.2), opt_tree.Static.empty()):
        decoder = opt_tree.Decoder(pair.target, pair.drafter, policy)
        name = type(policy).__name__
        answers[name] = decoder.generate(prompt, max_new_tokens=64)
        print(f"{name:8} {answers[name].mean_acceptance_length:.2f} tokens a step")
    best = max(answers["Trunk"].steps, key=lambda step: step.accepted)
    print(opt_tree.draw_tree(best.tree, pair.tokenizer, best.path))
    return answers


if __name__ == "__main__":
    main()
