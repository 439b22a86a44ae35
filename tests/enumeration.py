"""What the tests enumerate with `opt_tree.tools.enumeration`: laws, whole generations, what is expected of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from table_models import Laws, TableDrafter, hashed_laws, log_rows, written_laws
from torch import Tensor

from opt_tree import Decoder, Random, Sampling, Tree, TreePolicy, Verifier
from opt_tree.children import Children
from opt_tree.methods.verifiers import importance_weighted
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.sampling import Logits
from opt_tree.tools import enumeration
from opt_tree.tools.enumeration import EnumeratingRandom, T, Text, disjoint_laws, outcomes, paths_of
from opt_tree.verify import check

VOCAB = 3
# Target and drafter; the last is what docs/sampling.md works out by hand, with p > q on two tokens.
LAWS: dict[str, tuple[Laws, Laws]] = {
    "random": (hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)),
    "zeros": (hashed_laws(3, VOCAB, 3), hashed_laws(4, VOCAB, 3)),
    "equal": (hashed_laws(5, VOCAB), hashed_laws(5, VOCAB)),
    "disjoint": (disjoint_laws(0, VOCAB), disjoint_laws(1, VOCAB)),
    "certain drafter": (hashed_laws(6, VOCAB), hashed_laws(7, VOCAB, 1)),
    "by hand": (written_laws({(): (0.2, 0.5, 0.3)}), written_laws({(): (0.6, 0.3, 0.1)})),
}

LOSSLESS = [method.make for method in VERIFIERS.values() if not (method.make.greedy_only or method.make.lossy)]
"""Every verifier of targets that draw."""


def exact_for(verifier: Verifier, children: Children) -> bool:
    """Whether a decoder takes the verifier for a policy of such children."""
    try:
        check(verifier, children)
    except TypeError:
        return False
    return True


def law_of(run: Callable[[EnumeratingRandom], T]) -> dict[T, float]:
    """The exact distribution of `run`'s result."""
    law: dict[T, float] = defaultdict(float)
    for random, result in outcomes(run):
        law[result] += random.probability
    return dict(law)


def verdicts(verifier: Verifier, tree: Tree, logits: Logits) -> dict[tuple[Text, int], float]:
    """The exact distribution of the accepted path and the token behind it."""

    def judge(random: EnumeratingRandom) -> tuple[Text, int]:
        verdict = verifier(tree, logits, random)
        return tuple(verdict.path), verdict.token

    return law_of(judge)


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


def first_token(
    make: Callable[[EnumeratingRandom], Decoder], prompt: Text, left: int = 4, chosen: set[TreePolicy] | None = None
) -> dict[Text, float]:
    """The exact law of the first token of a step that may emit `left`, of decoders that may know what will be drawn.

    `chosen` gets the policy of every step.
    """

    def first(random: EnumeratingRandom) -> Text:
        step = next(make(random).steps(list(prompt), left, Sampling(1.0), random))
        if chosen is not None:
            chosen.add(step.policy)
        return tuple(step.tokens[:1])

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


@contextmanager
def solved_once() -> Iterator[None]:
    """A linear programme depends on the laws only: the same ones come back thousands of times where all is counted."""
    solve, known = importance_weighted._best_weights, {}

    def remembered(*arrays: np.ndarray) -> np.ndarray | None:
        key = b"".join(array.tobytes() for array in arrays)
        if key not in known:
            known[key] = solve(*arrays)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importance_weighted, "_best_weights", remembered)
        yield


def drawn_trees(policy: TreePolicy, laws: Laws, context: Text, sampling: Sampling) -> list[tuple[Tree, float]]:
    """Every tree that the policy can draw below the context, with its probability."""
    with unchecked():
        return enumeration.drawn_trees(TableDrafter(laws), policy, context, sampling)


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
    return sampling.process(log_rows(laws, paths_of(tree, context)), tree, list(context))
