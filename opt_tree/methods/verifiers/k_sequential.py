"""K-sequential selection: all children against one threshold, chosen so that what they take never exceeds p."""

import numpy as np
from jaxtyping import Int

from opt_tree.methods.children.iid import IID
from opt_tree.methods.verifiers.registry import register
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import walk_down
from opt_tree.sampling import Logits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, valid_for


def sequential(target: Probs, draft: Probs, tokens: Int[np.ndarray, " children"]) -> Probs:
    """Accept each child x in turn with probability min(1, p(x) / (rho q(x))); at the end draw from the residual.

    arXiv:2310.15141, Alg. 3. With beta = sum min(p / rho, q), the k children together emit min(p / rho, q) * gamma,
    gamma = (1 - (1 - beta)^k) / beta; it is at most p exactly if gamma <= rho, and the residual is the rest of p.
    """
    k = len(tokens)
    rho = threshold(target, draft, k)
    taken = np.minimum(target / rho, draft)
    beta = taken.sum()
    if beta == 0:
        return target
    emitted, left = np.zeros_like(target), 1.0
    for token in tokens:
        accepted = min(1.0, taken[token] / draft[token])
        emitted[token] += left * accepted
        left *= 1 - accepted
    rest = np.maximum(target - taken * (1 - (1 - beta) ** k) / beta, 0)
    total = rest.sum()
    return emitted + left * (rest / total if total > 0 else target)


def threshold(target: Probs, draft: Probs, k: int) -> float:
    """The least rho in [1, k] with 1 - (1 - beta(rho))^k <= rho beta(rho), rounded up: any larger one is valid too."""
    low, high = 1.0, float(k)
    middle = low
    for _ in range(25):
        beta = np.minimum(target / middle, draft).sum()
        low, high = (low, middle) if 1 - (1 - beta) ** k <= middle * beta else (middle, high)
        if low == high:
            break
        middle = (low + high) / 2
    return high


@register("k_seq", about="k-sequential selection: all children against one threshold (SpecTr)", paper="2310.15141")
@valid_for(IID)
@computes(branching=sequential)
def k_seq(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Try independent children one after the other at a common discount rho (SpecTr).

    Child x is accepted with probability min(1, p(x) / (rho q(x))), p the target's law and q the drafter's. Accepts at
    least 1 - 1/e of what any rule can. rho = 1 accepts too much as soon as there are two children; rho = k, their
    number, is always valid and accepts the least. `sequential` has the rule, `threshold` the rho. Example, p = (.2, .5,
    .3), q = (.6, .3, .1), two children; beta = sum min(p / rho, q) is what one child is accepted with:

        rho = 1.4, beta = .143 + .3 + .1 = .543: together they would emit .791 > 1.4 * .543 = .760, too much
        rho = 1.463 is the first valid one, beta = .537: .785 of the mass comes from the children, 1.463 * .537 = .785

        Decoder(pair.target, pair.drafter, Sampled.delayed(trunk=2, branches=3, length=4), k_seq).generate(
            ids, sampling=Sampling(1.0)
        )
    """
    return walk_down(tree, logits, random, sequential)
