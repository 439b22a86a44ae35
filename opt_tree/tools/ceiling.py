"""The ceiling of a tree: how many tokens a verifier that is exact given the tree can emit on it at most, and where the
target's mass leaves it.

Source: arXiv:2610.11750, theorem 1. The target's text goes down the tree as far as the tree has it, with probability
P(u) through row u: 1 at the root, P(parent) p(token of u | path to its parent) below. No rule that is exact whatever
tree it is given accepts a row more often, so it emits the sum of all P at most; `match` emits just that, at temperature
0 `greedy`. The bound says nothing of rules that are exact over the drawing of the tree (`traversal`, `multi_round` and
all others on drawn children): their trees tell them what else could have been drawn.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from opt_tree.children import LogProbs
from opt_tree.errors import require
from opt_tree.generation import Outcome, Step
from opt_tree.methods.children.draws import probs_of, whole
from opt_tree.policy import TreePolicy
from opt_tree.sampling import Logits, Temperature
from opt_tree.target import Output
from opt_tree.tree import Tree, fetch, send


@dataclass(frozen=True, eq=False)
class Ceiling:
    """What a tree allows, in the tree's rows. Of equal siblings the first one's row stands for all."""

    reached: Float[np.ndarray, " rows"]
    """The probability that the target's text passes through the row."""
    left: Float[np.ndarray, " rows"]
    """The probability that it leaves the tree there: that it comes to the row and goes on with none of its children."""

    @property
    def tokens(self) -> float:
        """Tokens of the step at most, in expectation, the target's own included."""
        return float(self.reached.sum())


def ceiling(tree: Tree, logits: Logits, greedy: bool = False) -> Ceiling:
    """Return the ceiling of a tree. `logits`: processed ones of every row; `greedy`: their argmax is certain."""
    above, tokens = tree.parents[1:], tree.tokens[1:]
    inner, places = np.unique(above, return_inverse=True)
    rows = whole(logits)
    rows = rows[send(inner, rows.device)]
    if greedy:
        (choice,) = fetch(rows.argmax(-1))
        likely = (choice[places] == tokens).astype(np.float64)
    else:
        (likely,) = fetch(probs_of(rows)[send(places, rows.device), send(tokens, rows.device)])
    reached, left = np.zeros(len(tree)), np.zeros(len(tree))
    reached[0] = left[0] = 1.0
    node, first = [0], dict[tuple[int, int], int]()  # of each row: the first one that carries the same tokens
    for row, (parent, token, share) in enumerate(zip(above.tolist(), tokens.tolist(), likely, strict=True), start=1):
        node.append(first.setdefault((node[parent], token), row))
        if node[row] == row:
            reached[row] = left[row] = reached[node[parent]] * share
            left[node[parent]] -= reached[row]
    return Ceiling(reached, left.clip(0))  # below 0 by rounding only


class Ceilings(TreePolicy):
    """Chooses as another policy does, and keeps the ceiling of each step's tree in `found`, anew for each text.

    Texts, trees and verdicts stay as they are. What it computes, the target's whole distribution at every node, is in
    the text's seconds and in no step's.

        policy = Ceilings(OptTree(12), Sampling(1.0))
        answer = Decoder(target, drafter, policy).generate(prompt, sampling=policy.sampling)
        sum(one.tokens for one in policy.found) / len(answer.steps)
    """

    def __init__(self, policy: TreePolicy, sampling: Temperature) -> None:
        require(TreePolicy, policy=policy)
        require(Temperature, sampling=sampling)
        self.policy, self.sampling = policy, sampling
        self.policies, self.features, self.reads_root = policy.policies, policy.features, policy.reads_root
        self.found: list[Ceiling] = []
        self._context: list[int] = []

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self.found = []
        self.policy.begin(prompt, prefill)

    def choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        self._context = context
        return self.policy.choose(context, root)

    def observe(self, step: Step, outcome: Outcome) -> None:
        scores = self.sampling.process(outcome.logits, outcome.tree, self._context)
        self.found.append(ceiling(outcome.tree, scores, self.sampling.greedy))
        self.policy.observe(step, outcome)
