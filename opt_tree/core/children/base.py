"""What it is to pick siblings, from what the drafter said.

Knows nothing of policies and of verification.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Children(Protocol):
    """How siblings are picked from what the drafter says. A type, because a verifier is valid for some kinds only."""

    def pool(self, root: int, sampling: Any, random: Any) -> Any:
        """Return the `CandidatePool` of a step whose children are picked so.

        `root`: the token. `sampling`, `random`: what children are drawn with, where they are drawn.
        """
        ...

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; verifiers are then shown the distributions they were drawn from."""
        ...

    @property
    def budget(self) -> int | None:
        """How many candidates of the whole pool can matter; None: all of them."""
        ...
