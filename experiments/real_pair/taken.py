"""One step of a policy along a stored text, as it is kept on disk."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from opt_tree import Generation, TreePolicy
from opt_tree.methods.policies.costs import CATCHING_UP
from opt_tree.tools.stored_text import StoredText


class Way(NamedTuple):
    """A policy, and the temperature by which the drafter's scores are divided (1: bare)."""

    policy: TreePolicy
    temperature: float = 1.0


@dataclass(frozen=True)
class Taken:
    """One step of a policy."""

    place: int
    """New tokens before it."""
    emitted: int
    accepted: int
    known: bool
    """Whether the accepted path ended within the stored text; if not, more of the tree may have been right."""
    expected: float
    """E(A) of the tree."""
    nodes: int
    layers: int
    forwards: int
    drafted: int
    """Rows in those forwards, the context's last token among them, without what the drafter had to catch up with."""

    def row(self) -> list[Any]:
        """Its numbers, for a file."""
        return [round(value, 5) if isinstance(value, float) else int(value) for value in asdict(self).values()]


def taken_of(text: StoredText, made: Generation) -> list[Taken]:
    """The steps of a policy along a text."""
    found, place = list[Taken](), 0
    for step, emitted in zip(made.steps, made.accept_lengths, strict=True):
        tree, left = step.tree, len(text.tokens) - place
        found.append(
            Taken(
                place,
                emitted,
                step.accepted,
                step.accepted < left or step.path[-1] not in tree.parents,
                tree.expected_accepted,
                tree.nodes,
                int(tree.depths.max()),
                step.draft_forwards,
                step.draft_tokens - (CATCHING_UP - 1) * bool(step.draft_forwards),
            )
        )
        place += emitted
    return found
