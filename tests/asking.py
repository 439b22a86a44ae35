"""Asking a drafter as the loop does, each forward that it needs computed by itself; and what is refused, why."""

from collections.abc import Callable
from typing import Any

import pytest

from opt_tree import Drafter, LogProbs, Output, Random, Sampling, Tree, TreePolicy
from opt_tree.grow import answer_of, grow, run
from opt_tree.pool import Frontier


def begin(drafter: Drafter, prompt: list[int], prefill: Output | None = None, **more: Any) -> None:
    """Begin a text that the target has none of, for a greedy target."""
    drafter.begin(prompt, **{"kept": 0, "prefill": prefill, "sampling": Sampling(), **more})


def root_of(drafter: Drafter, context: list[int]) -> LogProbs:
    """What a drafter says of the token after the context."""
    return run(answer_of(drafter, drafter.root(context)))


def below(drafter: Drafter, frontier: Frontier) -> LogProbs:
    """What a drafter says of the token after each node of a frontier."""
    return run(answer_of(drafter, drafter.expand(frontier)))


def draft(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Sampling = Sampling(),
    random: Random | None = None,
) -> Tree:
    """Grow one tree, each forward computed by itself."""
    return run(grow(drafter, policy, context, limit, sampling, random))


def refusal(kind: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Call, expect an error of this kind, and return its message, which is to be one line."""
    with pytest.raises(kind) as error:
        call(*given, **named)
    message = str(error.value)
    assert "\n" not in message
    return message
