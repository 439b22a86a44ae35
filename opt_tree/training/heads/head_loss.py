"""What judges an EAGLE head on hidden states from disk: the cross-entropy with the law that the target has there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from opt_tree.drafters.heads.eagle3 import Eagle3Head
from opt_tree.drafters.heads.eagle_head import EagleHead
from opt_tree.training.embedded_family.eagle import passes
from opt_tree.training.heads.batches import Batch

_CHUNK = 128
"""Rows of logits held at once: what fits a core's cache with the loss and its gradient."""


class Judged(torch.autograd.Function):
    """Cross-entropy through an output layer with the law that other states have there, a few rows at a time.

    Logits and their gradient are never held for more than `_CHUNK` rows. `hard` is the share of each law that
    its best token gets for itself. Returns (loss, share of equal argmaxes), each by pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        estimates: Float[Tensor, "passes rows hidden"],
        states: Float[Tensor, "rows hidden"],
        weights: Float[Tensor, "passes rows"],
        output: Float[Tensor, "tokens hidden"],
        hard: float,
    ) -> tuple[Float[Tensor, " passes"], Float[Tensor, " passes"]]:
        losses, equal = torch.zeros(len(estimates)), torch.zeros(len(estimates))
        gradient = torch.empty_like(estimates)
        norm = weights.sum(1).clamp_min(1)
        for start in range(0, len(states), _CHUNK):
            rows = slice(start, start + _CHUNK)
            law = (states[rows] @ output.T).float().softmax(-1)
            best = law.argmax(-1)
            if hard:
                law.mul_(1 - hard).scatter_add_(1, best[:, None], torch.full((len(best), 1), hard))
            for number, estimate in enumerate(estimates[:, rows]):
                weight = weights[number, rows] / norm[number]
                log_probs = (estimate @ output.T).float().log_softmax(-1)
                losses[number] -= (torch.einsum("rv,rv->r", law, log_probs) * weight).sum()
                equal[number] += ((log_probs.argmax(-1) == best) * weight).sum()
                apart = log_probs.exp_().sub_(law).mul_(weight[:, None])
                gradient[number, rows] = apart.to(output.dtype) @ output
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(equal)
        return losses, equal

    @staticmethod
    def backward(ctx: Any, losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * losses[:, None, None].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True)
class Goal:
    """What judges a head beside the target's law."""

    feature: float = 0.0  # weight of SmoothL1 between what the output layer reads here and in the target
    noise: float = 0.0  # half-width of uniform noise on the features
    hard: float = 0.0  # share that the target's best token alone gets of the law
    often: Int[Tensor, " rows"] | None = None  # rows of the output layer that each batch is judged over; None: all
    drawn: int = 0  # other rows that it is judged over, drawn anew


class HeadLoss(nn.Module):
    """A head with what judges it: `forward` gives the loss and the share of equal argmaxes, by pass.

    `sizes`: what an EAGLE-3 head's features are divided by, a number a layer. `fold` puts them into its `fc`.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        output: Float[Tensor, "tokens hidden"],
        goal: Goal = Goal(),
        sizes: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.output: Tensor
        self.head, self.goal, self.sizes = head, goal, list(sizes)
        self.register_buffer("output", output, persistent=False)

    def fold(self) -> None:
        """Let the head read features as they are."""
        if isinstance(self.head, Eagle3Head):
            for columns, size in zip(self.head.fc.weight.data.chunk(3, 1), self.sizes, strict=True):
                columns.div_(size)
            self.sizes = [1.0, 1.0, 1.0]

    def judging(self) -> Float[Tensor, "some_tokens hidden"]:
        """Return the rows of the output layer that a batch is judged over."""
        often = self.goal.often
        if often is None or not self.training:
            return self.output
        others = torch.ones(len(self.output), dtype=torch.bool).index_fill_(0, often, False).nonzero()[:, 0]
        return self.output[torch.cat([often, others[torch.randperm(len(others))[: self.goal.drawn]]])]

    def estimates(self, batch: Batch, unroll: int) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the head's output by pass; pair i has feature i and token i + 1."""
        if isinstance(self.head, Eagle3Head):
            read = [batch.features[layer][:, :-1].float() for layer in batch.layers if layer != -1]
            inputs = self.head.fc(torch.cat([states / size for states, size in zip(read, self.sizes, strict=True)], -1))
        else:
            inputs = batch.features[-1][:, :-1].float()
        if self.training and self.goal.noise:
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (2 * self.goal.noise)
        return passes(self.head, batch.ids[:, 1:], inputs, unroll)

    def forward(self, batch: Batch, unroll: int) -> tuple[Float[Tensor, " passes"], Float[Tensor, " passes"]]:
        goals = batch.features[-1][:, 1:]
        estimates = self.estimates(batch, unroll)
        judged = batch.judged[:, 1:]
        # Pass s speaks of pairs with s earlier ones; before that it has seen true features only.
        place = torch.arange(judged.shape[1]).expand_as(judged)[judged]
        weights = torch.stack([place >= number for number in range(unroll)]).float()
        picked = torch.stack([estimate[judged] for estimate in estimates])
        states = goals[judged]
        output = self.judging()
        read = self.head.read(picked)
        loss, equal = Judged.apply(read.to(output.dtype), states, weights, output, self.goal.hard)
        if self.goal.feature:
            near = F.smooth_l1_loss(read.float(), states.float().expand_as(picked), reduction="none").mean(-1)
            loss = loss + self.goal.feature * (near * weights).sum(1) / weights.sum(1).clamp_min(1)
        return loss, equal
