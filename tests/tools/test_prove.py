"""`prove`: it proves what is exact, refutes what is not by the smallest tree, and refuses what it cannot count."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from enumeration import LOSSLESS, solved_once, unchecked
from jaxtyping import Int
from table_models import written_laws

from opt_tree import Static, TopK, prove
from opt_tree.children import Children
from opt_tree.methods.children.best_and_draw import BestAndDraw
from opt_tree.methods.children.iid import IID
from opt_tree.methods.children.without_replacement import WithoutReplacement
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.naive_tree import naive
from opt_tree.methods.verifiers.rules import all_but_chains
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.pool import CandidatePool
from opt_tree.tools.cases import law_pairs
from opt_tree.tools.display.prove import KINDS, main
from opt_tree.verify import Verifier, match

BY_HAND = {"by hand": (written_laws({(): (0.2, 0.5, 0.3)}), written_laws({(): (0.6, 0.3, 0.1)}))}


@pytest.fixture(autouse=True, scope="module")
def fast() -> Iterator[None]:
    with unchecked(), solved_once():
        yield


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("verifier", LOSSLESS, ids=lambda verifier: verifier.__name__)
def test_a_verifier_is_exact_for_the_kinds_that_it_names_and_for_no_other(
    verifier: Verifier, kind: Callable[[int], Children], every: int
) -> None:
    """So a decoder refuses nothing that would be exact, and admits nothing that is not. Of the pairs of laws, one in so
    many is gone through; over three tokens, too, as tests/methods/verifiers/test_verifiers_field.py counts out.
    """
    exact = not verifier.valid_for or kind in verifier.valid_for
    children, vocab = kind(1 if verifier.refuses is all_but_chains else 2), 2 if exact else 3
    laws = None if every == 1 else dict(list(law_pairs(vocab, 1).items())[::every])
    proof = prove(verifier, children, vocab, depth=1, laws=laws)
    assert bool(proof) == exact, proof
    assert proof.error < 1e-15 if proof else proof.error > 1e-3


def test_why_the_kind_of_children_is_a_type() -> None:
    """docs/sampling.md works it out by hand: no figure of speed or acceptance shows it."""
    assert prove(multi_round, Sampled.chains(2, 1), depth=1, laws=BY_HAND)
    case = prove(multi_round, Static.kary(2, 1), depth=1, laws=BY_HAND).counterexample
    assert case is not None and case.likeliest[0].tokens.tolist() == [3, 0, 1]
    first = {text: (mine, its) for text, mine, its in case.first_difference()}
    assert first == {
        (0,): pytest.approx((1 / 3, 0.2)),
        (1,): pytest.approx((2 / 3, 0.5)),
        (2,): pytest.approx((0, 0.3)),
    }


@pytest.mark.quick("match-children0-3", "traversal-children2-2", "match-children3-2")
@pytest.mark.parametrize(
    ("verifier", "children", "vocab"),
    [
        (match, TopK(2), 3),
        (traversal, IID(2), 2),
        (traversal, DySpec(nodes=3, max_depth=2), 2),
        (match, BestAndDraw(2), 2),
    ],
)
def test_two_layers(verifier: Verifier, children: Children, vocab: int) -> None:
    proof = prove(verifier, children, vocab=vocab)
    assert proof and proof.counterexample is None
    assert {case.depth for case in proof.cases} == {1, 2} and {case.vocab for case in proof.cases} == {
        *range(2, vocab + 1)
    }
    for case in proof.cases:
        assert sum(case.emitted.values()) == pytest.approx(1) and sum(p for _, p in case.trees) == pytest.approx(1)
        assert 1 <= case.length <= case.depth + 1 + 1e-12


def test_the_length_is_what_acceptance_by_hand_comes_to() -> None:
    """p = (.2, .5, .3) accepts the child a or b with probability .7."""
    assert prove(match, Static.kary(2, 1), depth=1, laws=BY_HAND).cases[0].length == pytest.approx(1.7)


@dataclass(frozen=True)
class Peeking(Sampled):
    """Leaves out a child that came out as token 0: that is a rejection, which no verifier corrects for."""

    def select(self, pool: CandidatePool) -> Int[np.ndarray, " rows"]:
        return np.array([row for row in range(pool.size) if row == 0 or pool.tokens[row] != 0])


def test_a_policy_is_a_part_of_what_is_proved() -> None:
    assert prove(naive, Sampled.chain(1), depth=1)
    assert not prove(naive, Peeking((1,)), depth=1)


def test_a_rule_of_ones_own_sees_probabilities_and_answers_a_pair() -> None:
    seen = []

    def rule(tree, target_probs, draft_probs, random):
        seen.append((tree.tokens.tolist(), target_probs.tolist(), draft_probs.tolist()))
        return [0], random.choose(target_probs[0])

    assert prove(rule, Static.chain(1), depth=1, laws=BY_HAND).verifier == "rule"
    assert seen[0][0] == [3, 0] and seen[0][1] == [[0.2, 0.5, 0.3]] * 2 and seen[0][2] == [[0.6, 0.3, 0.1], [0.0] * 3]


def test_what_is_printed() -> None:
    """By hand: the child a is accepted with .2/.6, else the token comes from what is left of p, (0, .2, .2)/.4."""
    text = str(prove(multi_round, TopK(1), depth=1, laws=BY_HAND))
    assert text.splitlines()[1:] == [
        "smallest counterexample: TopK(per_node=1), 3 tokens, 1 deep, laws 'by hand'",
        "target   a 0.2  b 0.5  c 0.3",
        "drafter  a 0.6  b 0.3  c 0.1",
        "the only tree:",
        "  root    1 node, E(A) 0.60",
        "  └─ a 0.60",
        "  text      emitted   target",
        "  a          0.3333   0.2000",
        "  b          0.3333   0.5000",
        "  c          0.3333   0.3000",
    ]
    assert str(prove(match, TopK(1), vocab=2, depth=1)).startswith("match on TopK(per_node=1): exact to ")


_ELSEWHERE = itertools.cycle([0, 1])


def other_randomness(tree, target_probs, draft_probs, random):
    return [0], next(_ELSEWHERE)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (other_randomness, "all randomness must come from the given Random"),
        (lambda tree, target, drafted, random: ([1], 0), r"path \[1\] is none of the tree \[-1, 0\]"),
        (lambda tree, target, drafted, random: ([], 0), r"path \[\] is none"),
        (lambda tree, target, drafted, random: ([0], 7), "token 7 is none of 2"),
        (lambda tree, target, drafted, random: ([0], random.choose(target[0] * np.nan)), "nothing can be chosen by"),
        (lambda tree, target, drafted, random: ([0], random.choose([1.5, -0.5])), "nothing can be chosen by"),
    ],
)
def test_what_cannot_be_counted_is_refused(rule: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prove(rule, TopK(1), vocab=2, depth=1)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((match, TopK), {}, TypeError),
        ((match, 2), {}, TypeError),
        (("match", TopK(2)), {}, TypeError),
        ((match, TopK(2)), {"vocab": 1}, ValueError),
        ((match, TopK(2)), {"depth": 0}, ValueError),
        ((match, TopK(2)), {"depth": 1.5}, TypeError),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple, options: dict, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        prove(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["naive", "--children", "without_replacement:2", "--vocab", "2", "--depth", "1"]) == 0
    assert "naive on WithoutReplacement(per_node=2): exact to" in capsys.readouterr().out
    assert main(["naive", "--children", "top_k"]) == 1
    assert "not exact" in capsys.readouterr().out
    for wrong in (
        ["nave"],
        ["naive", "--children", "twins:2"],
        ["naive", "--children", "iid:x"],
        ["naive", "--vocab", "1"],
    ):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert isinstance(KINDS["without_replacement"](2), WithoutReplacement)
