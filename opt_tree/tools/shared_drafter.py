"""One drafter for many loops along the same text: what several of them ask is drafted once.

Those that stand at the same place of the text are answered together, a layer at a time. A drafter that reads the
target's hidden states is given them by one forward for each place at which it is asked: those of the text's own tokens,
whatever the trees.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter, answer_of
from opt_tree.generation import Outcome
from opt_tree.methods.policies.costs import CATCHING_UP
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Asking, Forward, Output, Target, Work
from opt_tree.tools.stored_text import StoredText
from opt_tree.tree import Tree, on_host

T = TypeVar("T")
Node = tuple[int, int]
"""A drafted node: its parent's draft row, and its token."""


def drafting_for(
    drafter: Drafter,
    text: StoredText,
    walks: Mapping[str, Callable[[Drafter], Asking[T]]],
    target: Target | None = None,
    sampling: Temperature = Temperature(),
) -> Asking[dict[str, T]]:
    """Run walks along a text, each given a drafter to ask as if it were its own; return what comes of each.

    A walk asks at rising places of the text, at each the root first, then layer by layer. A target is watched already.
    `sampling`: how the text was decoded.
    """
    course = _Course(drafter, text, target if drafter.features or drafter.reads_logits else None)
    found = {name: _Walk(walk, drafter) for name, walk in walks.items()}
    yield from course.begin(sampling)
    while places := [walk.question.length for walk in found.values() if walk.question is not None]:
        yield from course.go_to(min(places))
        yield from course.draft([walk for walk in found.values() if walk.at(min(places))])
    return {name: walk.found for name, walk in found.items()}


@dataclass(frozen=True, eq=False)
class _Question(Forward):
    """What a walk asks the shared drafter; sent the answer in place of a forward's output."""

    length: int = 0
    """Tokens of the context."""
    frontier: Frontier | None = None
    """None: the root is asked about."""


class _Asker(Drafter):
    """Stands for the shared drafter in one walk."""

    def __init__(self, drafter: Drafter) -> None:
        self._shared, self._length, self._work = drafter, 0, Work()
        self.names_few, self.max_context, self.name = drafter.names_few, drafter.max_context, drafter.name
        self.ended = True  # whoever decodes is told

    def room(self, length: int) -> int:
        return self._shared.room(length)

    def root(self, context: list[int]) -> Forward:
        self._length = len(context)
        return self._asked(np.array(context[-1:]), None)

    def expand(self, frontier: Frontier) -> Forward:
        return self._asked(frontier.tokens, frontier)

    def _asked(self, tokens: Any, frontier: Frontier | None) -> Forward:
        nowhere = np.zeros((len(tokens), 0), dtype=bool)
        return _Question(self, tokens, np.zeros_like(tokens), nowhere, length=self._length, frontier=frontier)

    def read(self, output: Any) -> LogProbs:
        return output

    def accept(self, outcome: Outcome) -> None:
        """What survives is the text."""

    def pay(self, forwards: int, rows: int) -> None:
        """Count an answer's forwards, which may have been for another walk's nodes, and this walk's own rows."""
        self._work += Work(forwards, rows if forwards else 0)

    @property
    def work(self) -> Work:
        return self._work


class _Walk(Generic[T]):
    """A loop under way: what it asks next, or what came of it."""

    def __init__(self, walk: Callable[[Drafter], Asking[T]], drafter: Drafter) -> None:
        self.asker = _Asker(drafter)
        self.rows: list[int] = []
        """Of its own draft rows of the step: the shared ones."""
        self.question: _Question | None = None
        self.found: Any = None
        self._asking: Any = walk(self.asker)
        self._go_on(None)

    def at(self, place: int, inside: bool = False) -> bool:
        """Whether it asks here; `inside`: about nodes below the root."""
        asked = self.question
        return asked is not None and asked.length == place and (not inside or asked.frontier is not None)

    def nodes(self) -> list[Node]:
        """The nodes that it asks about, in the shared numbers."""
        assert self.question is not None and self.question.frontier is not None
        parents, tokens = self.question.frontier.parents.tolist(), self.question.frontier.tokens.tolist()
        return [(self.rows[parent], token) for parent, token in zip(parents, tokens, strict=True)]

    def answered(self, answer: LogProbs, rows: list[int], first: int, forwards: int) -> None:
        """Take in the answer to its nodes, which are these `rows` of it; the shared draft rows begin at `first`."""
        self.rows = [*self.rows, *(first + row for row in rows)] if first else [0]
        self.asker.pay(forwards, len(rows) if first else CATCHING_UP)
        self._go_on(_rows_of(answer, rows))

    def _go_on(self, answer: Any) -> None:
        try:
            forward = self._asking.send(answer)
            while not isinstance(forward, _Question):  # its target is the text
                forward = self._asking.send(forward.model.run(forward))
            self.question = forward
        except StopIteration as end:
            self.question, self.found = None, end.value


class _Course:
    """The way of the shared drafter along a text, and of the target where the drafter reads it."""

    def __init__(self, drafter: Drafter, text: StoredText, target: Target | None) -> None:
        if target is None and (drafter.features or drafter.reads_logits):
            raise ValueError(f"{drafter.describe()} reads what the target says of the text: the target is needed, too")
        self.drafter, self.target = drafter, target
        self._whole, self._context = [*text.prompt, *text.tokens], list(text.prompt)
        self._row: dict[Node, int] = {}
        """Draft rows of the nodes that were drafted at this place."""

    def begin(self, sampling: Temperature) -> Asking[None]:
        """Take in the prompt."""
        drafter, target, prompt, output = self.drafter, self.target, self._context, None
        drafter.bare.generation += 1
        if target is not None:
            if target.ranks is not None:
                target.ranks.check_led(target.name)
            target.reset()
            if len(prompt) > 1:
                output = yield target.text(prompt[:-1], all_logits=drafter.reads_logits)
        drafter.begin(prompt, 0, output, sampling)

    def go_to(self, place: int) -> Asking[None]:
        """Let the context grow to `place` tokens, as if a chain of the text's own had been accepted."""
        tokens = self._whole[len(self._context) : place]
        if not tokens:
            return
        rows = [0]
        for token in tokens[:-1]:
            rows.append(self._row.get((rows[-1], token), -1))
        drafted = [self._context[-1], *tokens[:-1]]
        path = list(range(len(drafted)))
        tree = Tree(np.array(drafted), np.array([-1, *path[:-1]]), np.zeros(len(path)), np.array(rows))
        output, features = Output(torch.zeros(len(path), 1)), dict[int, torch.Tensor]()
        if self.target is not None:
            output = yield self.target.tree(tree)
            self.drafter.scored(output)
            features = {layer: states.clone() for layer, states in output.features.items()}
            self.target.commit(path)
        self.drafter.accept(Outcome(tree, path, tokens, features, output.logits))
        self._context.extend(tokens)
        self._row = {}

    def draft(self, walks: Iterable[_Walk]) -> Asking[None]:
        """Answer all that these walks ask here: the root, then layer by layer what any of them expands."""
        above: list[list[int]] = [[]]  # of each draft row: the columns that it sees, its own the last one
        place, walks, drafter = len(self._context), list(walks), self.drafter
        before = drafter.work
        answer = yield from answer_of(drafter, drafter.root(self._context))
        for walk in walks:
            walk.answered(answer, [0], 0, (drafter.work - before).forwards)
        while walks := [walk for walk in walks if walk.at(place, inside=True)]:
            first, before, wanted = len(above), drafter.work, dict[Node, int]()
            rows = [[wanted.setdefault(node, len(wanted)) for node in walk.nodes()] for walk in walks]
            self._row |= {node: first + row for node, row in wanted.items()}
            answer = yield from answer_of(drafter, drafter.expand(_frontier(list(wanted), above)))
            forwards = (drafter.work - before).forwards
            for walk, own in zip(walks, rows, strict=True):
                walk.answered(answer, own, first, forwards)


def _frontier(nodes: Sequence[Node], above: list[list[int]]) -> Frontier:
    """Describe nodes to the drafter; note them as draft rows of their own."""
    parents, tokens = np.array(nodes).T
    first = len(above)
    visible = np.zeros((len(nodes), first - 1 + len(nodes)), dtype=bool)
    for index, parent in enumerate(parents.tolist()):
        above.append([*above[parent], first - 1 + index])
        visible[index, above[-1]] = True
    return Frontier(tokens, parents, np.array([len(seen) for seen in above[first:]]), visible)


def _rows_of(answer: LogProbs, rows: list[int]) -> LogProbs:
    """What would have been said of these nodes alone: as wide as the widest of them, on which ties may depend."""
    if rows == list(range(len(answer.values))):
        return answer
    values, tokens, whole = answer.values[rows], answer.tokens, answer.whole
    if tokens is not None and tokens.ndim == 2:
        tokens = tokens[rows]
        if on_host(values):
            width = max(1, int((values > -torch.inf).any(0).sum()))
            values, tokens = values[:, :width], tokens[:, :width]
    return LogProbs(values, tokens, None if whole is None else lambda: _rows_of(whole(), rows))
