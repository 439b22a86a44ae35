"""Grammars: logits processors that keep a state, made safe for trees.

A tree asks a processor about many continuations of one text, in no order of their own. A grammar matcher that advances
at every call would follow none of them. `FromHistory` brings the matcher to the row's own history first, forwards and
back. Knows no grammar library: see `Matcher` for the three calls it needs.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from opt_tree.target import shared


@runtime_checkable
class Matcher(Protocol):
    """A grammar's state, which begins before the first generated token."""

    def advance(self, token: int) -> bool:
        """Take one token; False, and no change, where the grammar does not allow it here."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def mask(self, scores: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        """Return the scores with -inf for every token that may not come next."""
        ...


class FromHistory(LogitsProcessor):
    """A logits processor that depends on the ids alone, around a matcher that does not.

    `prompt` is the number of tokens that the grammar does not see. A history that the grammar does not allow (a drafted
    token that it forbids) leaves the scores as they are: the row above it has no probability for that token, so nobody
    gets there.
    """

    of_history = True

    def __init__(self, matcher: Matcher, prompt: int) -> None:
        self.matcher, self.prompt = matcher, prompt
        self._taken: list[int] = []

    def __call__(
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """Return the scores of one text; several rows must all be that text, as the door shows a batch row by row."""
        if len(input_ids) > 1 and not bool((input_ids == input_ids[:1]).all()):
            raise ValueError(f"FromHistory follows one text, and these are {len(input_ids)}: give each its own matcher")
        history = input_ids[0, self.prompt :].tolist()
        kept = shared(history, self._taken)
        if back := len(self._taken) - kept:
            self.matcher.rollback(back)
            del self._taken[kept:]
        for token in history[kept:]:
            if not self.matcher.advance(token):
                return scores
            self._taken.append(token)
        return self.matcher.mask(scores[:1]).expand(len(scores), -1)
