"""Growing one draft tree: a drafter and a policy ask each other, layer after layer, until the policy stops."""

import warnings
from collections.abc import Generator
from typing import TypeVar

from opt_tree.answers import LogProbs
from opt_tree.drafter import Asked, Drafter
from opt_tree.policy import TreePolicy
from opt_tree.random import Random
from opt_tree.sampling import Temperature
from opt_tree.target import Forward, Output, Target
from opt_tree.tree import Tree

_NEAR = 64
"""A drafter whose positions end so near before the target's loses nothing worth a word."""
T = TypeVar("T")
Asking = Generator[Forward, Output, T]
"""Asks for forwards, is sent what came of each, and returns a T in the end."""


def run(asking: Asking[T]) -> T:
    """Compute every forward that is asked for, one by one; return what comes of it.

    What goes wrong in a forward goes wrong where it was asked for.
    """
    try:
        forward = next(asking)
        while True:
            try:
                output = forward.model.run(forward)
            except BaseException as error:
                forward = asking.throw(error)
            else:
                forward = asking.send(output)
    except StopIteration as end:
        return end.value


def answer_of(drafter: Drafter, asked: Asked) -> Asking[LogProbs]:
    """Ask for the forwards that a drafter needs before it answers."""
    while isinstance(asked, Forward):
        asked = drafter.read((yield asked))
    return asked


def grow(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Temperature = Temperature(),
    random: Random | None = None,
    root: LogProbs | None = None,
) -> Asking[Tree]:
    """Grow one tree below the last token of the context, at most `limit` layers deep (arXiv:2406.17276, Alg. 1).

    Sampled children are drawn with `random`, from the drafter's distribution as `sampling` warps it. `root`: what the
    drafter says of the token after the context, where it was asked already.
    """
    if limit <= 0 or drafter is None:
        return Tree.of([context[-1]], [-1])  # a root without nodes: plain decoding
    pool = policy.children.pool(context[-1], sampling, random or Random())
    answer = root or (yield from answer_of(drafter, drafter.root(context)))
    while True:
        pool.add(answer)
        rows = policy.expand(pool) if pool.depth < limit else None
        if rows is None or not len(rows):
            return pool.tree(policy.select(pool))
        answer = yield from answer_of(drafter, drafter.expand(pool.frontier(rows)))


def layers_left(target: Target, drafter: Drafter | None, length: int, end: int) -> int:
    """How many layers of draft a context of `length` tokens that may grow to `end` has room for, also in the models."""
    models = [target] if drafter is None else [target, *drafter.models]
    room = min(end - length - 1, *(model.room(length - 1) for model in models))
    return room if drafter is None else min(room, drafter.room(length))


def warn_of_end(target: Target, drafter: Drafter, length: int) -> None:
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
