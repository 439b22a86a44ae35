"""Growing one draft tree: a drafter and a policy ask each other, layer after layer, until the policy stops."""

import warnings

from jaxtyping import Float
from torch import Tensor

from opt_tree.core.children import Few, Picking, Reduced
from opt_tree.core.pool import CandidatePool, Frontier
from opt_tree.core.random import Random
from opt_tree.core.sampling import Sampling
from opt_tree.core.target import Laws, Target
from opt_tree.core.tree import Tree, alone
from opt_tree.drafters import Drafter, DrafterAround
from opt_tree.policies.base import TreePolicy

_NEAR = 64
"""A drafter whose positions end so near before the target's loses nothing worth a word."""


def draft(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Sampling = Sampling(),
    random: Random | None = None,
) -> Tree:
    """Grow one tree below the last token of the context, at most `limit` layers deep.

    Sampled children are drawn with `random`, from the drafter's distribution as `sampling` warps it.
    """
    if limit <= 0 or drafter is None:
        return alone(context[-1])
    children = policy.children
    pool = CandidatePool(context[-1], children, random)
    sampled = children.sampled
    answer = drafter.root(context) if sampled else drafter.root_laws(context, pool.picking)
    while True:
        pool.add(answer if isinstance(answer, Laws) else _drawn_from(answer, sampling))
        rows = policy.expand(pool) if pool.depth < limit else None
        if rows is None or not len(rows):
            return pool.tree(policy.select(pool))
        frontier = pool.frontier(rows)
        answer = drafter.expand(frontier) if sampled else drafter.expand_laws(frontier, pool.picking)


def _drawn_from(answer: Float[Tensor, "rows vocab"] | Few | Reduced, sampling: Sampling) -> Laws:
    """What sampled children are drawn from: a column for every token of the vocabulary, as the verifier needs it."""
    if isinstance(answer, Few):
        raise TypeError("children are drawn from a whole distribution; this drafter names a few tokens only")
    return Laws(sampling.warp(answer.whole() if isinstance(answer, Reduced) else answer))


def layers_left(target: Target, drafter: Drafter | None, length: int, end: int) -> int:
    """How many layers of draft a context of `length` tokens that may grow to `end` has room for, also in the models."""
    models = [target] if drafter is None else [target, *drafter.models]
    room = min(end - length - 1, *(model.room(length - 1) for model in models))
    return room if drafter is None else min(room, drafter.room(length))


def tell_of_end(target: Target, drafter: Drafter, length: int) -> None:
    """Warn, once a drafter, that the context has come behind its last position, where the target goes on."""
    if length < drafter.max_context or drafter.bare.ended or drafter.max_context + _NEAR > target.max_context:
        return
    drafter.bare.ended = True
    rest = "the table drafts alone" if drafter.room(length) > 0 else "nothing is drafted"
    warnings.warn(
        f"{drafter.describe()} has positions for {drafter.max_context} tokens of context "
        f"(max_position_embeddings), {target.name} for {target.max_context}: behind the former {rest}",
        stacklevel=2,
    )


class RootKnown(DrafterAround):
    """A drafter whose answer for the root is known already."""

    def __init__(self, drafter: Drafter, root: Float[Tensor, "1 vocab"] | Few | Reduced) -> None:
        super().__init__(drafter)
        self._root = root

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Few | Reduced:
        return self._root

    def expand_laws(self, frontier: Frontier, picking: Picking = Picking()) -> Laws:
        return self.drafter.expand_laws(frontier, picking)
