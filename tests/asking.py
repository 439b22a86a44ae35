"""Asking a drafter as the loop does, each forward that it needs computed by itself; and what is refused, why."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import ARCHITECTURES, VOCAB, build, tiny_drafter
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from opt_tree import CausalLM, CausalLMDrafter, Drafter, LogProbs, Output, Random, Sampling, Tree, TreePolicy
from opt_tree.decode import grow
from opt_tree.drafter import Asked, answer_of
from opt_tree.methods.drafters.around import DrafterAround
from opt_tree.methods.drafters.heads.one_pass import OnePass
from opt_tree.pool import Frontier
from opt_tree.target import run_alone


def tiny_target() -> CausalLM:
    """A target of its own, the tiny Llama: a drafter may hook its model."""
    return CausalLM(build(ARCHITECTURES["llama"]()))


def tiny_lm_drafter() -> CausalLMDrafter:
    """A draft model for it."""
    return CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)


def begin(drafter: Drafter, prompt: list[int], prefill: Output | None = None, **more: Any) -> None:
    """Begin a text that the target has none of, for a greedy target."""
    drafter.begin(prompt, **{"kept": 0, "prefill": prefill, "sampling": Sampling(), **more})


def root_of(drafter: Drafter, context: list[int]) -> LogProbs:
    """What a drafter says of the token after the context."""
    return run_alone(answer_of(drafter, drafter.root(context)))


def below(drafter: Drafter, frontier: Frontier) -> LogProbs:
    """What a drafter says of the token after each node of a frontier."""
    return run_alone(answer_of(drafter, drafter.expand(frontier)))


def draft(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Sampling = Sampling(),
    random: Random | None = None,
) -> Tree:
    """Grow one tree, each forward computed by itself."""
    return run_alone(grow(drafter, policy, context, limit, sampling, random))


def refusal(kind: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Call, expect an error of this kind, and return its message, which is to be one line."""
    with pytest.raises(kind) as error:
        call(*given, **named)
    message = str(error.value)
    assert "\n" not in message
    return message


class Witness(DrafterAround):
    """Passes everything on and keeps, for every law that was asked for, the context, the path and the law."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.laws: list[tuple[list[int], list[int], Tensor]] = []

    def root(self, context: list[int]) -> Asked:
        self.context, self.paths = list(context), []
        return self.after(self.drafter.root(context), lambda answer: self._kept([[]], answer))

    def expand(self, frontier: Frontier) -> Asked:
        nodes = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        paths = [[*self.paths[parent], token] for parent, token in nodes]
        return self.after(self.drafter.expand(frontier), lambda answer: self._kept(paths, answer))

    def _kept(self, paths: list[list[int]], answer: LogProbs) -> LogProbs:
        self.paths += paths
        self.laws += [(self.context, path, law) for path, law in zip(paths, answer.values, strict=True)]
        return answer


def recorded(drafter: OnePass, patch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Tensor]:
    """Keep the scores of all depths that a drafter of one pass finds, of every context that is drafted for."""
    root, answer, asked = drafter.root, drafter.answer, []
    found: dict[tuple[int, ...], Tensor] = {}

    def noted(context: list[int]) -> Asked:
        asked.append(tuple(context))
        return root(context)

    def kept(scores: Tensor) -> LogProbs:
        found[asked[-1]] = scores.clone()
        return answer(scores)

    patch.setattr(drafter, "root", noted)
    patch.setattr(drafter, "answer", kept)
    return found


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
