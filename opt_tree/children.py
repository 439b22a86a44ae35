"""What a drafter answers, `LogProbs`, and how siblings are picked from it: `TopK`, the most probable tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.errors import require
from opt_tree.pool import CandidatePool, Picked
from opt_tree.tree import fetch, on_host, send


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Normalised log-probabilities of the next token, a row a node; valid until the drafter is asked again."""

    values: Float[Tensor, "nodes columns"]
    """-inf: impossible. A row of -inf says that nothing is known there: the node has no children."""
    tokens: Int[Tensor, " columns"] | Int[Tensor, "nodes columns"] | None = None
    """The target's tokens of the columns; None: a column for each token of the vocabulary. One list for all nodes, in
    rising order and on the host, is a draft vocabulary: whole distributions. A list for each node names a few of its
    tokens: what their mass is below 1 belongs to tokens that are not named."""
    whole: "Callable[[], LogProbs] | None" = None
    """Where a few tokens of each node are named that a model picked: the distributions that they were picked from."""

    @classmethod
    def of(
        cls, scores: Float[Tensor, "nodes columns"], tokens: Int[Tensor, " columns"] | None = None, scale: float = 1.0
    ) -> Self:
        """Normalise scores times `scale`, in float32 or wider. Logits are scores, and so are log-probabilities."""
        if scale != 1:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        return cls(log_probs_of(scores), tokens)

    @property
    def unpicked(self) -> "LogProbs":
        """The same before a model picked a few tokens of each node, for whoever changes the mass of others, too."""
        return self if self.whole is None else self.whole()


def log_probs_of(scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return the log-probabilities that scores stand for, in float32 or wider.

    A row of -inf says that nothing is known there, and stays as it is.
    """
    log_probs = scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return nothing_known(scores, log_probs, -torch.inf)


def nothing_known(scores: Tensor, normalised: Tensor, value: float) -> Tensor:
    """Put a value in rows whose scores are -inf throughout. Other NaNs are a fault of whoever scored: they stay."""
    # Normalising such a row divides nothing by nothing. One column tells whether there is one: its NaN is everywhere.
    if on_host(scores) and not normalised[..., 0].isnan().any():
        return normalised
    return normalised.masked_fill(scores.isneginf().all(-1, keepdim=True), value)


@runtime_checkable
class Children(Protocol):
    """How siblings are picked from what the drafter says. A type, because a verifier is valid for some kinds only."""

    def pool(self, root: int, sampling: Any, random: Any) -> Any:
        """Return the `CandidatePool` of a step below the token `root`; the others are what children are drawn with."""

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; verifiers are then shown the distributions they were drawn from."""

    @property
    def budget(self) -> int | None:
        """How many candidates of the whole pool can matter; None: all of them."""


@dataclass(frozen=True)
class TopK:
    """The most probable tokens: `per_node` of them under every node, or whichever are among the pool's `total` best."""

    per_node: int | None = None
    total: int | None = None
    sampled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if (self.per_node is None) == (self.total is None):
            raise ValueError("TopK takes either per_node or total")
        require((Integral, NoneType), per_node=self.per_node, total=self.total)
        if self.most < 1:
            raise ValueError(f"TopK takes at least one token, got {self}")

    @property
    def budget(self) -> int | None:
        return self.total

    @property
    def most(self) -> int:
        """Children of a node at most; with `total`, of a layer."""
        return self.per_node or self.total or 0

    def pool(self, root: int, sampling: Any, random: Any) -> CandidatePool:
        """See `Children.pool`; nothing here is random."""
        return CandidatePool(root, self)

    def pick(self, answer: LogProbs, above: Float[np.ndarray, " nodes"], floor: float) -> Picked:
        """Return the children of a layer: those whose path log-probability exceeds `floor`.

        `above`: path log-probabilities of its nodes. Tokens of log-probability -inf are never among the children.
        """
        if answer.values.shape[1] < self.most:
            answer = answer.unpicked  # fewer were picked beforehand than may be wanted
        values, names = answer.values, answer.tokens
        if not values.numel():
            return _NOTHING
        if names is not None and names.ndim == 2 and not on_host(values):  # few numbers: all of them come
            values, names = map(torch.from_numpy, fetch(values, names))
        if self.per_node is None and on_host(values):
            picked = _survivors(values.numpy(), above, floor, self.most)
        else:
            picked = self._read_once(values, above, floor)
        if names is None:
            return picked
        (known,) = fetch(names)
        return picked._replace(tokens=known[picked.tokens] if known.ndim == 1 else known[picked.rows, picked.tokens])

    def _read_once(
        self, log_probs: Float[Tensor, "nodes columns"], above: Float[np.ndarray, " nodes"], floor: float
    ) -> Picked:
        """Pick where the layer lies. What is read back has one size, whatever is in it: the host waits once."""
        parents = send(above, log_probs.device, log_probs.dtype)[:, None]
        nodes, columns = log_probs.shape
        if self.per_node is not None:  # of each node the greatest first
            found, places = log_probs.topk(min(self.most, columns))
            values, tokens = (part.ravel() for part in fetch(found + parents, places))
            rows = np.arange(nodes).repeat(found.shape[1])
        else:  # the best of all, the best first: put into the order in which the host would find them
            values, numbers = fetch(*(log_probs + parents).flatten().topk(min(self.most, log_probs.numel())))
            order = numbers.argsort()
            values = values[order]
            rows, tokens = np.divmod(numbers[order], columns)
        kept = (values > floor).nonzero()[0]
        return Picked(values.take(kept), tokens.take(kept), rows.take(kept))


_LEAST = float(np.finfo(np.float32).min) / 2  # above -inf and the masks of models, which nobody is to pick
_NOTHING = Picked(np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _survivors(
    log_probs: Float[np.ndarray, "nodes columns"], above: Float[np.ndarray, " nodes"], floor: float, total: int
) -> Picked:
    """Return the `total` best children above the floor."""
    # In few operations of numpy: between two forwards each meets cold caches, at several times its cost.
    paths = log_probs + above.astype(log_probs.dtype)[:, None]
    if floor == -np.inf:  # of groups the maxima: the total-th greatest of these is reached by as many, and found fast
        flat, groups = paths.ravel(), max(4 * total, 256)
        maxima = flat[: len(flat) // groups * groups].reshape(-1, groups).max(0) if len(flat) > 2 * groups else flat
        floor = max(np.nextafter(np.partition(maxima, -total)[-total], floor), _LEAST) if len(flat) > total else _LEAST
    among = (paths > floor).ravel().nonzero()[0]
    values = paths.ravel().take(among)
    rows, tokens = np.divmod(among, log_probs.shape[1])
    if len(values) > total:
        kept = (-values).argsort(kind="stable")[:total]
        kept.sort()
        values, tokens, rows = values.take(kept), tokens.take(kept), rows.take(kept)
    return Picked(values, tokens, rows)
