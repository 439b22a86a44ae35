"""Importance-weighted selection: choose one child so that its distribution comes close to p, then judge that one."""

import itertools
import warnings

import numpy as np
from jaxtyping import Float, Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.verifiers.naive_tree import first_child
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for

CONTESTED = 5
"""Tokens whose pairs are settled by the linear programme; the others by the order of their need. n of them are
n (n - 1) / 2 variables. `khisti` accepts more with more of them: `python -m experiments.contested`."""


class Duel:
    """Which of two tokens survives, one drawn from `first`, the other from `second`; and how the winner is distributed.

    Tokens are ordered by need, p - first * second: how much of p is missing if they only ever meet themselves. The
    needier of two wins, except between the `contested` neediest, where a coin is tossed whose weights maximise
    sum min(p, winner), the probability of accepting the winner (the truncated linear programme of arXiv:2410.18234).
    Whatever the coins, `winner` is the distribution that they lead to: the solver decides how good the selection is,
    not whether it is exact.
    """

    def __init__(self, target: Probs, first: Probs, second: Probs, contested: int = CONTESTED) -> None:
        order = np.argsort(second * first - target, kind="stable")
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        a, b = first[order], second[order]
        # Sums of what is not negative: a token of little probability keeps all its digits, which a difference loses.
        behind_a, behind_b = (np.append(probs[::-1].cumsum()[::-1][1:], 0.0) for probs in (a, b))
        size = min(contested, len(order))
        meet = np.outer(a[:size], b[:size])
        meet = np.triu(meet + meet.T, 1)
        # A token meets itself, or wins against everything behind the contested ones, or behind itself.
        certain = a * b + a * behind_b + b * behind_a
        certain[:size] = a[:size] * b[:size] + a[:size] * behind_b[size - 1] + b[:size] * behind_a[size - 1]
        weights = _best_weights(target[order][:size], certain[:size], meet)
        self._wins = np.triu(np.ones((size, size)) if weights is None else weights, 1)
        """[i, j], i < j: probability that place i beats place j."""
        winner = certain
        winner[:size] += (meet * self._wins).sum(1) + (meet * (1 - self._wins)).sum(0)
        self.winner = np.empty_like(winner)
        self.winner[order] = winner

    def chance(self, one: int, other: int) -> float:
        """The probability that token `one` survives a duel with `other`."""
        i, j = int(self._place[one]), int(self._place[other])
        if i > j:
            return 1 - self.chance(other, one)
        return float(self._wins[i, j]) if i < j < len(self._wins) else 1.0


def _best_weights(
    target: Float[np.ndarray, " contested"],
    certain: Float[np.ndarray, " contested"],
    meet: Float[np.ndarray, "contested contested"],
) -> Float[np.ndarray, "contested contested"] | None:
    """Maximise sum min(p, winner) over the chances [i, j] that i beats j; None if the solver gives up.

    `certain`: what a token wins without the contested duels; `meet`: probability that two contested tokens meet.
    """
    from scipy.optimize import linprog  # a fifth of a second to import, for this verifier only

    pairs = [(i, j) for i, j in itertools.combinations(range(len(target)), 2) if meet[i, j] > 0]
    if not pairs:
        return None
    # Variables: the pairs' weights w, then accepted_i <= min(p_i, certain_i + wins); maximise the sum of the latter.
    wins = np.zeros((len(target), len(pairs)))
    constant = certain.copy()
    for column, (i, j) in enumerate(pairs):
        wins[i, column] += meet[i, j]
        wins[j, column] -= meet[i, j]
        constant[j] += meet[i, j]
    objective = np.concatenate([np.zeros(len(pairs)), -np.ones(len(target))])
    bounds = [(0.0, 1.0)] * len(pairs) + [(0.0, float(p)) for p in target]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an ill-conditioned programme; the status says whether it was solved
        solution = linprog(objective, np.hstack([-wins, np.eye(len(target))]), constant, bounds=bounds, method="highs")
    if solution.status != 0 or not np.isfinite(solution.x).all():
        return None
    weights = np.ones_like(meet)
    # Any weights will do, so those that are 0 or 1 up to the solver's tolerance may as well be.
    for (i, j), weight in zip(pairs, np.clip(solution.x.round(9), 0, 1), strict=False):
        weights[i, j] = weight
    return weights


def tournament(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Select one child by successive duels, then accept it by speculative sampling against the winner's distribution.

    arXiv:2410.18234: importance-weighted selection, then single-draft sampling (its two-step decomposition). More than
    two children meet in rounds, the winner so far against the next one.
    """
    holds, chances = draft, {int(tokens[0]): 1.0}
    for token in map(int, tokens[1:]):
        duel = Duel(target, holds, draft)
        holds = duel.winner
        survives = {
            holder: chance * duel.chance(holder, token) for holder, chance in chances.items() if holder != token
        }
        survives[token] = 1 - sum(survives.values())
        chances = survives
    return sum(  # type: ignore[return-value]
        (chance * first_child(target, holds, np.array([holder])) for holder, chance in chances.items() if chance > 0),
        start=np.zeros_like(target),
    )


@register("khisti", about="selects one child by importance weights, then judges that one", paper="2410.18234")
@valid_for(IID)
@computes(branching=tournament)
def khisti(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Select one of several independent children by a linear programme, then judge it by speculative sampling.

    With two children and the programme over all pairs no rule accepts more; it is over the pairs of `CONTESTED` tokens,
    as many as in the paper, which keeps the 40 likeliest. Of thousands of tokens `multi_round` accepts more, of the
    ten likeliest (`Sampling(1.0, top_k=10)`) less. Where the solver fails the needier of two tokens wins: less is
    accepted, the distribution stays exact. Example, p = (.2, .5, .3), q = (.6, .3, .1), two children:

        need p - q q = (-.16, .41, .29): b, then c, then a.   By that order alone the winner's distribution is
        a: .36,   b: .09 + 2 * .3 * .7 = .51,   c: .01 + 2 * .1 * .6 = .13;   sum min(p, winner) = .2 + .5 + .13 = .83
        the programme lets c win against b, which has more than it needs: (.36, .45, .19), and .84 is accepted

        Decoder(pair.target, pair.drafter, Sampled.kary(2, 3), khisti).generate(ids, sampling=Sampling(1.0))
    """
    return walk_down(tree, logits, random, tournament)
