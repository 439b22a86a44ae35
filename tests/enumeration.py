"""Exact enumeration: every tree a policy can draw, every verdict on it, and the law of what is emitted.

`EnumeratingRandom` stands in for `Random` and is replayed over every outcome of every draw; nothing is Monte Carlo.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import jaxtyping
import numpy as np
import pytest
import torch
from conftest import Laws, TableDrafter, hashed_laws, log_rows, written_laws
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree import Decoder, Random, Sampling, Tree, TreePolicy, Verifier
from opt_tree.core.random import Among
from opt_tree.decoding.draft import draft

T = TypeVar("T", bound=Hashable)
Text = tuple[int, ...]
VOCAB = 3


def disjoint_laws(side: int) -> Laws:
    """Side 0 never gives a token that side 1 gives after the same path."""
    base = hashed_laws(9, 2)

    def law(path: tuple[int, ...]) -> np.ndarray:
        lonely = sum(path) % VOCAB
        other = np.insert(base(path), lonely, 0.0)
        return np.eye(VOCAB)[lonely] if (len(path) + side) % 2 else other

    return law


# Target and drafter; the last is what docs/sampling.md works out by hand, with p > q on two tokens.
LAWS: dict[str, tuple[Laws, Laws]] = {
    "random": (hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)),
    "zeros": (hashed_laws(3, VOCAB, 3), hashed_laws(4, VOCAB, 3)),
    "equal": (hashed_laws(5, VOCAB), hashed_laws(5, VOCAB)),
    "disjoint": (disjoint_laws(0), disjoint_laws(1)),
    "certain drafter": (hashed_laws(6, VOCAB), hashed_laws(7, VOCAB, 1)),
    "by hand": (written_laws({(): (0.2, 0.5, 0.3)}), written_laws({(): (0.6, 0.3, 0.1)})),
}


class EnumeratingRandom(Random):
    """Makes the scripted choices, then the first possible ones; `trace` says what was chosen out of how many."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.trace: list[tuple[int, int]] = []
        self.probability = 1.0

    def choose(self, probs: Sequence[float] | np.ndarray) -> int:
        """Choose an outcome of positive probability; everything random goes through here."""
        total = sum(probs)
        possible = [outcome for outcome, p in enumerate(probs) if p > 0]
        turn = len(self.trace)
        choice = self._script[turn] if turn < len(self._script) else 0
        self.trace.append((choice, len(possible)))
        self.probability *= float(probs[possible[choice]]) / float(total)
        return possible[choice]

    def accept(self, probability: float) -> bool:
        return self.choose([1 - probability, probability]) == 1

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        return torch.tensor([self.choose(row) for row in probs.tolist()])

    def iid(self, probs: Float[Tensor, "rows vocab"], k: int) -> Int[Tensor, "rows k"]:
        return torch.tensor([[self.choose(row) for _ in range(k)] for row in probs.tolist()])

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


class InvertingRandom(Random):
    """Draws by inverting the cumulative distribution at given numbers, one a position.

    All nodes of a depth share theirs and it is kept for the next step, as with the race of `Random`; but the outcomes
    of all numbers on a grid can be counted.
    """

    def __init__(self, numbers: Sequence[float]) -> None:
        super().__init__()
        self._numbers = numbers

    def draw(self, probs: Float[Tensor, "rows vocab"], depths: Int[np.ndarray, " rows"]) -> Int[Tensor, " rows"]:
        numbers = torch.tensor([[self._numbers[self._position + depth]] for depth in depths.tolist()])
        return torch.searchsorted(probs.double().cumsum(-1), numbers.double(), right=True)[:, 0]


def law_of(run: Callable[[EnumeratingRandom], T]) -> dict[T, float]:
    """The exact law of `run`'s result: depth first over all its random choices."""
    law: dict[T, float] = defaultdict(float)
    for random, result in outcomes(run):
        law[result] += random.probability
    return dict(law)


def outcomes(run: Callable[[EnumeratingRandom], T]) -> Iterator[tuple[EnumeratingRandom, T]]:
    """Every outcome of `run`, once, with the random choices that led to it."""
    script: list[int] | None = []
    while script is not None:
        random = EnumeratingRandom(script)
        yield random, run(random)
        trace = random.trace
        while trace and trace[-1][0] + 1 == trace[-1][1]:
            trace.pop()
        script = [choice for choice, _ in trace[:-1]] + [trace[-1][0] + 1] if trace else None


def emitted_law(decoder: Decoder, sampling: Sampling, prompt: Text, length: int) -> dict[Text, float]:
    """The exact law of the next `length` tokens: one step of the real loop, then the same from where it ended."""
    if not length:
        return {(): 1.0}
    law: dict[Text, float] = defaultdict(float)
    step = law_of(lambda random: tuple(next(decoder.steps(list(prompt), length, sampling, random)).tokens))
    for tokens, probability in step.items():
        for rest, p in emitted_law(decoder, sampling, prompt + tokens, length - len(tokens)).items():
            law[tokens + rest] += probability * p
    return dict(law)


def target_law(laws: Laws, prompt: Text, length: int) -> dict[Text, float]:
    """The same by plain multiplication along every continuation; impossible ones are left out."""
    if not length:
        return {(): 1.0}
    return {
        (token, *rest): p * q
        for token, p in enumerate(laws(prompt).tolist())
        if p > 0
        for rest, q in target_law(laws, (*prompt, token), length - 1).items()
    }


def assert_same(law: dict[T, float], expected: dict[T, float]) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law.keys() <= expected.keys(), "emitted what the target never does"
    for outcome, probability in expected.items():
        assert law.get(outcome, 0.0) == pytest.approx(probability, abs=1e-12), outcome


def assert_lossless(decoder: Decoder, laws: Laws, prompt: Text = (0, 1, 0), length: int = 2) -> None:
    """The next tokens have the target's law, at temperature 1."""
    assert_same(emitted_law(decoder, Sampling(1.0), prompt, length), target_law(laws, prompt, length))


def first_token(make: Callable[[EnumeratingRandom], Decoder], prompt: Text, left: int = 4) -> dict[Text, float]:
    """The exact law of the first token of a step that may emit `left`, of decoders that may know what will be drawn."""

    def first(random: EnumeratingRandom) -> Text:
        return tuple(next(make(random).steps(list(prompt), left, Sampling(1.0), random)).tokens[:1])

    with unchecked():
        return law_of(first)


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the shape checks of every call, which take most of the time of a small one."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def drawn_trees(policy: TreePolicy, laws: Laws, context: Text, sampling: Sampling) -> list[tuple[Tree, float]]:
    """Every tree that the policy can draw below the context, with its probability."""
    trees: dict[Hashable, Tree] = {}
    probability: dict[Hashable, float] = defaultdict(float)

    def grow(random: EnumeratingRandom) -> Hashable:
        tree = draft(TableDrafter(laws), policy, list(context), policy.max_depth, sampling, random)
        key = (*tree.tokens.tolist(), *tree.parents.tolist())
        trees.setdefault(key, tree)
        return key

    with unchecked():
        for random, key in outcomes(grow):
            probability[key] += random.probability
    return [(trees[key], probability[key]) for key in trees]


def warped(laws: Laws, sampling: Sampling) -> Laws:
    """What temperature, top-k and top-p make of laws, from their definitions."""

    def law(path: Text) -> np.ndarray:
        probs = laws(path) ** (1 / sampling.temperature)
        order = np.argsort(-probs)
        probs[order[sampling.top_k or len(probs) :]] = 0.0
        probs = probs / probs.sum()
        before = np.cumsum(probs[order]) - probs[order]  # the fewest tokens that reach top_p
        probs[order[before >= sampling.top_p]] = 0.0
        return probs / probs.sum()

    return law


def scored(tree: Tree, laws: Laws, context: Text, sampling: Sampling) -> Float[Tensor, "rows vocab"]:
    """The target's scores of every row, as the decoding loop would hand them to the verifier."""
    paths = [(*context, *tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(len(tree))]
    return sampling.process(log_rows(laws, paths), tree, list(context))


def verdicts(
    verifier: Verifier, tree: Tree, scores: Float[Tensor, "rows vocab"]
) -> dict[tuple[tuple[int, ...], int], float]:
    """The exact law of the accepted path and the token behind it."""

    def judge(random: EnumeratingRandom) -> tuple[tuple[int, ...], int]:
        verdict = verifier(tree, scores, random)
        return tuple(verdict.path), verdict.token

    with unchecked():
        return law_of(judge)


def continued(law: dict[Text, float], target: Callable[[Text], np.ndarray], length: int) -> dict[Text, float]:
    """The law of the first `length` tokens, if the target itself goes on where a text of `law` ends."""
    finished: dict[Text, float] = defaultdict(float)
    for tokens in range(length + 1):
        for text in [text for text in law if len(text) == tokens]:
            if tokens == length:
                finished[text] += law[text]
                continue
            for token, probability in enumerate(target(text).tolist()):
                if probability > 0:
                    longer = (*text, token)
                    law[longer] = law.get(longer, 0.0) + law[text] * probability
    return dict(finished)


def distance(law: dict[Text, float], other: dict[Text, float]) -> float:
    """The largest difference of two laws in any outcome."""
    return max(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in law.keys() | other.keys())
