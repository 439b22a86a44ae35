"""Drafting from the text at hand: counts, their interpolation, and what the loop makes of them."""

import numpy as np
import pytest
import torch
from asking import begin, root_of
from table_models import TableTarget, written_laws
from tiny_models import prompt

from opt_tree import Decoder, OptTree, Sampling
from opt_tree.methods.drafters.tables.lookup import Tails, few
from opt_tree.methods.drafters.tables.ngram import Counts, NGramDrafter, RunFollowers, Text, interpolate
from opt_tree.pool import Frontier


def probs_of(answer) -> list[dict[int, float]]:
    """An answer as {token: probability} a row."""
    rows = zip(answer.tokens.tolist(), answer.values.exp().tolist(), strict=True)
    return [{token: prob for token, prob in zip(*row, strict=True) if prob > 0} for row in rows]


class TestTails:
    def test_the_tail_of_a_node_goes_on_from_its_parents(self):
        assert Tails(1).root([7, 8]) == [(8,)]
        tails = Tails(2)
        assert tails.root([7, 8, 9]) == [(8, 9)]
        see = np.ones((2, 2), bool)
        assert tails.expand(Frontier(np.array([1, 2]), np.array([0, 0]), np.array([1, 1]), see)) == [(9, 1), (9, 2)]
        assert tails.expand(Frontier(np.array([3, 4]), np.array([2, 1]), np.array([2, 2]), see)) == [(2, 3), (1, 4)]
        assert tails.root([5]) == [(5,)]
        assert tails.expand(Frontier(np.array([6]), np.array([0]), np.array([1]), see)) == [(5, 6)]


def test_few_keeps_the_mass_and_pads_with_nothing():
    answer = few([{5: 0.5, 2: 0.25}, {}, {1: 1.0}])
    assert answer.tokens.tolist() == [[5, 2], [-1, -1], [1, -1]]
    assert answer.values.exp().tolist() == [[0.5, 0.25], [0.0, 0.0], [1.0, 0.0]]
    assert answer.values.dtype == torch.float64
    assert few([{}]).tokens.tolist() == [[-1]]


class TestCounts:
    def test_of_a_text_and_of_its_continuation(self):
        whole, grown = Counts(3, [1, 2, 1, 2, 3]), Counts(3, [1, 2])
        grown.add([1, 2])
        grown.add([3])
        for counts in (whole, grown):
            assert counts.after((1,)) == [{2: 2}]
            assert counts.after((1, 2)) == [{1: 1, 3: 1}, {1: 1, 3: 1}]
            assert counts.after((2, 1, 2)) == [{1: 1, 3: 1}, {1: 1, 3: 1}, {3: 1}]
            assert counts.after((3, 2)) == [{1: 1, 3: 1}]
            assert counts.after((3,)) == [] and counts.after((9, 9)) == []
        assert Counts(0, [1, 2, 1, 2]).after((1,)) == []


class TestInterpolation:
    def test_the_example_of_the_docstring(self):
        rows = [RunFollowers(10, [(7, 4)]), RunFollowers(1, [(7, 1)])]
        probs = interpolate((5, 6), Text(Counts(0)), (2.0, 1.0), rows)
        assert probs == {7: pytest.approx((1 + 4 / 12) / 2)}

    def test_a_text_weighs_beside_the_rows(self):
        """p_1 = (4 + 8 x 1) / (10 + 8 x 2 + 2), and for what occurred here alone 8 / 28."""
        rows = [RunFollowers(10, [(7, 4)])]
        probs = interpolate((6,), Text(Counts(1, [6, 7, 6, 3]), 8.0), (2.0,), rows)
        assert probs == {7: pytest.approx(12 / 28), 3: pytest.approx(8 / 28)}

    def test_by_the_recursion_of_the_formula(self):
        """p_k from p_{k-1}, as it is written, against the walk from above."""
        text = prompt(300, seed=5, vocab=6)
        counts, beta = Counts(3, text), (4.0, 2.0, 1.0)
        for start in range(50):
            tail = tuple(text[start : start + 3])
            expected = np.zeros(6)
            for length in (1, 2, 3):
                found = dict(enumerate(counts.after(tail))).get(length - 1, {})
                mine = np.array([found.get(token, 0) for token in range(6)])
                if mine.sum():
                    expected = (mine + beta[length - 1] * expected) / (mine.sum() + beta[length - 1])
            probs = interpolate(tail, Text(counts), beta)
            assert [probs.get(token, 0.0) for token in range(6)] == pytest.approx(expected, abs=5e-3)
            assert sum(probs.values()) < 1

    def test_the_longest_match_alone(self):
        """beta 0 is prompt lookup as published: 1 2 was followed by 3 only, whatever followed 2 elsewhere."""
        counts = Counts(2, [1, 2, 3, 9, 2, 4, 9, 2, 4, 1, 2])
        assert interpolate((1, 2), Text(counts), (0.0, 0.0)) == {3: 1.0}
        assert interpolate((8, 2), Text(counts), (0.0, 0.0)) == {3: pytest.approx(1 / 3), 4: pytest.approx(2 / 3)}


class TestDrafter:
    def test_answers_are_up_to_date_after_every_step(self):
        """Answers are remembered; a count that has changed makes them anew."""
        random = np.random.default_rng(0)
        text = random.integers(0, 4, 400).tolist()
        drafter = NGramDrafter((3.0, 2.0, 1.0))
        begin(drafter, text[:10], None)
        at = 10
        while at < 390:
            tails = [tuple(text[i : i + 3]) for i in random.integers(0, at - 3, 3)]
            fresh = [interpolate(tail, Text(Counts(3, text[:at])), drafter.beta) for tail in tails]
            for found, expected in zip(probs_of(drafter.look_up(tails)), fresh, strict=True):
                assert found == pytest.approx(expected)
            new = int(random.integers(1, 5))
            drafter.accept(outcome_of(text[at : at + new]))
            at += new

    def test_reset_forgets_the_last_prompt(self):
        drafter = NGramDrafter()
        begin(drafter, [1, 2, 1], None)
        assert probs_of(root_of(drafter, [1, 2, 1])) == [{2: pytest.approx(1 / 5)}]
        begin(drafter, [1, 3, 1], None)
        assert probs_of(root_of(drafter, [1, 3, 1])) == [{3: pytest.approx(1 / 5)}]

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
    def test_lossless_and_worth_its_while_where_the_text_repeats(self, sampling):
        """A target in a loop of seven tokens: everything is accepted from the second round on."""
        laws = written_laws({(token,): tuple(np.eye(7)[(token + 1) % 7]) for token in range(7)})
        target = TableTarget(laws, 7)
        decoder = Decoder(target, NGramDrafter(), OptTree(nodes=4, threshold=0.0, max_depth=4))
        result = decoder.generate([0], 40, sampling)
        assert result.tokens == [(token + 1) % 7 for token in range(40)]
        # Seven tokens by themselves, then four accepted ones and one of the target's own a step.
        assert len(result.steps) <= 7 + 8
        assert all(step.draft_forwards == 0 for step in result.steps)

    @pytest.mark.parametrize("beta", [(), (-1.0,)])
    def test_a_wrong_beta_is_refused(self, beta):
        with pytest.raises(ValueError, match="beta of 0 or more for each length"):
            NGramDrafter(beta)


def outcome_of(tokens):
    """What a drafter that reads tokens alone learns from."""
    from opt_tree.generation import Outcome
    from opt_tree.tree import Tree

    rows = np.zeros(1, dtype=np.int64)
    tree = Tree(rows, rows - 1, np.zeros(1), rows)
    return Outcome(tree, [0], list(tokens), {}, torch.zeros(1, 7))
