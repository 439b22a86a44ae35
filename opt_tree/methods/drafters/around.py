"""Drafters that are made of others."""

from collections.abc import Callable
from typing import Any

from opt_tree.children import LogProbs
from opt_tree.drafter import Asked, Drafter
from opt_tree.generation import Outcome
from opt_tree.pool import Frontier
from opt_tree.sampling import Temperature
from opt_tree.target import Output, Work


class DrafterAround(Drafter):
    """A drafter that asks another one, `drafter`, and changes what goes in or comes out; as it stands, nothing.

    One that is made of several names them in `parts`: each begins every text.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.features, self.reads_logits, self.names_few = drafter.features, drafter.reads_logits, drafter.names_few
        self.max_context, self.models, self.name = drafter.max_context, drafter.models, drafter.name
        self.alone, self.learns = drafter.alone, drafter.learns
        self.parts: tuple[Drafter, ...] = (drafter,)
        self._then: Callable[[LogProbs], LogProbs] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {' and '.join(map(repr, self.parts))}>"

    def keeps(self, prompt: list[int]) -> int:
        return min(part.keeps(prompt) for part in self.parts)

    def begin(self, prompt: list[int], kept: int, prefill: Output | None, sampling: Temperature) -> None:
        for part in self.parts:
            part.begin(prompt, kept, prefill, sampling)

    def room(self, length: int) -> int:
        return self.drafter.room(length)

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def root(self, context: list[int]) -> Asked:
        return self.after(self.drafter.root(context))

    def expand(self, frontier: Frontier) -> Asked:
        return self.after(self.drafter.expand(frontier))

    def read(self, output: Output) -> Asked:
        return self.after(self.drafter.read(output), self._then)

    def after(self, asked: Asked, change: Callable[[LogProbs], LogProbs] | None = None) -> Asked:
        """Change the answer of the drafter inside, whole as it is: now, or when it has read its forward."""
        if isinstance(asked, LogProbs):
            return asked if change is None else change(asked.unpicked)
        self._then = change
        return asked

    def scored(self, output: Output) -> None:
        for part in self.parts:
            part.scored(output)

    def accept(self, outcome: Outcome) -> None:
        self.drafter.accept(outcome)

    @property
    def work(self) -> Work:
        return self.drafter.work

    @property
    def bare(self) -> Drafter:
        return self.drafter.bare

    def describe(self) -> str:
        return described(self.drafter)

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.drafter)


def settings_of(drafter: Drafter) -> dict[str, Any]:
    """What of a drafter decides the answers, its calibration among it."""
    own = drafter.settings
    return own if drafter.temperature == 1 else own | {"sharpening": drafter.temperature}


def described(drafter: Drafter) -> str:
    """What drafts, and how it is calibrated, for a reader of a table."""
    what = drafter.describe()
    return what if drafter.temperature == 1 else f"{what}, sharpened by temperature {drafter.temperature:.2f}"
