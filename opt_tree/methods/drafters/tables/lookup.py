"""Drafters that look the next token up by the last few: no model, no forward, a few tokens a node.

Owns the tails (the last tokens before each node of a draft) and the way from counts to an answer. Knows nothing of
where the counts come from: the text before (`ngram.py`), a file (`store.py`), the target's logits (`recycling.py`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.registry import DrafterOptions, load_drafter, two_specs
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.pool import Frontier

Tail = tuple[int, ...]
"""The last tokens before the one that is to be drafted, the newest last; shorter where the text is."""


class Tails:
    """The tail of every node that was expanded in this step, by draft row: 0 the root, k the k-th node expanded.

    Context "the cat sat", tails of two tokens, a draft "on | the" below it:

        row 0  (cat, sat)       row 1  (sat, on)       row 2  (on, the)
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._rows: list[Tail] = []

    def root(self, context: Sequence[int]) -> list[Tail]:
        """Begin a step: forget the last one, return the tail of the root."""
        self._rows = [tuple(context[-self.length :])]
        return self._rows[:]

    def expand(self, frontier: Frontier) -> list[Tail]:
        """Return the tails of a frontier, which become those of the next draft rows."""
        rows, keep = self._rows, 1 - self.length
        pairs = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        tails = [((*rows[parent][keep:], token) if keep else (token,)) for parent, token in pairs]
        rows += tails
        return tails


class Lookup(Drafter):
    """A drafter whose answer depends on the last `order` tokens alone. `law` is all that there is to write."""

    names_few = True

    def __init__(self, order: int) -> None:
        if order < 1:
            raise ValueError(f"a drafter that looks up the last tokens needs at least one of them, got order {order}")
        self.order = order
        self._tails = Tails(order)

    @abstractmethod
    def law(self, tail: Tail) -> Mapping[int, float]:
        """Return {token: probability} of what may follow a tail. They are meant: a mass below 1 stays below 1."""

    def look_up(self, tails: list[Tail]) -> LogProbs:
        """Return what may follow each tail."""
        return few([self.law(tail) for tail in tails])

    def root(self, context: list[int]) -> LogProbs:
        return self.look_up(self._tails.root(context))

    def expand(self, frontier: Frontier) -> LogProbs:
        return self.look_up(self._tails.expand(frontier))


def few(rows: Sequence[Mapping[int, float]]) -> LogProbs:
    """Return what rows of {token: probability} say, in float64, as wide as the widest.

    >>> few([{5: 0.5, 2: 0.25}, {}]).tokens.tolist()
    [[5, 2], [-1, -1]]
    """
    width = max(1, *map(len, rows)) if rows else 1
    tokens, probs = np.full((len(rows), width), -1), np.zeros((len(rows), width))
    for number, row in enumerate(rows):
        tokens[number, : len(row)], probs[number, : len(row)] = list(row), list(row.values())
    # torch's logarithm, which takes 0 for what it is: silencing numpy costs as much as all the rest.
    return LogProbs(torch.from_numpy(probs).log_(), torch.from_numpy(tokens))


def load_with_table(kind: str, pair: str, target: AnyLM, options: DrafterOptions) -> tuple[Drafter, Lookup]:
    """Load the two drafters of "SPEC+SPEC", of which the second one looks up. CheckpointError where it does not."""
    first, second = two_specs(kind, pair)
    table = load_drafter(second, target, options)
    if not isinstance(table, Lookup):
        raise CheckpointError(f"{kind}: {second} is no table; below a model stand ngram, store, recycling")
    return load_drafter(first, target, options), table
