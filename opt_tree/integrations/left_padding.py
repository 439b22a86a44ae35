"""A left-padded batch, row by row: prompts without padding, and what transformers made for the batch, asked of one row.

Owns what padding means. Knows nothing of decoding.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, LogitsProcessor

from opt_tree.models.capabilities import cache_name, unwrapped


def unpadded(input_ids: Int[Tensor, "batch length"], mask: Tensor | None) -> list[list[int]]:
    """Return each row without what the mask hides at its beginning; ValueError where it hides anything else."""
    if mask is None:
        return input_ids.tolist()
    shown = mask.bool()
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()) or not bool(shown[:, -1].all()):
        raise ValueError(
            "the attention mask hides tokens behind others: prompts are padded on the left (padding_side='left')"
        )
    return [row[keep].tolist() for row, keep in zip(input_ids, shown, strict=True)]


def padded(input_ids: Int[Tensor, "batch length"], answers: Sequence[list[int]], pad: int) -> Int[Tensor, "batch _"]:
    """Return the rows with their answers behind them, the shorter ones padded on the right."""
    longest = max(map(len, answers))
    new = [[*answer, *[pad] * (longest - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)


@torch.no_grad()
def padded_cache(
    model: Any, ids: Int[Tensor, "batch length"], mask: Int[Tensor, "batch prompt"] | None, cache: Cache
) -> Cache:
    """Fill a model's cache with the rows of a batch, from one forward; what the prompts' mask hides stays hidden.

    As `generate` leaves them: behind an answer's end are rows of padding.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    bare = unwrapped(model)
    given = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "logits_to_keep": 1}
    given = {name: value for name, value in given.items() if name in inspect.signature(bare.forward).parameters}
    model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_name(bare) or "past_key_values": cache}, **given)
    return cache


class PaddedRow:
    """One row of a batch, as what was made for the whole batch expects it: in its place, behind its padding."""

    def __init__(self, input_ids: Int[Tensor, "batch length"], place: int, length: int) -> None:
        """`length`: of the row without its padding."""
        self.place, self.rows = place, len(input_ids)
        self.padding = input_ids[place : place + 1, : input_ids.shape[1] - length]

    @property
    def is_all(self) -> bool:
        """Whether it is the only one, and without padding: then nothing was made for anything else."""
        return self.rows == 1 and not self.padding.shape[1]

    def own(self, answers: Tensor | bool) -> Tensor:
        """This row's part of what was answered for all; whole where there is no row in it, as in a plain bool."""
        answers = torch.as_tensor(answers)
        return answers[self.place : self.place + 1] if answers.dim() and len(answers) == self.rows else answers

    def shown(self, ids: Int[Tensor, "1 length"]) -> Int[Tensor, "batch longer"]:
        """The row's tokens behind its padding. All other rows are the same: none is read but this one's answer."""
        ids = torch.cat([self.padding, ids.to(self.padding.device)], 1)
        return ids.expand(self.rows, -1)


class AtRow(LogitsProcessor):
    """A batch's logits processor, asked about one row: it may count the padding in, or go by the number of the row."""

    def __init__(self, process: Any, row: PaddedRow) -> None:
        self.process, self.row = process, row

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        return self.row.own(self.process(self.row.shown(input_ids), scores.expand(self.row.rows, -1).clone()))
