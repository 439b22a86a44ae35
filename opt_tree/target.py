"""What the loop needs of a target; what a forward is asked for as (`Forward`), leaves (`Output`) and costs (`Work`)."""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from opt_tree.tree import Tree

NO_FEATURES: Mapping[int, Tensor] = MappingProxyType({})


class Drafted(NamedTuple):
    """What a drafter reads of its model's logits."""

    columns: int
    """The first so many."""
    tokens: Int[Tensor, " columns"] | None
    """The target's tokens of them, on the model's device; None: their numbers."""
    scale: Float[Tensor, " 1"]
    """What logits are multiplied by in the text under way. A captured graph holds its address."""


class Output(NamedTuple):
    """What a forward left, valid until the same model runs again; whoever keeps it clones it."""

    logits: Float[Tensor, "rows vocab"]
    features: Mapping[int, Float[Tensor, "tokens hidden"]] = NO_FEATURES
    """Hidden states of every row by layer, of the layers that are watched (see `Target.watch`)."""
    best: Int[Tensor, "2 rows k"] | None = None
    """Of a drafter's model that picks them in its forward: the best tokens of each row whose logits are there, in
    rising order. The bits of their log-probabilities, and the tokens."""

    def of_text(self, rows: int, last_only: bool = False) -> "Output":
        """Of what a backend returns of one text, `[1, rows, ...]`, without the padding in front of its rows.

        With `last_only` the last row's logits, and all rows' features.
        """
        features = {layer: states[0, -rows:] for layer, states in self.features.items()}
        kept = 1 if last_only else rows
        best = None if self.best is None else self.best[:, 0, -kept:]
        return Output(self.logits[0, -kept:], features, best)


@dataclass(frozen=True, eq=False)
class Forward:
    """Rows that a model is asked to run, by `model.run` or by whoever runs several of them together."""

    model: Any
    tokens: Int[np.ndarray, " rows"]
    positions: Int[np.ndarray, " rows"]
    visible: Bool[np.ndarray, "rows pending"]
    """Which pending rows, these included, a row sees; every row sees the whole committed context."""
    features: Float[Tensor, "rows hidden"] | None = None
    """Inputs of a head that drafts in the target's feature space."""
    goes_on: bool = False
    """These rows continue the context: they are committed as soon as they have run."""
    last_only: bool = False
    """Only the last row's logits are returned; the features of all."""
    tree: Tree | None = None
    """The tree whose rows these are, for models that ask more of it than who sees whom."""

    def part(self, first: int, end: int) -> "Forward":
        """Some of the rows; of those that continue the context, as if those before them were committed."""
        before = self.visible.shape[1] - len(self.tokens)
        visible = self.visible[first:end, first if self.goes_on else 0 : before + end]
        features = None if self.features is None else self.features[first:end]
        tokens, positions = self.tokens[first:end], self.positions[first:end]
        return replace(self, tokens=tokens, positions=positions, visible=visible, features=features)


T = TypeVar("T")
Asking = Generator[Forward, Output, T]
"""Asks for forwards, is sent what came of each, and returns a T in the end."""


def run_alone(asking: Generator[Any, Any, T], compute: Callable[[Any], Any] = lambda one: one.model.run(one)) -> T:
    """Compute everything that is asked for, one by one; return what comes of it.

    What goes wrong in a forward goes wrong where it was asked for.
    """
    try:
        asked = next(asking)
        while True:
            try:
                output = compute(asked)
            except BaseException as error:
                asked = asking.throw(error)
            else:
                asked = asking.send(output)
    except StopIteration as end:
        return end.value


@functools.lru_cache(64)
def causal(rows: int) -> Bool[np.ndarray, "rows rows"]:
    """What the rows of a text see: themselves and those before them. A view of few numbers, however long the text."""
    return sliding_window_view(np.arange(2 * rows - 1) < rows, rows)[::-1]


class Work(NamedTuple):
    """What a model has done so far. Only differences are read."""

    forwards: int = 0
    tokens: int = 0
    """Rows in those forwards."""
    seconds: float = 0.0
    """Time inside the bare model, by the clock of whoever computes its forwards."""

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(self.forwards + other.forwards, self.tokens + other.tokens, self.seconds + other.seconds)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.forwards - other.forwards, self.tokens - other.tokens, self.seconds - other.seconds)


class Turns:
    """Threads that share what serves one at a time take turns by this lock. A copy or a pickle has a free one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Turns, ()


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many tokens, or characters, two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Target(ABC):
    """A model whose distribution is reproduced. It holds one context; the root of a tree is not yet part of it.

    Per prompt: `reset`, or `keep` of what is there already, then the `text` of the rest of the prompt without its last
    token, then per step a `tree` and `commit`. What `text` and `tree` return is run by `run`.
    """

    name: str
    vocab: int
    """Logits a row."""
    max_context: int
    """Tokens of context, the newest included."""
    context_note: str = ""
    """Why the context ends there, where that is not the model's own end: for messages."""
    ends: frozenset[int] = frozenset()
    """The tokens at which its answers end, as far as they are known: a generation stops there unless told otherwise."""
    device: torch.device = torch.device("cpu")
    work: Work = Work()
    length: int = 0
    """Tokens of the context."""
    generation: int = 0
    """How often it was reset. The loop compares it: a second generation on the same target ends the first."""

    ranks: Any = None
    """The processes that the model is spread over, with `led` and `check_led`; None: it is whole in this one."""

    def __repr__(self) -> str:
        size = getattr(self, "size", f"{self.vocab} logits a row")
        return f"<{type(self).__name__} {self.name}: {size}, {self.max_context} tokens of context>"

    def about_to_decode(self, sampling: Any) -> None:  # noqa: B027 - few have something to say
        """Hear how texts will be drawn, once for each call of a user; one who has a warning gives it here."""

    def reset(self) -> None:
        """Forget the context. A subclass that holds one extends this."""
        self.generation += 1

    def keep(self, prompt: list[int], most: int) -> int:
        """Forget all but what `prompt` begins with, too, at most `most` tokens; return how many are kept.

        0 where the context cannot be cut, or where a whole prefill of `prompt` would make other rows: all is forgotten.
        """
        self.reset()
        return 0

    def text(
        self, tokens: Sequence[int], features: Float[Tensor, "tokens hidden"] | None = None, all_logits: bool = False
    ) -> Forward:
        """The next tokens of the context, which are committed when they have run.

        Returns features of every token; logits of the last one, or of all.
        """
        if not len(tokens):
            raise ValueError("nothing to append: the token list is empty")
        positions = np.arange(self.length, self.length + len(tokens))
        return Forward(self, np.array(tokens), positions, causal(len(tokens)), features, True, not all_logits)

    def tree(self, tree: Tree) -> Forward:
        """All rows of a tree whose root is the next token of the context. Nothing of it is committed yet."""
        return Forward(self, tree.tokens, self.length + tree.depths, tree.ancestors, tree=tree)

    @abstractmethod
    def run(self, forward: Forward) -> Output:
        """Compute what was asked for: of a tree the logits of every row."""

    def append(self, tokens: list[int], all_logits: bool = False) -> Output:
        """Run the next tokens of the context by themselves; see `text`."""
        return self.run(self.text(tokens, all_logits=all_logits))

    def score(self, tree: Tree) -> Output:
        """Run a tree by itself; see `tree`."""
        return self.run(self.tree(tree))

    @abstractmethod
    def commit(self, path: list[int]) -> None:
        """Keep these rows of the tree that was scored last, root first, as the next tokens of the context."""

    def watch(self, layers: tuple[int, ...]) -> None:
        """From now on every Output has features of these layers too.

        Layer k >= 0 is what decoder layer k puts out; -1 is the final hidden state behind the last norm.
        """
        if layers:
            raise ValueError(f"{type(self).__name__} has no hidden states to read, asked for layers {layers}")
