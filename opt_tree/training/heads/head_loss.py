"""What judges a head on hidden states from disk: the cross-entropy with the target's distribution there."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from opt_tree.methods.drafters.heads.eagle3_head import Eagle3Head
from opt_tree.models.output_scaling import Scaling, scaling_of
from opt_tree.training.heads.batches import Batch, Documents, most_frequent
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.plans import Judging, Reduced

_CHUNK = 128
"""Rows of logits held at once: what fits a core's cache with the loss and its gradient."""


class TargetSide(NamedTuple):
    """The target's side: states behind its last norm, what reads them, its best token's own share, its logits' cap."""

    states: Float[Tensor, "rows hidden"]
    output: Float[Tensor, "tokens hidden"]
    hard: float = 0.0
    cap: float | None = None


class JudgedEntropy(torch.autograd.Function):
    """Cross-entropy of what an output layer reads in estimates, with what the target says of the same rows.

    Logits and their gradient are never held for more than `_CHUNK` rows. `output` gets a gradient where it wants one:
    EAGLE-3's is its own, and has no cap. Returns (loss, share of equal argmaxes), each by pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        estimates: Float[Tensor, "passes rows hidden"],
        weights: Float[Tensor, "passes rows"],
        output: Float[Tensor, "tokens hidden"],
        wanted: TargetSide,
    ) -> tuple[Float[Tensor, " passes"], Float[Tensor, " passes"]]:
        losses, equal = torch.zeros(len(estimates)), torch.zeros(len(estimates))
        gradient = torch.empty_like(estimates)
        of_output = torch.zeros(len(estimates) * ctx.needs_input_grad[2], *output.shape)
        norm = weights.sum(1).clamp_min(1)
        theirs, own = Scaling(cap=wanted.cap), Scaling(cap=None if ctx.needs_input_grad[2] else wanted.cap)
        for start in range(0, len(wanted.states), _CHUNK):
            rows = slice(start, start + _CHUNK)
            probs = theirs((wanted.states[rows] @ wanted.output.T).float()).softmax(-1)
            best = probs.argmax(-1)
            if wanted.hard:
                probs.mul_(1 - wanted.hard)
                probs.scatter_add_(1, best[:, None], torch.full((len(best), 1), wanted.hard))
            for number, estimate in enumerate(estimates[:, rows]):
                weight = weights[number, rows] / norm[number]
                logits = own((estimate @ output.T).float())
                log_probs = logits.log_softmax(-1)
                losses[number] -= (torch.einsum("rv,rv->r", probs, log_probs) * weight).sum()
                equal[number] += ((log_probs.argmax(-1) == best) * weight).sum()
                apart = log_probs.exp_().sub_(probs).mul_(weight[:, None])
                if own.cap is not None:
                    apart.mul_(1 - (logits / own.cap) ** 2)
                apart = apart.to(output.dtype)
                gradient[number, rows] = apart @ output
                if len(of_output):
                    of_output[number] += apart.T @ estimate
        ctx.save_for_backward(gradient, of_output)
        ctx.mark_non_differentiable(equal)
        return losses, equal

    @staticmethod
    def backward(ctx: Any, losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, of_output = ctx.saved_tensors
        read = torch.einsum("p,pvh->vh", losses, of_output).to(gradient.dtype) if len(of_output) else None
        return gradient * losses[:, None, None].to(gradient.dtype), None, read, None


@dataclass(frozen=True)
class Goal:
    """What judges a head beside the target's law."""

    feature: float = 0.0  # weight of SmoothL1 between what the output layer reads here and in the target
    noise: float = 0.0  # half-width of uniform noise on the features
    hard: float = 0.0  # share that the target's best token alone gets of what is wanted
    often: Int[Tensor, " rows"] | None = None  # rows of the output layer that each batch is judged over; None: all
    drawn: int = 0  # other rows that it is judged over, drawn anew
    cap: float | None = None  # of the target's logits


def columns_of(
    target: PreTrainedModel, features: Path, plan: Judging
) -> tuple[Int[Tensor, " columns"], Float[Tensor, "columns hidden"], Goal]:
    """Return the most frequent tokens of the answers, as many as the draft vocabulary has (without one: all), the
    target's output rows of them, with its scaling's factor, and what the plan says of the judge."""
    counts, output = np.load(features / COUNTS), target.get_output_embeddings().weight.detach()
    factor, cap = scaling_of(target)
    kept = most_frequent(counts, plan.vocab, "target") if isinstance(plan, Reduced) else torch.arange(len(counts))
    often = torch.from_numpy(np.argsort(-counts[kept], kind="stable")[: plan.frequent]) if plan.frequent else None
    return kept, output[kept] * factor, Goal(hard=plan.hard, often=often, drawn=plan.drawn, cap=cap)


class Judge(nn.Module):
    """What is trained, with what judges it: `forward` gives the loss and the share of equal argmaxes, by pass."""

    head: nn.Module
    sizes: Sequence[float] = (1.0,)
    """What features are divided by; it is kept with a checkpoint."""

    @staticmethod
    def layers_of(plan: Any, target: PreTrainedModel) -> tuple[int, ...]:
        """Return the target's layers whose outputs it is trained on; -1: the last one's, behind the norm."""
        return (-1,)

    @classmethod
    @abstractmethod
    def new(cls, plan: Any, target: PreTrainedModel, documents: Documents) -> "Judge":
        """Return a new head for a target, with what judges it. `plan`: that of its kind."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the head as a drafter is loaded. Called once, at the end: it may change the head."""

    @abstractmethod
    def forward(self, batch: Batch, unroll: int) -> tuple[Float[Tensor, " passes"], Float[Tensor, " passes"]]:
        """Judge the head on a batch in so many passes."""


class HeadLoss(Judge):
    """A head in the target's feature space with what judges it.

    `output`: the target's output rows of the draft vocabulary. They read an EAGLE-3 head too, unless its own are
    trained. `tokens`: which tokens these are; None: all. Where the answer goes on with another one nothing is judged;
    EAGLE-3 leaves out where the target's best token is another one, which is the same along greedy answers.
    `sizes`: what an EAGLE-3 head's features are divided by, a number a layer. `fold` puts them into its `fc`.
    """

    passes: Callable[..., list[Tensor]]
    """What the head estimates in each pass: a function of head, next tokens, features and number of passes."""

    def __init__(
        self,
        head: nn.Module,
        output: Float[Tensor, "columns hidden"],
        goal: Goal = Goal(),
        sizes: Sequence[float] = (1.0, 1.0, 1.0),
        tokens: Int[Tensor, " columns"] | None = None,
    ) -> None:
        super().__init__()
        self.output: Tensor
        self.known: Tensor | None
        self.head: Any = head
        self.goal, self.sizes = goal, list(sizes)
        self.register_buffer("output", output, persistent=False)
        known = None
        if tokens is not None:
            known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
        self.register_buffer("known", known, persistent=False)

    def fold(self) -> None:
        """Let the head read features as they are."""
        if isinstance(self.head, Eagle3Head):
            for columns, size in zip(self.head.fc.weight.data.chunk(3, 1), self.sizes, strict=True):
                columns.div_(size)
            self.sizes = [1.0, 1.0, 1.0]

    def judging(self) -> tuple[Float[Tensor, "some hidden"], Float[Tensor, "some hidden"]]:
        """Return the rows of the head's output layer that a batch is judged over, and the target's."""
        own = self.head.lm_head.weight if isinstance(self.head, Eagle3Head) else self.output
        own = own.to(self.output.dtype) if own.requires_grad else self.output
        often = self.goal.often
        if often is None or not self.training:
            return own, self.output
        others = torch.ones(len(self.output), dtype=torch.bool).index_fill_(0, often, False).nonzero()[:, 0]
        some = torch.cat([often, others[torch.randperm(len(others))[: self.goal.drawn]]])
        theirs = self.output[some]
        return own[some] if own.requires_grad else theirs, theirs

    def read(self, estimates: Float[Tensor, "passes rows hidden"]) -> Float[Tensor, "passes rows hidden"]:
        """Return what the output layer reads of estimates."""
        return self.head.read(estimates)

    def estimates(self, batch: Batch, unroll: int) -> list[Float[Tensor, "rows pairs hidden"]]:
        """Return the head's output by pass; pair i has feature i and token i + 1."""
        if isinstance(self.head, Eagle3Head):
            read = [batch.features[layer][:, :-1].float() for layer in batch.layers if layer != -1]
            inputs = self.head.fc(torch.cat([states / size for states, size in zip(read, self.sizes, strict=True)], -1))
        else:
            inputs = batch.features[-1][:, :-1].float()
        if self.training and self.goal.noise:
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (2 * self.goal.noise)
        return self.passes(self.head, batch.ids[:, 1:], inputs, unroll)

    def forward(self, batch: Batch, unroll: int) -> tuple[Float[Tensor, " passes"], Float[Tensor, " passes"]]:
        goals = batch.features[-1][:, 1:]
        estimates = self.estimates(batch, unroll)
        judged = batch.judged[:, 1:]
        if self.known is not None:
            follower = F.pad(batch.ids[:, 2:], (0, 1), value=int(self.known.nonzero()[0]))  # none at the end: judged
            judged = judged & self.known[follower]
        # Pass s speaks of pairs with s earlier ones; before that it has seen true features only.
        place = torch.arange(judged.shape[1]).expand_as(judged)[judged]
        weights = torch.stack([place >= number for number in range(unroll)]).float()
        picked = torch.stack([estimate[judged] for estimate in estimates])
        states = goals[judged].to(self.output.dtype)
        own, theirs = self.judging()
        read = self.read(picked)
        wanted = TargetSide(states, theirs, self.goal.hard, self.goal.cap)
        loss, equal = JudgedEntropy.apply(read.to(own.dtype), weights, own, wanted)
        if self.goal.feature:
            near = F.smooth_l1_loss(read.float(), states.float().expand_as(picked), reduction="none").mean(-1)
            loss = loss + self.goal.feature * (near * weights).sum(1) / weights.sum(1).clamp_min(1)
        return loss, equal
