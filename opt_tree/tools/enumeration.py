"""Exact enumeration: every tree that a policy can draw, every verdict on it, and the distribution of what is emitted.

`EnumeratingRandom` stands in for `Random` and is replayed over every outcome of every draw; nothing is sampled. The
probabilities come from *laws*, functions of the token path, so that nothing here needs a model.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.children import LogProbs
from opt_tree.decode import grow
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.methods.children.draws import Among, Draws
from opt_tree.policy import TreePolicy
from opt_tree.pool import Frontier
from opt_tree.sampling import Random, Temperature
from opt_tree.target import run_alone
from opt_tree.tree import Tree

T = TypeVar("T")
Text = tuple[int, ...]
Laws = Callable[[Text], np.ndarray]
"""From a path of tokens to the probabilities of the token behind it."""


class EnumeratingRandom(Random, Draws):
    """Makes the scripted choices, then the first possible ones; `trace` says what was chosen out of how many.

    It draws children as well: every draw is choices of the same script.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.beside = {Draws: self}
        self.trace: list[tuple[int, int]] = []
        self.probability = 1.0

    def choose(self, probs: Sequence[float] | np.ndarray) -> int:
        """Choose an outcome of positive probability; everything random goes through here."""
        possible = [outcome for outcome, p in enumerate(probs) if p > 0]
        if not possible or not all(p > -1e-9 for p in probs):
            raise ValueError(f"nothing can be chosen by the probabilities {[float(p) for p in probs]}")
        total = sum(probs[outcome] for outcome in possible)
        turn = len(self.trace)
        choice = self._script[turn] if turn < len(self._script) else 0
        self.trace.append((choice, len(possible)))
        self.probability *= float(probs[possible[choice]]) / float(total)
        return possible[choice]

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        return self.choose([1 - probability, probability]) == 1

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        return torch.tensor([self.choose(row) for row in probs.tolist()])

    def iid(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        return torch.tensor([[self.choose(row) for _ in range(k)] for row in probs.tolist()]).long().view(-1, k)

    def distinct(self, probs: Float[Tensor, "rows vocab"], k: int, among: Among | None = None) -> Int[Tensor, "rows k"]:
        return torch.tensor([self._without_replacement(row, k) for row in probs.tolist()])

    def _without_replacement(self, left: list[float], k: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(k):
            if not any(left):  # the impossible tokens come last
                return tokens + [token for token in range(len(left)) if token not in tokens][: k - len(tokens)]
            tokens.append(self.choose(left))
            left[tokens[-1]] = 0.0
        return tokens

    def advance(self, tokens: int) -> None:
        """Nothing is kept from step to step."""


def outcomes(run: Callable[[EnumeratingRandom], T]) -> Iterator[tuple[EnumeratingRandom, T]]:
    """Every outcome of `run`, once, with the random choices that led to it: depth first over all of them.

    Raises ValueError where `run` draws from elsewhere: the same choices then do not lead to the same questions.
    """
    script: list[int] | None = []
    before: list[tuple[int, int]] = []
    while script is not None:
        random = EnumeratingRandom(script)
        result = run(random)
        if random.trace[: len(before)] != before:
            raise ValueError("the same random choices led elsewhere: all randomness must come from the given Random")
        yield random, result
        trace = random.trace
        while trace and trace[-1][0] + 1 == trace[-1][1]:
            trace.pop()
        before = trace[:-1]
        script = [choice for choice, _ in before] + [trace[-1][0] + 1] if trace else None


def hashed_laws(seed: int, vocab: int, cells: int | None = None) -> Laws:
    """Pseudo-random laws, fixed by (seed, path). With `cells`, multiples of 1 / cells: zeros and exact ties abound."""

    @functools.cache
    def law(path: Text) -> np.ndarray:
        # The length keeps (0,) and (0, 0) apart: numpy's seeds ignore trailing zeros.
        rng = np.random.default_rng((seed, len(path), *path))
        if cells is None:
            return rng.dirichlet(np.full(vocab, 0.7))
        return np.bincount(rng.integers(vocab, size=cells), minlength=vocab) / cells

    return law


def disjoint_laws(side: int, vocab: int) -> Laws:
    """Side 0 never gives a token that side 1 gives after the same path."""
    base = hashed_laws(9, vocab - 1)

    def law(path: Text) -> np.ndarray:
        lonely = sum(path) % vocab
        other = np.insert(base(path), lonely, 0.0)
        return np.eye(vocab)[lonely] if (len(path) + side) % 2 else other

    return law


def log_rows(laws: Laws, paths: list[Text]) -> Float[Tensor, "rows vocab"]:
    """The logarithms of the laws behind each path, in float64; a probability of 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.stack([laws(path) for path in paths])))


class TableDrafter(Drafter):
    """Drafts from laws."""

    def __init__(self, laws: Laws) -> None:
        self.laws = laws
        self._paths: list[Text] = []

    def root(self, context: list[int]) -> LogProbs:
        self._paths = [tuple(context)]
        return LogProbs.of(log_rows(self.laws, self._paths))

    def expand(self, frontier: Frontier) -> LogProbs:
        # By draft rows alone, as a drafter with a cache does it: a wrong parent gives the law of a wrong path.
        paths = [
            (*self._paths[parent], token)
            for parent, token in zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        ]
        self._paths += paths
        return LogProbs.of(log_rows(self.laws, paths))

    def accept(self, outcome: Outcome) -> None:
        self._paths = []


def paths_of(tree: Tree, context: Text) -> list[Text]:
    """The context and the path below it of every row."""
    return [(*context, *tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(len(tree))]


def drawn_trees(
    drafter: Drafter, policy: TreePolicy, context: Text, sampling: Temperature, layers: int | None = None
) -> list[tuple[Tree, float]]:
    """Every tree that the policy can draw below the context, `layers` deep at most, with its probability."""
    found: dict[Text, tuple[Tree, float]] = {}
    limit = policy.max_depth if layers is None else min(layers, policy.max_depth)
    for random, tree in outcomes(lambda random: run_alone(grow(drafter, policy, [*context], limit, sampling, random))):
        key = (*tree.tokens.tolist(), *tree.parents.tolist())
        first, probability = found.get(key, (tree, 0.0))
        found[key] = first, probability + random.probability
    return list(found.values())


def continued(law: dict[Text, float], target: Laws, length: int) -> dict[Text, float]:
    """The distribution of the first `length` tokens, if the target itself goes on where a text of `law` ends."""
    law = defaultdict(float, law)
    for tokens in range(length):
        for text in [text for text in law if len(text) == tokens]:
            share = law.pop(text)
            for token, probability in enumerate(target(text).tolist()):
                if probability > 0:
                    law[*text, token] += share * probability
    return {text: probability for text, probability in law.items() if len(text) == length}


def distance(law: dict[Text, float], other: dict[Text, float]) -> float:
    """The largest difference of two distributions in any outcome."""
    return max(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in law.keys() | other.keys())
