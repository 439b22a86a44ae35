"""Token Recycling: what is kept of which row, how it is answered from, and that nothing is lost."""

import copy

import numpy as np
import pytest
import torch
from conftest import TableTarget, hashed_laws
from drafters.test_ngram import probs_of
from tiny_models import VOCAB, prompt, tiny

from opt_tree import Decoder, OptTree, Sampling, Static
from opt_tree.core.step import Outcome
from opt_tree.core.target import Output
from opt_tree.core.tree import Tree
from opt_tree.drafters import NGramRecycling, TokenRecycling
from opt_tree.drafters.tables.ngram_recycling import Calibration
from opt_tree.drafters.tables.recycling import RANK_RATES, best_tokens
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policies import AcceptanceRates, greedy_static_tree

SURE = (Calibration(0.0, 1.0, 0.0),) * 3


def logits_of(*rankings: list[int], vocab: int = 9) -> torch.Tensor:
    """Logits that rank tokens: 0 for the first, -1 for the second, ..., -50 for the unnamed."""
    rows = torch.full((len(rankings), vocab), -50.0)
    for row, ranking in zip(rows, rankings, strict=True):
        row[torch.tensor(ranking)] = -torch.arange(len(ranking), dtype=torch.float32)
    return rows


def outcome(tokens: list[int], parents: list[int], path: list[int], bonus: int, logits: torch.Tensor) -> Outcome:
    tree = Tree(np.array(tokens), np.array(parents), np.zeros(len(tokens)), np.full(len(tokens), -1))
    return Outcome(tree, path, [*(tokens[row] for row in path[1:]), bonus], {}, logits)


@pytest.mark.parametrize("vocab", [3, 8, 61, 200, 8192, 8200])
@pytest.mark.parametrize("k", [1, 8])
def test_best_tokens_are_topks(vocab, k):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    values, tokens = best_tokens(logits, k)
    expected = logits.topk(min(k, vocab))
    assert torch.equal(values, expected.values) and torch.equal(tokens, expected.indices)


class TestAsPublished:
    def test_learns_from_the_prompt_and_from_rejected_rows(self):
        """Of a token's rows the last one stays."""
        again = TokenRecycling(9, (0.5,))
        again.reset([1, 1, 1], Output(logits_of([4], [5])))
        assert probs_of(again.look_up([(1,)])) == [{5: 0.5}]
        drafter = TokenRecycling(9, (0.5, 0.25))
        drafter.reset([1, 2, 3], Output(logits_of([4, 5], [6, 7])))
        assert probs_of(drafter.root([1, 2, 3])) == [{}]
        assert probs_of(drafter.look_up([(1,), (2,)])) == [{4: 0.5, 5: 0.25}, {6: 0.5, 7: pytest.approx(0.25)}]
        # 3 -> (6, 8): 8 is the target's, row 1 is rejected and learnt from all the same.
        drafter.observe(outcome([3, 6, 8], [-1, 0, 0], [0, 2], 5, logits_of([8, 6], [1, 2], [5, 4])))
        assert probs_of(drafter.look_up([(3,), (6,), (8,)])) == [
            {8: 0.5, 6: 0.25},
            {1: 0.5, 2: 0.25},
            {5: 0.5, 4: 0.25},
        ]

    def test_keeps_what_it_learnt_until_told_otherwise(self):
        for keep, found in ((True, [{4: 0.5}]), (False, [{}])):
            drafter = TokenRecycling(9, (0.5,), keep=keep)
            drafter.reset([1, 2], Output(logits_of([4])))
            drafter.reset([3], None)
            assert probs_of(drafter.look_up([(1,)])) == found
            drafter.clear()
            assert probs_of(drafter.look_up([(1,)])) == [{}]

    def test_rates_are_counted_on_along_the_accepted_path(self):
        """Of two rows that were known, one named what followed first, the other second; a third one was empty."""
        drafter = TokenRecycling(9, (0.5, 0.2))
        drafter.reset([1, 2, 3], Output(logits_of([4, 5], [6, 7])))
        first, second = 200 * drafter.rates
        drafter.observe(outcome([1, 4, 5], [-1, 0, 0], [0, 1], 2, logits_of([8, 7], [8, 7], [8, 7])))
        assert drafter.rates * 201 == pytest.approx([first + 1, second])  # 1 -> 4; nothing was known of 4
        drafter.observe(outcome([2], [-1], [0], 7, logits_of([8, 7])))
        assert drafter.rates * 202 == pytest.approx([first + 1, second + 1])  # 2 -> 7, its second
        drafter.clear()
        assert drafter.rates == pytest.approx([0.5, 0.2])

    def test_opt_tree_on_rank_rates_is_the_static_tree(self):
        """Where every row is known. The published template has these widths: eight below the root, fewer below."""
        drafter = TokenRecycling(9)
        drafter.reset(
            [*range(9), 0], Output(logits_of(*[[(token + rank) % 9 for rank in range(1, 9)] for token in range(9)]))
        )
        target = TableTarget(hashed_laws(1, 9), 9)
        paths = set(greedy_static_tree(AcceptanceRates(RANK_RATES), 20, 6).paths)
        tree = next(Decoder(target, drafter, OptTree(20, 0.0, 6)).steps([0], 9)).tree
        ranks = {
            tuple(int(tree.tokens[row] - tree.tokens[tree.parents[row]]) % 9 - 1 for row in tree.path_to(node)[1:])
            for node in range(1, len(tree))
        }
        assert sum(np.prod([RANK_RATES[r] for r in path]) for path in ranks) == pytest.approx(
            sum(np.prod([RANK_RATES[r] for r in path]) for path in paths)
        )
        assert {(rank,) for rank in range(8)} <= set(greedy_static_tree(AcceptanceRates(RANK_RATES), 80, 6).paths)

    @pytest.mark.parametrize("rates", [(), (-0.1,), (0.6, 0.6)])
    def test_wrong_rates_are_refused(self, rates):
        with pytest.raises(ValueError, match="rates of the ranks"):
            TokenRecycling(9, rates)


class TestByNGrams:
    def test_the_longest_known_run_answers(self):
        drafter = NGramRecycling(SURE, k=2)
        drafter.reset([1, 2, 3, 2, 5], Output(logits_of([2], [3], [4], [5, 6])))
        # (1, 2) was followed by 3; the newest 2 by 5 or 6; (9, 2) is not known, but 2 is.
        both = {5: pytest.approx(0.731, abs=1e-3), 6: pytest.approx(0.269, abs=1e-3)}
        found = probs_of(drafter.look_up([(1, 2), (9, 2), (7, 3, 2), (8,)]))
        assert found[0][3] == pytest.approx(0.5, abs=1e-3)  # logit p = log 1
        assert found[1].keys() == found[2].keys() == both.keys()
        assert found[3] == {}

    def test_probabilities_are_the_calibrations(self):
        drafter = NGramRecycling((Calibration(-1.0, 0.5, -0.25),), k=2)
        drafter.reset([1, 2], Output(logits_of([4, 5])))
        log_probs = torch.tensor([0.0, -1.0]).log_softmax(0)
        logits = -1.0 + 0.5 * log_probs - 0.25 * torch.arange(2)
        expected = dict(zip([4, 5], logits.sigmoid().tolist(), strict=True))
        assert probs_of(drafter.look_up([(1,)])) == [pytest.approx(expected, rel=1e-4)]
        certain = NGramRecycling((Calibration(5.0, 0.0, 0.0),), k=3)
        certain.reset([1, 2], Output(logits_of([4, 5, 6])))
        assert sum(probs_of(certain.look_up([(1,)]))[0].values()) == pytest.approx(1), "never more than certain"

    def test_what_the_target_rules_out_is_next_to_impossible(self):
        drafter = NGramRecycling()
        drafter.reset([1, 2], Output(torch.tensor([[0.0, -9e3, -torch.inf, -3e38]])))
        (found,) = probs_of(drafter.look_up([(1,)]))
        assert found[0] > 0.4 and max(found.get(token, 0.0) for token in (1, 2, 3)) < 1e-300

    def test_tree_rows_are_remembered_with_their_own_past(self):
        drafter = NGramRecycling(SURE, k=1)
        drafter.reset([1, 2, 3], Output(logits_of([2], [3])))
        # 3 -> 6 -> 7 beside 3 -> 8; the path is 3, 8.
        rows = logits_of([8], [7], [4], [5])
        drafter.observe(outcome([3, 6, 8, 7], [-1, 0, 0, 1], [0, 2], 5, rows))
        found = probs_of(drafter.look_up([(1, 2, 3), (2, 3, 6), (2, 3, 8), (3, 6, 7), (8, 5), (6, 7)]))
        assert [set(row) for row in found] == [{8}, {7}, {4}, {5}, set(), {5}]
        # The text went on behind 8 and 5: the next root's past is theirs.
        drafter.observe(outcome([5], [-1], [0], 1, logits_of([0])))
        assert [set(row) for row in probs_of(drafter.look_up([(3, 8, 5), (7, 8, 5)]))] == [{0}, {0}]

    def test_keeps_what_it_learnt_until_told_otherwise(self):
        for keep, found in ((True, {4}), (False, set())):
            drafter = NGramRecycling(SURE, keep=keep)
            drafter.reset([1, 2], Output(logits_of([4])))
            drafter.reset([3], None)
            assert probs_of(drafter.look_up([(1,)]))[0].keys() >= found
            drafter.clear()
            assert probs_of(drafter.look_up([(1,)])) == [{}]

    def test_the_oldest_runs_are_overwritten(self):
        drafter = NGramRecycling(SURE[:1], k=1, capacity=3)
        drafter.reset([1, 2, 3, 4, 5], Output(logits_of([5], [6], [7], [8])))
        assert [set(row) for row in probs_of(drafter.look_up([(1,), (2,), (3,), (4,)]))] == [set(), {6}, {7}, {8}]
        drafter.reset([2, 1, 0], Output(logits_of([0], [3])))
        assert [set(row) for row in probs_of(drafter.look_up([(1,), (2,), (3,), (4,)]))] == [{3}, set(), {7}, {8}]

    def test_grows_beyond_its_first_rows(self):
        drafter = NGramRecycling(SURE[:1], k=1, capacity=5000)
        tokens = list(range(3000))
        logits = torch.eye(3000).roll(1, 1)
        drafter.reset([*tokens, 0], Output(logits))
        assert [set(row) for row in probs_of(drafter.look_up([(7,), (2500,)]))] == [{8}, {2501}]


KINDS = {
    "published": lambda vocab, keep: TokenRecycling(vocab, keep=keep),
    "n-grams": lambda vocab, keep: NGramRecycling(keep=keep),
}


def test_a_copy_by_ngrams_learns_on_by_itself():
    """As each lane of a batch has one: what was known is known there, what is learnt later is not."""
    one = NGramRecycling(SURE)
    one.reset([1, 2, 3], Output(logits_of([4, 5], [6, 7])))
    other = copy.deepcopy(one)
    assert probs_of(other.look_up([(1, 2)])) == probs_of(one.look_up([(1, 2)])) != [{}]
    other.root([1, 2, 3])
    other.observe(outcome([3, 6], [-1, 0], [0], 8, logits_of([8, 6], [1, 2])))
    assert probs_of(one.look_up([(2, 3), (3,)])) == [{}, {}]
    assert probs_of(other.look_up([(2, 3)])) != [{}]
    one.observe(outcome([3, 5], [-1, 0], [0], 5, logits_of([5, 6], [1, 2])))
    (ours,), (theirs,) = (probs_of(each.look_up([(3,)])) for each in (one, other))
    assert max(ours, key=ours.get) == 5 and max(theirs, key=theirs.get) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7)], ids=["greedy", "sampled"])
def test_lossless_cold_and_warm(kind, sampling):
    target = CausalLM(tiny("llama"))
    plain = Decoder(target, None, Static.empty())
    decoder = Decoder(target, KINDS[kind](VOCAB, True), OptTree(12, 0.0, 5))
    steps = []
    for seed in (0, 1, 0):
        text = prompt(12, seed=seed)
        result = decoder.generate(text, 40, sampling, seed=4)
        assert result.tokens == plain.generate(text, 40, sampling, seed=4).tokens
        assert all(step.draft_forwards == 0 for step in result.steps)
        steps.append(len(result.steps))
    assert steps[2] < steps[0] or not sampling.greedy  # the second time it knows the text
