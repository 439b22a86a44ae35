"""Dynamic depth decoding: EAGLE-2 that stops when its beam has become unlikely (arXiv:2409.00142)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.registry import DEPTH, register
from opt_tree.pool import CandidatePool


@dataclass(frozen=True)
class DynamicDepth(Eagle2):
    """EAGLE-2 with a depth that follows the drafter's confidence (DDD, arXiv:2409.00142).

    After some layers the beam is asked how likely it is as a whole, H = log sum_i exp(log-probability of beam path i),
    and drafting stops when H falls below `threshold`. The paper drafts at most 11 times and asks after the fifth, the
    seventh and the ninth only, against -0.3. Asking costs it a synchronisation with the GPU. Here a layer is read back
    anyway, and `checks=tuple(range(1, 11))` costs no more. The threshold is the pair's, and ours is not the paper's:
    sweep it.

    Example, the distributions of `Eagle2`'s, top_k = 2, nodes = 6, checks after layers 1 and 2, threshold log .7:

                 root
               /      \\
            .6          .3             exp(H) = .6 + .3 = .9: go on
           /  \\        /  \\
        .42   .12    .21   .06         the beam is .42 and .21, exp(H) = .63 < .7: stop, and take the best six

        pair = load_pair("demo", eagle="demo")
        policy = DynamicDepth(nodes=30, threshold=math.log(0.2))
        answer = Decoder(pair.target, pair.drafter, policy).generate(pair.encode("Why is the sky blue?"))
        [step.draft_forwards for step in answer.steps]
    """

    depth: int = 10
    """Rounds after the root's own, at most; the paper's 11 draft forwards (Alg. 1, n)."""
    threshold: float = math.log(0.2)
    """Least H worth another layer; a logarithm, so -inf never stops and the beam is EAGLE-2's."""
    checks: tuple[int, ...] = (5, 7, 9)
    """After which layers H is looked at."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isnan(self.threshold):
            raise ValueError("threshold must be a number, got nan")
        if any(layer < 1 for layer in self.checks):
            raise ValueError(f"checks are numbers of layers, 1 or more each; got {self.checks}")

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        beam = super().expand(pool)
        asked = beam is not None and pool.depth in self.checks
        return None if asked and np.logaddexp.reduce(pool.path_log_probs[beam]) < self.threshold else beam


@register("dynamic_depth", about="`eagle2`, no deeper once its beam has become unlikely (DDD)", paper="2409.00142")
def _at_budget(nodes: int, threshold: float = 0.2) -> DynamicDepth:
    """The threshold is a probability here: the paper's H is its logarithm."""
    return DynamicDepth(depth=DEPTH - 1, nodes=nodes, threshold=math.log(threshold) if threshold else -math.inf)
