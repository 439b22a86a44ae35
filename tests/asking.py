"""Asking a drafter as the loop does, each forward that it needs computed by itself."""

from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

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


class Recorder(BaseStreamer):
    """A streamer that keeps what it receives, call by call."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.ended = 0

    @property
    def tokens(self) -> list[int]:
        """All that came, the prompt first."""
        return [token for tokens in self.received for token in tokens]

    def put(self, value: Tensor) -> None:
        self.received.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1
