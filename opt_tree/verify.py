"""Who judges a scored tree: `greedy` at temperature 0, `match` at any. Both follow the target's own choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from opt_tree.children import Children
from opt_tree.sampling import LazyLogits, Logits, Random
from opt_tree.tree import Tree, fetch, on_host


@dataclass(frozen=True)
class Verdict:
    """The accepted path, root first, as rows of the tree; and the target's own token behind it."""

    path: list[int]
    token: int


@runtime_checkable
class Verifier(Protocol):
    """Judge a tree so that what is emitted is distributed as the target's own. `logits` are processed ones."""

    valid_for: tuple[type[Children], ...]
    """Empty: it is exact for any tree that does not depend on its draws."""
    refuses: Callable[[Children], str | None]
    """Why it does not judge children of these kinds ("judges ..."); None: it does."""
    lossy: bool
    """It reproduces nobody's distribution; the kinds are those that it accepts."""
    greedy_only: bool
    """It emits the argmax, which is the target's distribution at temperature 0 alone."""
    __name__: str

    def __call__(self, tree: Tree, logits: Logits, random: Random) -> Verdict: ...


def valid_for(
    *kinds: type,
    refuses: Callable[[Children], str | None] = lambda children: None,
    lossy: bool = False,
    greedy_only: bool = False,
) -> Callable[[Callable], Verifier]:
    """Tag a verifier with the kinds of children it is exact for; none: any tree. See `Verifier` for the rest."""

    def tag(verifier: Callable) -> Verifier:
        verifier.__dict__.update(valid_for=kinds, refuses=refuses, lossy=lossy, greedy_only=greedy_only)
        return verifier  # type: ignore[return-value]

    return tag


def check(verifier: Verifier, children: Children, lossy: bool = False) -> None:
    """Raise TypeError for children that the verifier does not judge, and for a lossy one without `lossy`."""
    name, kind = f"verifier {verifier.__name__}", type(children).__name__
    if verifier.valid_for and not isinstance(children, verifier.valid_for):
        kinds = ", ".join(known.__name__ for known in verifier.valid_for)
        raise TypeError(f"{name} is not exact for children of type {kind}; it is for {kinds}")
    if why := verifier.refuses(children):
        raise TypeError(f"{name} {why}; got {children}")
    if verifier.lossy and not lossy:
        raise TypeError(f"{name} does not keep the target's distribution; say lossy=True to use it all the same")


def check_temperature(verifier: Verifier, temperature: float) -> None:
    """Raise ValueError where the verifier emits the argmax and the temperature asks for a draw."""
    if verifier.greedy_only and temperature > 0:
        raise ValueError(
            f"verifier {verifier.__name__} judges at temperature 0 only, got temperature {temperature:g}; "
            "match draws from the target on the same trees"
        )


def follow(tree: Tree, choice: Callable[[int], int]) -> Verdict:
    """Walk from the root as long as the target's choice at a row is one of its children.

    `choice` is asked about the rows of the path only. Of equal rows the first one's choice counts for all of them.
    """
    place = {0: 0}  # how far down the path a row stands, equal ones alike
    path, wanted = [0], [choice(0)]
    for row, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent in place and token == wanted[place[parent]]:
            place[row] = place[parent] + 1
            if place[row] == len(path):
                path.append(row)
                wanted.append(choice(row))
    return Verdict(tree.path_to(path[-1]).tolist(), wanted[-1])


@valid_for(greedy_only=True)
def greedy(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Follow the target's argmax from the root as far as the tree reaches (arXiv:2406.17276, Alg. 2). One read-back."""
    if isinstance(logits, LazyLogits) or on_host(logits):  # only the path's rows are looked at, by numpy
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        return follow(tree, lambda row: int(logits[row].to(wide).numpy().argmax()))
    (choice,) = fetch(logits.argmax(-1))
    return follow(tree, choice.tolist().__getitem__)


@valid_for()
def match(tree: Tree, logits: Logits, random: Random) -> Verdict:
    """Draw the target's next token at every node and follow the draws. One read-back.

    Exact for every tree that does not depend on the draws: the emitted token is the target's own draw. The rule is
    SpecInfer's (arXiv:2305.09781; NSS in arXiv:2602.16994) and OPT-Tree's sampling mode (arXiv:2406.17276). A child is
    accepted with the target's mass on the distinct children: p = (.2, .5, .3) and children a, c give .5.
    """
    if isinstance(logits, LazyLogits):
        return follow(tree, lambda row: int(random.draw(logits[row].softmax(-1)[None], tree.depths[row : row + 1])))
    (choice,) = fetch(random.draw(logits.softmax(-1), tree.depths))
    return follow(tree, choice.tolist().__getitem__)
