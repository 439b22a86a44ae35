"""Tables on tensors: what a store and the text at hand say of many tails at once (`interpolate`), at no read.

Owns the text on the device, its tokens alone: every tail is compared with every place of it. Its columns are the places
where a token first stands; a store's followers that the text has not have columns behind them.
All lengths of a match are computed at once, the longest first. Candidates come in the host's order, so that ties are
the host's. Probabilities are float64, as the host's: of two that float32 would round to one, the host knows the better.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import threshold

from opt_tree.backends.tensor_drafter import Behind, TensorDrafter
from opt_tree.backends.tensor_pool import TensorPool
from opt_tree.methods.drafters.tables.ngram import LEAST, Interpolated
from opt_tree.methods.drafters.tables.store import StoreDrafter
from opt_tree.tools.store_tensors import LATE, StoreTensors
from opt_tree.tree import send

_LEAST_PLACES, _LEAST_VOCAB = 256, 1 << 18
_NEVER = 1 << 62
"""More than any rank, and any place."""
_LITTLE = math.nextafter(LEAST, 0)


class TextTensors:
    """The text at hand on the device, with room behind it. Written in place: a graph holds its addresses."""

    def __init__(self, places: int, vocab: int, device: torch.device) -> None:
        self.tokens = torch.full((places,), -2, device=device)
        """-2 behind the text."""
        self.where = torch.full((vocab,), _NEVER, device=device)
        """Where each token first stands; `_NEVER`: nowhere."""

    def fits(self, length: int, most: int) -> bool:
        """Whether so many tokens have places, the greatest one too."""
        return length <= len(self.tokens) and most < len(self.where)

    def fill(self, text: Int[np.ndarray, " text"]) -> None:
        """Have this text in the place of another one."""
        self.tokens.fill_(-2)
        self.where.fill_(_NEVER)
        if len(text):
            self.add(send(text, self.tokens.device), torch.zeros((), dtype=torch.long, device=self.tokens.device))

    def add(self, tokens: Int[Tensor, " new"], begin: Int[Tensor, ""]) -> None:
        """Write more tokens; -2: none."""
        places = begin + torch.arange(len(tokens), device=tokens.device)
        self.tokens.index_copy_(0, places, tokens)
        places = torch.where(tokens < 0, _NEVER, places)
        self.where.scatter_reduce_(0, tokens.clamp(min=0), places, "amin")


class Tabled(TensorDrafter):
    """A table of a store, of the text at hand, or of both."""

    drafter: Interpolated
    names_few = True

    def __init__(self, drafter: Interpolated, whole: bool = False) -> None:
        """`whole`: all tokens of a tail are named, not only as many as a tree may have."""
        super().__init__(drafter, 0)
        self._whole = whole
        self._text: TextTensors | None = None
        self._beta: Tensor
        self._counts: object = None
        """The host's counts of the text that is on the device: another text has others."""
        self._known = 0
        """How many tokens of the text are there."""
        self._store: StoreTensors | None = None

    def held(self) -> tuple[Any, ...]:
        return self._text, self._store

    def sends(self, layers: int) -> int:
        return 1 + self.drafter.order + layers + 1

    def sent(self, context: list[int], layers: int, device: torch.device) -> Int[np.ndarray, " numbers"]:
        """How many tokens are there already, the root's tail, the tokens that are new."""
        drafter, order, room = self.drafter, self.drafter.order, layers + 1
        vocab = _LEAST_VOCAB
        if isinstance(drafter, StoreDrafter) and len(drafter.store.arrays[0]):
            vocab = max(vocab, drafter.store.vocab)
            if self._store is None:
                self._store = StoreTensors(drafter.store, device)
        new, text, same = context[self._known :], self._text, self._counts is drafter.text.counts
        # The step behind this one may be launched before it is known how many tokens this one brings.
        if text is None or not text.fits(len(context) + 2 * room, max(new if same else context, default=0)):
            most = max(vocab, 2 ** max(context).bit_length())
            places = max(_LEAST_PLACES, 2 ** (len(context) + 2 * room).bit_length())
            text, same = TextTensors(places, most, device), False
            self._beta = send(np.array(drafter.beta[::-1]), device)
        if not same or len(new) > room:
            text.fill(np.array(context, dtype=np.int64))
            self._text, self._counts = text, drafter.text.counts
            new, self._known = [], len(context)
        numbers = np.full(self.sends(layers), -2)
        numbers[0], tail = self._known, context[-order:]
        numbers[1 + order - len(tail) : 1 + order] = tail
        numbers[1 + order : 1 + order + len(new)] = new
        self._known += len(new)
        return numbers

    def goes_on(self, length: int, layers: int, vocab: int) -> bool:
        return self._text is not None and self._text.fits(length + layers + 1, vocab - 1)

    def sent_after(
        self, more: Int[Tensor, " numbers"], emitted: Int[Tensor, " path"], accepted: Int[Tensor, ""]
    ) -> Int[Tensor, " numbers"]:
        order, device = self.drafter.order, more.device
        tail = torch.cat([more[1 : 1 + order], emitted])[accepted + 1 + torch.arange(order, device=device)]
        known, new = more[:1] + (more[1 + order :] >= 0).sum(), torch.full_like(more[1 + order :], -2)
        there = torch.arange(len(emitted), device=device) <= accepted
        new[: len(emitted)] = torch.where(there, emitted, -2)
        return torch.cat([known, tail, new])

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        order, text, device = self.drafter.order, self._text, behind.more.device
        assert text is not None
        text.add(behind.more[1 + order :], behind.more[0])
        self._tails, self._nodes = behind.more[1 : 1 + order][None], behind.nodes
        self._tokens, self._where = text.tokens[: behind.keys], text.where
        places = torch.arange(len(self._tokens), device=device)
        self._first = torch.where(self._tokens < 0, places, self._where[self._tokens.clamp(min=0)])
        self._late, self._lengths = places + LATE, torch.arange(order, 0, -1, device=device)
        before = places - torch.arange(1, order + 1, device=device)[:, None]
        before = torch.where(before < 0, -2, self._tokens[before.clamp(min=0)])
        self._before = torch.where(self._tokens < 0, -3, before)
        """Of each place the last 1, 2, ... tokens before it; no token where none stands there."""
        return self._look_up()

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        self._tails = torch.cat([self._tails[above, 1:], tokens[:, None]], 1)
        return self._look_up()

    @property
    def names(self) -> Int[Tensor, "tails columns"]:
        """What was named last, a row a tail."""
        return self.named

    def _look_up(self) -> Float[Tensor, "tails columns"]:
        """Return what may follow each tail: as many of its best tokens as matter, in the host's order."""
        probs, ranks, tokens = self._law()
        order = ranks.argsort(1)
        probs = probs.gather(1, order)
        if not self._whole:
            best = probs.argsort(dim=1, descending=True, stable=True)[:, : self._nodes].sort(1).values
            probs, order = probs.gather(1, best), order.gather(1, best)
        self.named = tokens.gather(1, order)
        return probs.log()

    def _law(self) -> tuple[Float[Tensor, "tails all"], Int[Tensor, "tails all"], Int[Tensor, "tails all"]]:
        """`interpolate` for every tail: probabilities, ranks in the host's order, tokens; 0: not named there.

        Sums are the host's, addend after addend: of one kind of match and one length, each token has one at most.
        """
        tails, weight, kinds = self._tails, self.drafter.weight, 1 if self._store is None else 2
        (count, order), places, device = tails.shape, len(self._tokens), tails.device
        # How many of a tail's last tokens stand before each place; and which places a match of each length has.
        length = (tails.flip(1)[:, :, None] == self._before).cumprod(1).sum(1)
        matched = (length[:, None] >= self._lengths[:, None]).double()
        evidence, names = weight * matched.sum(2), [self._tokens.expand(count, -1)]
        if self._store is not None:
            totals, tokens, counts, there = self._store.read(tails)
            evidence = evidence + totals
            names.append(tokens.flatten(1))
        names.append(torch.full_like(tails[:, :1], -1))  # a column for what is not there
        scale, named = self._scale(evidence), torch.cat(names, 1)
        addends = torch.zeros(count, order, kinds, named.shape[1], dtype=torch.float64, device=device)
        seen = addends[:, :, -1, :places].scatter_add_(2, self._first.expand(count, order, -1), matched)
        seen.mul_(weight).mul_(scale[..., None])
        ranks, at = torch.full_like(named, _NEVER), order - length
        counted = torch.constant_pad_nd(scale, (0, 1)).gather(1, at) > 0
        rank = torch.where(counted, at * (2 * LATE) + self._late, _NEVER)
        ranks.scatter_reduce_(1, self._first.expand(count, -1), rank, "amin")
        if self._store is not None:
            columns, worth = self._columns(tokens, there), counts * scale[..., None]
            there = there & (worth.cummin(2).values >= LEAST)  # the most frequent ones first
            addends[:, :, 0].scatter_add_(2, columns, torch.where(there, worth, 0.0))
            rank = torch.where(there, self._store.ranks, _NEVER).flatten(1)
            ranks.scatter_reduce_(1, columns.flatten(1), rank, "amin")
        return addends.flatten(1, 2).cumsum(1)[:, -1], ranks, named

    def _scale(self, evidence: Float[Tensor, "tails order"]) -> Float[Tensor, "tails order"]:
        """By what a match's counts are multiplied; 0: by nothing that was seen, or the longer matches leave too little.

        Divided and multiplied one after the other, as the host rounds.
        """
        some = (evidence > 0).unbind(1)
        parts = torch.where(evidence > 0, evidence + self._beta, torch.inf).unbind(1)
        share, scales = torch.ones_like(evidence[:, 0]), []
        for beta, known, part in zip(reversed(self.drafter.beta), some, parts, strict=True):
            scales.append(share / part)
            share = torch.where(known, threshold(scales[-1] * beta, _LITTLE, 0.0), share)
        return torch.stack(scales, 1)

    def _columns(
        self, tokens: Int[Tensor, "tails order followers"], there: Bool[Tensor, "tails order followers"]
    ) -> Int[Tensor, "tails order followers"]:
        """In which column each follower is: where the text first has it, or the longest match that does."""
        known, places = tokens.flatten(1), len(self._tokens)
        same = (known[:, :, None] == known[:, None, :]) & there.flatten(1)[:, None, :]
        own = torch.arange(places, places + known.shape[1], device=tokens.device)
        columns = torch.where(same, own, places + known.shape[1]).amin(2)
        stands = self._where[known]
        return torch.where(stands < places, stands, columns).view_as(tokens)
