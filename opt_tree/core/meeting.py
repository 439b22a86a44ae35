"""What sequences that are decoded side by side decide together, and how one of them asks the others."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import greenlet


class Table(ABC):
    """What lanes meet at: those at equal ones decide together. Hashable."""

    @abstractmethod
    def decide(self, brought: Sequence[Any]) -> Sequence[Any]:
        """From what each lane brings, in their order, to what each is answered."""


class Meeting(NamedTuple):
    """A lane that waits for the others' decision."""

    table: Table
    brings: Any
    last: bool


class LaneThread(greenlet.greenlet):
    """One sequence under way."""


def alone() -> bool:
    """Whether there are no lanes beside this one."""
    return not isinstance(greenlet.getcurrent(), LaneThread)


def meet(table: Table, brings: Any, last: bool) -> Any:
    """Decide together with the lanes that come to an equal table; alone where there are none beside this one.

    It is decided when all lanes that draft have come. `last`: this lane only comes once more for what it brings, so it
    waits until all others come for the last time, too; what it brings is heard before that.
    """
    if alone():
        return table.decide([brings])[0]
    return greenlet.getcurrent().parent.switch(Meeting(table, brings, last))
