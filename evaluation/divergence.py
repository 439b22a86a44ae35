"""Why do two generations differ? Where they part, and whether rounding explains it.

Owns the verdict on two generations of one target after one prompt; knows nothing of files and of drafting.

How a rounding tie is told from a defect: the logits at that position are computed anew from the shared tokens. The
exact ones are float32 (for a float32 target float64). In the target's own dtype they are computed in three shapes: one
row at a time as plain decoding does, in blocks as large as a tree, in one prefill. Their spread around the exact ones
is the noise. A token whose exact logit lies within a few times that noise of the best one may win by rounding, and no
other token may.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree import Random, Sampling, Tree
from opt_tree.models.chain_lm import AnyLM
from opt_tree.request import check_prompt
from opt_tree.sampling import noise_from
from opt_tree.target import shared
from opt_tree.tree import send

Why = Literal["rounding tie", "different settings", "different prompt", "different length", "defect"]

LIMIT = 4.0
"""How many times the noise a gap may be and still count as a tie; a normal error exceeds that once in 30,000 times."""
EXACT = "exact"
_LEADERS = 64
_BLOCK = 16


@dataclass(frozen=True)
class Divergence:
    """Where two generations after one prompt part, and why.

    `scores` are the two tokens' exact logits, `gap` is how far the worse lies below the best logit, `noise` the
    standard deviation of the rounding error of a difference between two leading logits. Of sampling the same, of
    logarithms of arrivals instead of logits: the token that is drawn is the first to arrive in a race (`Random.draw`),
    which is the one whose log-probability is greatest after its own noise was added. A gap of g is a ratio of e^g; it
    is 0 where rounding decides whether top-k or top-p lets one of the two through.
    """

    position: int
    """Index of the first differing token among the generated ones."""
    tokens: tuple[int | None, int | None]
    """The two tokens there; None for a generation that has ended."""
    verdict: Why
    reason: str
    scores: tuple[float, float] | None = None
    best: int | None = None
    """The token that the exact computation chooses."""
    gap: float | None = None
    noise: float | None = None
    choices: dict[str, int] | None = None
    """The token that the target chooses in its own dtype, by the shape of its forwards."""

    @property
    def reproduced(self) -> bool:
        """Whether either token was seen to win in the target's own dtype, where nothing but shapes differed."""
        return set(self.tokens) <= set((self.choices or {}).values())


class Explainer:
    """Explains pairs of generations of one target. Keeps an exact copy of its weights, so it needs memory for both.

    `explain` runs the target and so ends a generation under way on it.
    """

    def __init__(self, target: AnyLM) -> None:
        self.target = target
        self.exact_dtype = torch.float32 if target.dtype in (torch.float16, torch.bfloat16) else torch.float64
        self.exact = copy.deepcopy(target.model).to(self.exact_dtype)

    def explain(
        self,
        prompt: Sequence[int] | Tensor,
        tokens_a: Sequence[int],
        tokens_b: Sequence[int],
        sampling: Sampling = Sampling(),
        seed: int = 0,
    ) -> Divergence | None:
        """Say where and why two generations after `prompt` part; None where they are equal.

        `sampling` and `seed` are what both were generated with.
        """
        context = check_prompt(prompt, self.target)
        if list(tokens_a) == list(tokens_b):
            return None
        position = shared(tokens_a, tokens_b)
        one, other = token_at(tokens_a, position), token_at(tokens_b, position)
        if one is None or other is None:
            why = f"{'a' if one is None else 'b'} ends after {position} tokens, {'b' if one is None else 'a'} goes on"
            return Divergence(position, (one, other), "different length", why)
        pair = (one, other)
        rest = [*context, *tokens_a[:position]]
        rows = {EXACT: self.exact_row(rest), **self._own_rows(rest, len(context) - 1)}
        root = Tree(np.array([rest[-1]]), np.array([-1]), np.zeros(1), np.array([0]))
        scores = {name: sampling.process(row[None], root, rest) for name, row in rows.items()}
        if not sampling.greedy:
            scores = {name: _raced(row, Random(seed), position) for name, row in scores.items()}
        return _verdict(position, pair, scores, str(self.target.dtype).removeprefix("torch."))

    @torch.inference_mode()
    def exact_row(self, tokens: list[int]) -> Float[Tensor, " vocab"]:
        """Logits behind `tokens` by the exact copy: one causal forward without cache, mask or positions of ours."""
        ids = torch.tensor([tokens], device=self.target.device)
        return self.exact(input_ids=ids, use_cache=False).logits[0, -1]

    @torch.inference_mode()
    def _own_rows(self, tokens: list[int], prefilled: int) -> dict[str, Float[Tensor, " vocab"]]:
        """Logits behind `tokens` in the target's own dtype, by the shape of the forwards after the prefill."""
        target, rest = self.target, tokens[prefilled:]
        rows = {}
        for name, block in (("row by row", 1), (f"{_BLOCK} rows at a time", _BLOCK), ("one prefill", len(rest))):
            target.reset()
            if prefilled:
                target.append(tokens[:prefilled])
            for start in range(0, len(rest), block):
                output = target.append(rest[start : start + block])
            rows[name] = output.logits[-1].clone()
        target.reset()
        return rows


def token_at(tokens: Sequence[int], position: int) -> int | None:
    """The token at a place; None behind the end."""
    return int(tokens[position]) if position < len(tokens) else None


def _verdict(position: int, pair: tuple[int, int], rows: dict[str, Float[Tensor, "1 vocab"]], dtype: str) -> Divergence:
    """Compare the gap between the two tokens' exact scores with the noise of the target's own dtype.

    `rows`: the scores behind the text, by how they were computed. What the errors of all leading scores have in common
    moves no choice and is no noise.
    """
    exact = rows[EXACT][0].double()
    own = {name: row[0].double() for name, row in rows.items() if name != EXACT}
    known = torch.stack(list(own.values()))
    possible = torch.where(known.isfinite().all(0), exact, -torch.inf)
    leaders = possible.topk(min(_LEADERS, int(possible.isfinite().sum())))
    errors = known[:, leaders.indices] - leaders.values
    errors = errors - errors.mean(1, keepdim=True)
    noise = float(errors.square().mean().sqrt()) * 2**0.5  # of the difference of two scores
    scores, best = (float(exact[pair[0]]), float(exact[pair[1]])), int(exact.argmax())
    choices = {name: int(row.argmax()) for name, row in own.items()}
    allowed_by_some = any(len({bool(row[0, token].isfinite()) for row in rows.values()}) > 1 for token in pair)
    gap = 0.0 if allowed_by_some else float(exact.max()) - min(scores)  # at a border of top-k or top-p

    times = f"{gap / noise:.1f} times the {dtype} noise of {noise:.2g}" if noise else f"and {dtype} shows no noise"
    verdict: Why = "rounding tie" if gap <= LIMIT * noise else "defect"
    reason = f"a gap of {gap:.2g}, {times}"
    if verdict == "defect":
        whose = f"{'ab'[pair.index(best)]}'s" if best in pair else "neither's"
        reason = f"rounding cannot explain it: {reason}; the exact computation chooses {best}, which is {whose}"
    return Divergence(position, pair, verdict, reason, scores, best, gap, noise, choices)


def _raced(scores: Float[Tensor, "1 vocab"], random: Random, position: int) -> Float[Tensor, "1 vocab"]:
    """Return what `Random.draw` takes the greatest of, `position` tokens ahead: minus the logarithms of arrivals."""
    noise = noise_from(send(random.starts(np.array([position])), scores.device), scores.shape[1])
    return scores.log_softmax(-1, dtype=torch.float64) - noise.log()
