"""Tables on tensors: what a store and the text at hand say of many tails at once (`interpolate`), at no read.

Owns the arrays on the device. The text at hand is its tokens alone: every tail is compared with every place of it. Its
columns are the places where a token first stands; a store's followers that the text has not have columns behind them.
Candidates come in the host's order, the longest match first, so that ties are the host's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opt_tree.backends.tensor_drafter import Behind, TensorDrafter
from opt_tree.backends.tensor_pool import Children, TensorPool
from opt_tree.methods.drafters.tables.ngram import LEAST, Interpolated
from opt_tree.methods.drafters.tables.store import FACTOR, FOLLOWERS, Store, StoreDrafter
from opt_tree.tree import send

_LEAST_PLACES, _LEAST_VOCAB = 256, 1 << 16
_SIGN, _WHOLE = -(1 << 63), 1 << 64
_LATE, _NEVER = 1 << 32, 1 << 62
"""More than a text has tokens, and a row followers; more than any rank."""


class Followers(NamedTuple):
    """Of some tails, what followed their last k tokens in a store."""

    totals: Float[Tensor, " tails"]
    tokens: Int[Tensor, "tails followers"]
    counts: Float[Tensor, "tails followers"]
    there: Bool[Tensor, "tails followers"]


class StoreTensors:
    """A store on the device."""

    def __init__(self, store: Store, device: torch.device) -> None:
        keys, first, totals, tokens, counts = (array.astype(np.uint64).view(np.int64) for array in store.arrays)
        self.bits, self.vocab, self._flip = store.bits, store.vocab, _SIGN if store.bits == 64 else 0
        self._keys, self._first, self._tokens = (send(one, device) for one in (keys ^ self._flip, first, tokens))
        self._totals, self._counts = (send(one.astype(np.float64), device) for one in (totals, counts))

    def rows(self, tails: Int[Tensor, "tails order"]) -> Iterator[Followers]:
        """What followed the last 1, 2, ... tokens of each tail; -1 stands before a text. Keys are those of `hashes`."""
        state = torch.zeros_like(tails[:, 0])
        for column in range(tails.shape[1] - 1, -1, -1):
            state = (state + tails[:, column] + 1) * (FACTOR - _WHOLE)
            key = (state >> 64 - self.bits & (1 << self.bits) - 1) if self.bits < 64 else state ^ self._flip
            yield self._read(key, tails[:, column] >= 0)

    def _read(self, key: Int[Tensor, " tails"], known: Bool[Tensor, " tails"]) -> Followers:
        place = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        known = known & (self._keys[place] == key)
        places = self._first[place][:, None] + torch.arange(FOLLOWERS, device=key.device)
        there = (places < self._first[place + 1][:, None]) & known[:, None]
        places = places.clamp(max=len(self._tokens) - 1)
        tokens = self._tokens[places]
        there = there & (tokens < self.vocab)
        counts = torch.where(there, self._counts[places], 0.0)
        return Followers(torch.where(known, self._totals[place].maximum(counts.sum(1)), 0.0), tokens, counts, there)


class TextTensors(NamedTuple):
    """The text at hand on the device, with room behind it."""

    tokens: Int[Tensor, " places"]
    """-2 behind the text."""
    where: Int[Tensor, " vocab"]
    """Where each token first stands; as many as there are places: nowhere."""

    @classmethod
    def of(cls, text: list[int], room: int, device: torch.device) -> "TextTensors":
        """`room`: for so many more tokens at least."""
        places = max(_LEAST_PLACES, 2 ** (len(text) + room).bit_length())
        tokens, where = np.full(places, -2), np.full(max(_LEAST_VOCAB, 2 ** max(text, default=0).bit_length()), places)
        tokens[: len(text)] = text
        known, first = np.unique(np.array(text, dtype=np.int64), return_index=True)
        where[known] = first
        return cls(send(tokens, device), send(where, device))

    def holds(self, new: list[int], room: int, length: int) -> bool:
        """Whether there are places for `room` more tokens behind the text, and for each of these in the vocabulary."""
        return length + room <= len(self.tokens) and max(new, default=0) < len(self.where)

    def add(self, tokens: Int[Tensor, " new"], begin: Int[Tensor, ""]) -> None:
        """Write more tokens in place; -2: none."""
        places = begin + torch.arange(len(tokens), device=tokens.device)
        self.tokens.index_copy_(0, places, tokens)
        places = torch.where(tokens < 0, len(self.tokens), places)
        self.where.scatter_reduce_(0, tokens.clamp(min=0), places, "amin")

    def matches(self, tails: Int[Tensor, "tails order"]) -> Iterator[Bool[Tensor, "tails places"]]:
        """Which places follow the last 1, 2, ... tokens of each tail."""
        found, before = self.tokens.expand(len(tails), -1) >= 0, self.tokens
        for column in range(tails.shape[1] - 1, -1, -1):
            before = torch.constant_pad_nd(before[:-1], (1, 0), -2)
            found = found & (before == tails[:, column, None])
            yield found


class Tabled(TensorDrafter):
    """A table of a store, of the text at hand, or of both."""

    drafter: Interpolated
    names_few = True

    def __init__(self, drafter: Interpolated, whole: bool = False) -> None:
        """`whole`: all tokens of a tail are named, not only as many as a tree may have."""
        super().__init__(drafter, 0)
        self._whole = whole
        self._text: TextTensors
        self._counts: object = None
        """The host's counts of the text that is on the device: another text has others."""
        self._known = 0
        """How many tokens of the text are there."""
        self._store: StoreTensors | None = None

    def sends(self, layers: int) -> int:
        return 1 + self.drafter.order + layers + 1

    def sent(self, context: list[int], layers: int, device: torch.device) -> Int[np.ndarray, " numbers"]:
        """How many tokens are there already, the root's tail, the tokens that are new."""
        drafter, order, room = self.drafter, self.drafter.order, layers + 1
        if self._store is None and isinstance(drafter, StoreDrafter) and len(drafter.store.arrays[0]):
            self._store = StoreTensors(drafter.store, device)
        whole = context if drafter.weight else []
        new = whole[self._known :]
        if self._counts is not drafter.text.counts or len(new) > room or not self._text.holds(new, room, self._known):
            self._text, self._counts = TextTensors.of(whole, room, device), drafter.text.counts
            new, self._known = [], len(whole)
        numbers = np.full(self.sends(layers), -2)
        numbers[0], tail = self._known, context[-order:]
        numbers[1 + order - len(tail) : 1 + order] = tail
        numbers[1 + order : 1 + order + len(new)] = new
        self._known += len(new)
        return numbers

    def begin(self, behind: Behind) -> Float[Tensor, "1 columns"]:
        order = self.drafter.order
        self._text.add(behind.more[1 + order :], behind.more[0])
        self._tails, self._nodes = behind.more[1 : 1 + order][None], behind.nodes
        return self._look_up()

    def below(
        self, pool: TensorPool, tokens: Int[Tensor, " frontier"], above: Int[Tensor, " frontier"]
    ) -> Float[Tensor, "frontier columns"]:
        self._tails = torch.cat([self._tails[above, 1:], tokens[:, None]], 1)
        return self._look_up()

    def names(self, children: Children) -> Int[Tensor, " children"]:
        """What was named last, a row a tail."""
        return self.named[children.rows, children.columns]

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
        tails, text, weight = self._tails, self._text, self.drafter.weight
        matches = list(text.matches(tails))
        rows = [] if self._store is None else list(self._store.rows(tails))
        columns, names = self._columns(rows[::-1])
        probs = torch.zeros(names.shape, dtype=torch.float64, device=names.device)
        ranks, share = torch.full_like(names, _NEVER), torch.ones_like(probs[:, 0])
        own, each = (torch.arange(size, device=names.device) for size in (len(text.tokens), FOLLOWERS))
        first = torch.where(text.tokens < 0, own, text.where[text.tokens.clamp(min=0)]).expand_as(matches[0])
        for place, length in enumerate(range(len(matches), 0, -1)):
            match, beta = matches[length - 1], self.drafter.beta[length - 1]
            evidence = weight * match.sum(1, dtype=torch.float64)
            if rows:
                evidence = evidence + rows[length - 1].totals
            some = (evidence > 0) & (share > 0)
            scale = torch.where(some, share / (evidence + beta), 0.0)[:, None]
            if rows:
                _, _, counts, there = rows[length - 1]
                worth = counts * scale
                there = there & ((worth >= LEAST) | ~there).cumprod(1).bool()  # the most frequent ones first
                probs.scatter_add_(1, columns[place], torch.where(there, worth, 0.0))
                rank = torch.where(there, 2 * place * _LATE + each, _NEVER)
                ranks.scatter_reduce_(1, columns[place], rank, "amin")
            seen = torch.zeros_like(probs).scatter_add_(1, first, match.double())
            probs = probs + weight * seen * scale
            rank = torch.where(match & some[:, None], (2 * place + 1) * _LATE + own, _NEVER)
            ranks.scatter_reduce_(1, first, rank, "amin")
            share = torch.where(some, beta * scale[:, 0], share)
            share = torch.where(share < LEAST, 0.0, share)
        return probs, ranks, names

    def _columns(self, rows: list[Followers]) -> tuple[list[Int[Tensor, "tails followers"]], Int[Tensor, "tails all"]]:
        """In which column each row's followers are, and the tokens of all columns; the last one is nobody's."""
        text, tails = self._text, self._tails
        names, places = text.tokens.expand(len(tails), -1), len(text.tokens)
        nobody = torch.full_like(tails[:, :1], -1)
        if not rows:
            return [], torch.cat([names, nobody], 1)
        tokens, there = (torch.cat([row[part] for row in rows], 1) for part in (1, 3))
        same = (tokens[:, :, None] == tokens[:, None, :]) & there[:, None, :]
        slots = torch.arange(tokens.shape[1], device=tails.device)
        columns = places + torch.where(same, slots, len(slots)).amin(2)
        stands = torch.where(tokens < len(text.where), text.where[tokens.clamp(max=len(text.where) - 1)], places)
        columns = torch.where(there & (stands < places), stands, columns)
        return list(columns.split(FOLLOWERS, 1)), torch.cat([names, tokens, nobody], 1)
