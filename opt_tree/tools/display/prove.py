"""Prove by exact enumeration that a verifier keeps the target's distribution, or show where it does not.

Owns what a proof looks like. What is enumerated in it is `opt_tree.tools.cases`'s.
"""

import sys
from pathlib import Path

from opt_tree.methods.registry import listed
from opt_tree.system.command_line import Parser, run_command, work_of

CHILDREN = ("top_k", "iid", "without_replacement", "best_and_draw")


def main(arguments: list[str] | None = None) -> int:
    """Print a proof; return 0 for one, 1 for a counterexample, 2 after one line on stderr for what cannot be done."""

    def command() -> int:
        verifiers = Path(__file__).parents[2] / "methods" / "verifiers"
        parser = Parser("opt-tree prove", __doc__)
        parser.add_argument("verifier", help=lambda: f"one of {', '.join(listed(verifiers))}")
        parser.add_argument("--children", default="iid:2", metavar="KIND:COUNT", help=f"{', '.join(CHILDREN)}")
        parser.add_argument("--vocab", type=int, default=3, help="tokens at most")
        parser.add_argument("--depth", type=int, default=2, help="layers of draft at most")
        return work_of("opt_tree.tools.display.prove:print_proof")(parser.parse_args(arguments))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from opt_tree.children import Children, TopK
from opt_tree.errors import require
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.tools.cases import Case, Layers, Rule, enumerated, law_pairs, sizes
from opt_tree.tools.display.trees import draw_tree
from opt_tree.tools.enumeration import Laws
from opt_tree.verify import Verifier

_MADE_BY: tuple[Callable[[int], Children], ...] = (TopK, IID, WithoutReplacement, BestAndDraw)
KINDS = dict(zip(CHILDREN, _MADE_BY, strict=True))
ROUNDING = 1e-12
"""The largest difference of two probabilities that counts as rounding."""


@dataclass(frozen=True, eq=False)
class Proof:
    """What `prove` found; true if the verifier is exact. `print` shows it, with the tree of a counterexample."""

    verifier: str
    policy: Children | TreePolicy
    vocab: int
    depth: int
    cases: list[Case]
    """In the order in which they were enumerated, small ones first; the last one is the counterexample, if any."""

    def __bool__(self) -> bool:
        return self.counterexample is None

    @property
    def counterexample(self) -> Case | None:
        """The smallest case whose distribution is not the target's; None: there is none."""
        return None if self.cases[-1].error <= ROUNDING else self.cases[-1]

    @cached_property
    def error(self) -> float:
        """The largest error of any case."""
        return max(case.error for case in self.cases)

    def __str__(self) -> str:
        name = f"{self.verifier} on {_said(self.policy)}"
        if self.counterexample is not None:
            return f"{name}: not exact, off by {self.error:.2g}\n{_drawn(self.counterexample)}"
        trees, verdicts = sum(len(case.trees) for case in self.cases), sum(case.verdicts for case in self.cases)
        return (
            f"{name}: exact to {self.error:.0e}\n{len(self.cases)} pairs of distributions over up to {self.vocab} "
            f"tokens, up to {self.depth} deep: {trees:,} trees, {verdicts:,} verdicts"
        )


def prove(
    verifier: Verifier | Rule,
    children: Children | TreePolicy,
    vocab: int = 3,
    depth: int = 2,
    laws: Mapping[str, tuple[Laws, Laws]] | None = None,
) -> Proof:
    """Prove by exact enumeration that a verifier keeps the target's distribution, or find where it does not.

    Every tree that can be drawn and every outcome of the verifier on it is visited, with its probability. Their sum is
    the distribution of the text that a step emits, and must be the target's. Nothing is sampled. docs/prove.md says
    what this proves.

    Arguments:
        verifier: one of the library's, or any function of a tree, target probabilities, draft probabilities and a
            `Random` (see `Rule`), to which all of its randomness must belong.
        children: how siblings are picked (`TopK(2)`, `IID(3)`), at every node; or a tree policy, whose own choice of
            nodes is then a part of what is proved.
        vocab: tokens of the vocabulary, at least 2. Smaller ones are tried first, and so are fewer children.
        depth: layers of draft at most, at least 1. Shallower trees are tried first.
        laws: the target's and the drafter's probabilities behind a path below the root, by name, for `vocab` tokens;
            by default many pairs for every size.

    Whether the library's `Decoder` would admit the pair is not asked: `prove` says whether it should.
    Raises TypeError and ValueError for bad arguments, ValueError for a verdict that is no path of the tree and for a
    verifier with other randomness than what it is given.
    """
    require(int, vocab=vocab, depth=depth)
    if vocab < 2 or depth < 1:
        raise ValueError(f"a proof takes at least 2 tokens and 1 layer, got vocab={vocab}, depth={depth}")
    if not callable(verifier):
        raise TypeError(f"{verifier!r} is no verifier: a function of tree, target, draft and random is one")
    if isinstance(children, type) or not isinstance(children, (Children, TreePolicy)):
        raise TypeError(f"{children!r} are no children, such as IID(2) or TopK(2), and no tree policy")
    if isinstance(children, TreePolicy):
        check_grows(children)
    name = getattr(verifier, "__name__", type(verifier).__name__)
    cases: list[Case] = []
    for policy, tokens, layers in sizes(children, vocab, depth, smallest=vocab if laws else 2):
        for pair, (target, drafter) in (laws or law_pairs(tokens, layers)).items():
            cases.append(enumerated(verifier, Case(pair, policy, tokens, layers, target, drafter, [], 0, {}, {}, 0.0)))
            if not cases[-1].error <= ROUNDING:
                return Proof(name, children, vocab, depth, cases)
    return Proof(name, children, vocab, depth, cases)


def _drawn(case: Case) -> str:
    """A case as text: both distributions at the root, the likeliest tree, and where what is emitted differs."""
    letters = _Letters(case.vocab)
    tree, chance = case.likeliest
    which = "the only tree" if len(case.trees) == 1 else f"the likeliest of {len(case.trees)} trees ({chance:.3g})"
    head = [
        f"smallest counterexample: {_said(case.policy)}, {case.vocab} tokens, {case.depth} deep, laws {case.laws!r}",
        *(f"{side:<8} {_row(law(()))}" for side, law in (("target", case.target), ("drafter", case.drafter))),
        f"{which}:",
    ]
    rows = [f"  {letters.decode(text):<8} {mine:8.4f} {its:8.4f}" for text, mine, its in case.first_difference()]
    drawn = [f"  {line}" for line in draw_tree(tree, letters).splitlines()]
    return "\n".join([*head, *drawn, f"  {'text':<8}  emitted   target", *rows])


def _row(probs: np.ndarray) -> str:
    return "  ".join(f"{_Letters.NAMES[token]} {p:.3g}" for token, p in enumerate(probs.tolist()))


def _said(policy: Children | TreePolicy) -> str:
    if isinstance(policy, Layers):
        return _said(policy.children)
    return repr(policy).replace(", total=None", "").replace("per_node=None, ", "")


class _Letters:
    """Shows tokens as letters, and the root as such."""

    NAMES = "abcdefghijklmnopqrstuvwxyz"

    def __init__(self, vocab: int) -> None:
        self._root = vocab

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        return "".join("root" if token == self._root else self.NAMES[token] for token in token_ids)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return self.decode([ids])


def print_proof(given: argparse.Namespace) -> int:
    """Prove what was asked for; return 0 for a proof and 1 for a counterexample."""
    kind, _, count = given.children.partition(":")
    if kind not in KINDS or not (count or "2").isdecimal():
        raise ValueError(f"--children {given.children}: KIND:COUNT, with one of {', '.join(KINDS)}")
    try:
        proof = prove(VERIFIERS.named(given.verifier).make, KINDS[kind](int(count or 2)), given.vocab, given.depth)
    except TypeError as error:
        raise ValueError(str(error)) from error
    print(proof)
    return 0 if proof else 1
