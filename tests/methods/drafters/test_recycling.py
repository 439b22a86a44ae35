"""Token Recycling: what is kept of which row, how it is answered from, and that nothing is lost."""

import numpy as np
import pytest
import torch
from asking import begin, root_of
from methods.drafters.test_ngram import probs_of
from table_models import TableTarget, hashed_laws

from opt_tree import Decoder, OptTree
from opt_tree.generation import Outcome
from opt_tree.methods.drafters.tables.recycling import RANK_RATES, TokenRecycling
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.target import Output
from opt_tree.tree import Tree


def logits_of(*rankings: list[int], vocab: int = 9) -> torch.Tensor:
    """Logits that rank tokens: 0 for the first, -1 for the second, ..., -50 for the unnamed."""
    rows = torch.full((len(rankings), vocab), -50.0)
    for row, ranking in zip(rows, rankings, strict=True):
        row[torch.tensor(ranking)] = -torch.arange(len(ranking), dtype=torch.float32)
    return rows


def outcome(tokens: list[int], parents: list[int], path: list[int], bonus: int, logits: torch.Tensor) -> Outcome:
    tree = Tree(np.array(tokens), np.array(parents), np.zeros(len(tokens)), np.full(len(tokens), -1))
    return Outcome(tree, path, [*(tokens[row] for row in path[1:]), bonus], {}, logits)


class TestAsPublished:
    def test_learns_from_the_prompt_and_from_rejected_rows(self):
        """Of a token's rows the last one stays."""
        again = TokenRecycling(9, (0.5,))
        begin(again, [1, 1, 1], Output(logits_of([4], [5])))
        assert probs_of(again.look_up([(1,)])) == [{5: 0.5}]
        drafter = TokenRecycling(9, (0.5, 0.25))
        begin(drafter, [1, 2, 3], Output(logits_of([4, 5], [6, 7])))
        assert probs_of(root_of(drafter, [1, 2, 3])) == [{}]
        assert probs_of(drafter.look_up([(1,), (2,)])) == [{4: 0.5, 5: 0.25}, {6: 0.5, 7: pytest.approx(0.25)}]
        # 3 -> (6, 8): 8 is the target's, row 1 is rejected and learnt from all the same.
        drafter.accept(outcome([3, 6, 8], [-1, 0, 0], [0, 2], 5, logits_of([8, 6], [1, 2], [5, 4])))
        assert probs_of(drafter.look_up([(3,), (6,), (8,)])) == [
            {8: 0.5, 6: 0.25},
            {1: 0.5, 2: 0.25},
            {5: 0.5, 4: 0.25},
        ]

    def test_keeps_what_it_learnt_until_told_otherwise(self):
        for keep, found in ((True, [{4: 0.5}]), (False, [{}])):
            drafter = TokenRecycling(9, (0.5,), keep=keep)
            begin(drafter, [1, 2], Output(logits_of([4])))
            begin(drafter, [3], None)
            assert probs_of(drafter.look_up([(1,)])) == found
            drafter.clear()
            assert probs_of(drafter.look_up([(1,)])) == [{}]

    def test_rates_are_counted_on_along_the_accepted_path(self):
        """Of two rows that were known, one named what followed first, the other second; a third one was empty."""
        drafter = TokenRecycling(9, (0.5, 0.2))
        begin(drafter, [1, 2, 3], Output(logits_of([4, 5], [6, 7])))
        first, second = 200 * drafter.rates
        drafter.accept(outcome([1, 4, 5], [-1, 0, 0], [0, 1], 2, logits_of([8, 7], [8, 7], [8, 7])))
        assert drafter.rates * 201 == pytest.approx([first + 1, second])  # 1 -> 4; nothing was known of 4
        drafter.accept(outcome([2], [-1], [0], 7, logits_of([8, 7])))
        assert drafter.rates * 202 == pytest.approx([first + 1, second + 1])  # 2 -> 7, its second
        drafter.clear()
        assert drafter.rates == pytest.approx([0.5, 0.2])

    def test_opt_tree_on_rank_rates_is_the_static_tree(self):
        """Where every row is known. The published template has these widths: eight below the root, fewer below."""
        drafter = TokenRecycling(9)
        begin(
            drafter,
            [*range(9), 0],
            Output(logits_of(*[[(token + rank) % 9 for rank in range(1, 9)] for token in range(9)])),
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
