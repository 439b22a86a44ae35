"""Prompt lookup: what followed the last few tokens earlier in this very text, at no forward.

Owns counts of a text (`Counts`) and how counts of shorter and longer matches become one probability (`interpolate`).
Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) copies the continuation of the longest match;
counting all matches of all lengths gives probabilities instead, which a tree can be built on.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from opt_tree.generation import Outcome
from opt_tree.methods.drafters.registry import DrafterOptions, register
from opt_tree.methods.drafters.tables.lookup import Lookup, Tail
from opt_tree.models.chain_lm import AnyLM
from opt_tree.sampling import Temperature
from opt_tree.target import Output

BETA = (4.0, 2.5, 1.25, 0.75)
"""How many observations a shorter match is worth, by the length of the longer one (1, 2, ... tokens)."""
LEAST = 5e-3
"""What is worth less to a probability is left out of it: a tree of 60 nodes has hardly a node of that probability."""


class RunFollowers(NamedTuple):
    """What followed one run of tokens."""

    total: float
    """Times anything did."""
    followers: Sequence[tuple[int, float]]
    """Tokens, each with the times it did, the most frequent ones first."""


_NONE = RunFollowers(0.0, ())
_NOTHING: dict[int, int] = {}


class Counts:
    """How often each token followed each run of 1 to `order` tokens in the text so far.

    "a b a b c", order 1:  a -> {b: 2}   b -> {a: 1, c: 1}
    """

    def __init__(self, order: int, text: Sequence[int] = ()) -> None:
        self.order = order
        self._followers: dict[Tail, dict[int, int]] = {}
        self._tail: Tail = ()
        self.add(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Count `tokens` as the continuation of the text so far."""
        followers, tail = self._followers, self._tail
        for token in tokens:
            for start in range(len(tail)):
                run = followers.setdefault(tail[start:], {})
                run[token] = run.get(token, 0) + 1
            tail = (*tail, token)[max(len(tail) + 1 - self.order, 0) :]
        self._tail = tail

    def after(self, tail: Tail) -> list[dict[int, int]]:
        """What followed the last 1, 2, ... tokens of a tail, and how often, as far as they did. Not to be changed."""
        followers, found = self._followers, []
        for start in range(len(tail) - 1, -1, -1):
            run = followers.get(tail[start:])
            if run is None:  # then no longer run was followed either
                break
            found.append(run)
        return found


class Text(NamedTuple):
    """The text at hand as evidence: what one observation in it is worth, measured in those of the rows beside it."""

    counts: Counts
    weight: float = 1.0


def interpolate(tail: Tail, text: Text, beta: Sequence[float], rows: Sequence[RunFollowers] = ()) -> dict[int, float]:
    """Return {token: probability} of what follows `tail`, from the longest match down to the shortest.

    p_k(w) = (c_k(w) + beta_k p_{k-1}(w)) / (C_k + beta_k), p_0 = 0: c_k(w) times did w follow the last k tokens, C_k
    times did anything; `beta[k - 1]` belongs to k (interpolation with a fixed constant, after Jelinek and Mercer,
    1980). What never occurred has no probability: the missing mass is the chance of something new. `rows[k - 1]`
    counts in other texts. Example, beta (2, 1):

        "the" 10 times, then "cat" 4           p_1(cat) = 4 / (10 + 2)               = .33
        "feed the" once, then "cat"            p_2(cat) = (1 + 1 x .33) / (1 + 1)    = .67
    """
    probs: dict[int, float] = {}
    counts, weight = text
    known = counts.after(tail)
    share = 1.0  # what the longer matches leave to the others
    for length in range(min(max(len(rows), len(known)), len(beta)), 0, -1):
        evidence, followers = rows[length - 1] if length <= len(rows) else _NONE
        local = known[length - 1] if length <= len(known) else _NOTHING
        if local:
            evidence += weight * sum(local.values())
        if not evidence:
            continue
        scale = share / (evidence + beta[length - 1])
        for token, count in followers:  # the most frequent ones first
            if count * scale < LEAST:
                break
            probs[token] = probs.get(token, 0.0) + count * scale
        for token, seen in local.items():
            probs[token] = probs.get(token, 0.0) + weight * seen * scale
        share = beta[length - 1] * scale
        if share < LEAST:
            break
    return probs


class Interpolated(Lookup):
    """A drafter by `interpolate`: from the text at hand, and from whatever `rows` adds."""

    weight = 1.0
    """What a match in the text at hand counts for."""

    def __init__(self, beta: Sequence[float]) -> None:
        if not beta or min(beta) < 0:
            raise ValueError(f"interpolation takes a beta of 0 or more for each length of a match, got {tuple(beta)}")
        super().__init__(len(beta))
        self.beta = tuple(map(float, beta))
        self._count([])

    @abstractmethod
    def rows(self, tail: Tail) -> Sequence[RunFollowers]:
        """What followed the last 1, 2, ... tokens of a tail elsewhere; () for nothing at all."""

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        super().begin(prompt, kept, prefill, sampling)
        self._count(prompt)

    def _count(self, prompt: list[int]) -> None:
        self.text = Text(Counts(self.order, prompt), self.weight)

    def keeps(self, prompt: list[int]) -> int:
        return len(prompt)  # counting a text again is quick

    def accept(self, outcome: Outcome) -> None:
        self.text.counts.add(outcome.tokens)

    def law(self, tail: Tail) -> dict[int, float]:
        """What follows a tail, by `interpolate`."""
        return interpolate(tail, self.text, self.beta, self.rows(tail))

    @property
    def settings(self) -> dict[str, Any]:
        return {"beta": list(self.beta), "weight": self.weight}


class NGramDrafter(Interpolated):
    """Drafts what followed the same tokens before, in prompt and answer: prompt lookup with probabilities.

    `beta` has a constant for each length of a match, hence also says how long matches may be. With `beta=(0, 0, 0)` the
    longest match alone counts, of at most three tokens, as in prompt lookup's code; that drafts one chain of ten, what
    followed the first such match, and here all such matches count.
    """

    def __init__(self, beta: Sequence[float] = BETA) -> None:
        super().__init__(beta)

    def rows(self, tail: Tail) -> Sequence[RunFollowers]:
        return ()

    def describe(self) -> str:
        return "n-grams of the text at hand"


@register("ngram", about="what followed the same tokens before, in this text (prompt lookup)")
def _load(path: str, target: AnyLM, options: DrafterOptions) -> NGramDrafter:
    return NGramDrafter()
