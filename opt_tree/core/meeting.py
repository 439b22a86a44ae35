"""How sequences that are decoded side by side decide together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import greenlet


class Meeting(NamedTuple):
    """A lane that waits for the others, to be answered what is decided from what all of them bring."""

    decide: Callable[[Sequence[Any]], Any]
    """All lanes that meet at a time come with the same one."""
    brings: Any


def meet(decide: Callable[[Sequence[Any]], Any], brings: Any) -> Any:
    """What is decided when all lanes that are about to draft have come, from what each of them brings."""
    return greenlet.getcurrent().parent.switch(Meeting(decide, brings))
