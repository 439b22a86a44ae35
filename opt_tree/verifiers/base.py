"""What a verifier is: a function that judges a scored tree, tagged with the kinds of children it is exact for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.sampling import Children, Random
from opt_tree.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """The accepted path, root first, as rows of the tree; and the target's own token behind it."""

    path: list[int]
    token: int


@runtime_checkable
class Verifier(Protocol):
    """Judge a tree; the emitted law must be the target's. `scores` are processed logits, one row a tree row."""

    valid_for: tuple[type[Children], ...]
    __name__: str

    def __call__(self, tree: Tree, scores: Float[Tensor, "rows vocab"], random: Random) -> Verdict: ...


def valid_for(*kinds: type) -> Callable[[Callable], Verifier]:
    """Tag a verifier with the kinds of children whose law it reproduces exactly."""

    def tag(verifier: Callable) -> Verifier:
        verifier.valid_for = kinds  # type: ignore[attr-defined]
        return verifier  # type: ignore[return-value]

    return tag


def follow(tree: Tree, choice: Int[np.ndarray, " rows"]) -> Verdict:
    """Walk from the root as long as the target's choice at a row is one of its children."""
    matched = tree.tokens == choice[tree.parents]
    matched[0] = True
    alive = ~(tree.ancestors & ~matched).any(1)
    deepest = int(np.argmax(np.where(alive, tree.depths, -1)))
    return Verdict(tree.path_to(deepest).tolist(), int(choice[deepest]))
