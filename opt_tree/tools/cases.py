"""One case of a proof: a pair of distributions below one root, every tree on it and every verdict.

Owns which cases a proof goes through and what is counted in each. Printing is `opt_tree.tools.display.prove`'s.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from opt_tree.children import Children
from opt_tree.policy import TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.sampling import Random, Temperature
from opt_tree.tools.enumeration import (
    EnumeratingRandom,
    Laws,
    TableDrafter,
    Text,
    continued,
    disjoint_laws,
    distance,
    drawn_trees,
    hashed_laws,
    log_rows,
    outcomes,
    paths_of,
)
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, Verifier

Rule = Callable[[Tree, Float[np.ndarray, "rows vocab"], Float[np.ndarray, "rows vocab"], Random], Any]
"""Somebody's verifier: from a tree, the target's and the drafter's probabilities behind each of its rows (zeros where
nothing was drafted) and the source of randomness to a `Verdict`, or to a pair of the accepted rows, root first, and the
target's own token. `random.choose(probabilities)` and `random.accept(probability)` are its only coins."""
_SAMPLING = Temperature(1.0)


def law_pairs(vocab: int, depth: int) -> dict[str, tuple[Laws, Laws]]:
    """The target's and the drafter's laws that a proof goes through: those that are easily read come first.

    Most rules treat a token by which of its two probabilities is greater: many pairs where trees are small, so that
    every order of them is met; deeper trees meet several in each pair.
    """
    several = range(10, 30 if depth == 1 else 12)
    extreme = {
        "equal": (hashed_laws(5, vocab), hashed_laws(5, vocab)),
        "certain target": (hashed_laws(6, vocab, 1), hashed_laws(7, vocab)),
        "certain drafter": (hashed_laws(6, vocab), hashed_laws(7, vocab, 1)),
    }
    return {
        **{f"tenths {n}": (hashed_laws(2 * n, vocab, 10), hashed_laws(2 * n + 1, vocab, 10)) for n in several},
        "zeros": (hashed_laws(3, vocab, 3), hashed_laws(4, vocab, 3)),
        "disjoint": (disjoint_laws(0, vocab), disjoint_laws(1, vocab)),
        **(extreme if depth == 1 else {}),
        **{f"random {n}": (hashed_laws(2 * n, vocab), hashed_laws(2 * n + 1, vocab)) for n in several},
    }


@dataclass(frozen=True)
class Layers(TreePolicy):
    """All candidates, layer after layer, as many as their budget admits."""

    children: Children
    max_depth: int

    def expand(self, pool: CandidatePool) -> Int[np.ndarray, " frontier"] | None:
        return pool.newest if pool.depth < self.max_depth else None

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return pool.best(self.children.budget or pool.size)


@dataclass(frozen=True, eq=False)
class Case:
    """One pair of distributions below one root, enumerated: every tree, every verdict."""

    laws: str
    """The name of the pair."""
    policy: TreePolicy
    vocab: int
    depth: int
    """Layers of draft at most."""
    target: Laws
    """From the tokens below the root to the target's probabilities of the next one."""
    drafter: Laws
    trees: list[tuple[Tree, float]]
    """Every tree that can be drawn, with its probability."""
    verdicts: int
    """How many outcomes of the verifier's randomness were counted, over all trees."""
    emitted: dict[Text, float]
    """The exact probability of every text of depth + 1 tokens: what a step emits, continued by the target itself."""
    expected: dict[Text, float]
    """The same of the target alone."""
    length: float
    """Tokens that a step emits, on average: exact, too."""

    @property
    def error(self) -> float:
        """The largest difference of `emitted` and `expected` in any text."""
        return distance(self.emitted, self.expected)

    @property
    def likeliest(self) -> tuple[Tree, float]:
        """The likeliest tree, and its probability."""
        return max(self.trees, key=lambda drawn: drawn[1])

    def first_difference(self) -> list[tuple[Text, float, float]]:
        """The beginnings of all texts, as short as half the error shows in them: emitted and target's probability."""
        for length in range(1, self.depth + 2):
            found: dict[Text, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for side, law in enumerate((self.emitted, self.expected)):
                for text, probability in law.items():
                    found[text[:length]][side] += probability
            if max(abs(mine - its) for mine, its in found.values()) >= self.error / 2:
                break
        return [(text, mine, its) for text, (mine, its) in sorted(found.items())]


def sizes(
    children: Children | TreePolicy, vocab: int, depth: int, smallest: int
) -> Iterator[tuple[TreePolicy, int, int]]:
    """Policies, vocabularies and depths, small trees first."""
    for layers in range(1, depth + 1):
        for part in [children] if isinstance(children, TreePolicy) else _fewer(children):
            policy = part if isinstance(part, TreePolicy) else Layers(part, layers)
            yield from ((policy, tokens, layers) for tokens in range(smallest, vocab + 1))


def _fewer(children: Children) -> list[Children]:
    """The same kind with one child a node, two, ..., as many as there are."""
    kind: Any = children
    for name in ("per_node", "total"):
        if isinstance(count := vars(children).get(name), int):
            return [dataclasses.replace(kind, **{name: fewer}) for fewer in range(1, count + 1)]
    return [children]


def enumerated(verifier: Verifier | Rule, case: Case) -> Case:
    """The case with what came out of it."""
    root = case.vocab  # no token: laws are those of what stands below it
    drafter = TableDrafter(lambda path: case.drafter(path[1:]))
    trees = drawn_trees(drafter, case.policy, (root,), _SAMPLING, case.depth)
    law, verdicts, length = defaultdict[Text, float](float), 0, 0.0
    with np.errstate(divide="ignore", invalid="ignore"):  # a rule may be wrong; what it makes of NaN is refused
        for tree, probability in trees:
            for random, (path, token) in outcomes(_judge(verifier, tree, case)):
                law[(*tree.tokens[list(path[1:])].tolist(), token)] += probability * random.probability
                length += probability * random.probability * len(path)
                verdicts += 1
    emitted = continued(law, case.target, case.depth + 1)
    expected = continued({(): 1.0}, case.target, case.depth + 1)
    return dataclasses.replace(case, trees=trees, verdicts=verdicts, emitted=emitted, expected=expected, length=length)


def _judge(verifier: Verifier | Rule, tree: Tree, case: Case) -> Callable[[EnumeratingRandom], tuple[Text, int]]:
    """The verifier on one tree, as a function of the random choices alone."""
    paths = [path[1:] for path in paths_of(tree, (case.vocab,))]
    logits, drafts = log_rows(case.target, paths), np.zeros((len(tree), case.vocab))
    rows = np.flatnonzero(tree.draft_rows >= 0)
    drafts[rows] = [case.drafter(paths[row]) for row in rows]
    if isinstance(verifier, Verifier):
        if tree.draft_log_probs is None:  # of deterministic children, which a verifier may take for drawn ones
            known = np.zeros((tree.draft_rows.max() + 1, case.vocab))
            known[tree.draft_rows[rows]] = drafts[rows]
            tree = dataclasses.replace(tree, draft_log_probs=torch.from_numpy(known).log())
        scores = _SAMPLING.processed(logits, tree, [case.vocab])
        call: Callable[[Random], Any] = lambda random: verifier(tree, scores, random)  # noqa: E731
    else:
        targets = np.stack([case.target(path) for path in paths])  # not by their logarithms: equal ones stay equal
        call = lambda random: verifier(tree, targets.copy(), drafts.copy(), random)  # noqa: E731

    def judge(random: EnumeratingRandom) -> tuple[Text, int]:
        found = call(random)
        path, token = (found.path, found.token) if isinstance(found, Verdict) else found
        path, token = tuple(int(row) for row in path), int(token)
        if not path or not 0 <= path[-1] < len(tree) or path != tuple(tree.path_to(path[-1]).tolist()):
            raise ValueError(f"the verdict's path {list(path)} is none of the tree {tree.parents.tolist()}")
        if not 0 <= token < case.vocab:
            raise ValueError(f"the verdict's token {token} is none of {case.vocab}")
        return path, token

    first, again = EnumeratingRandom([]), EnumeratingRandom([])
    if judge(first) != judge(again) or first.trace != again.trace:
        raise ValueError("the same random choices gave two verdicts: all randomness must come from the given Random")
    return judge
