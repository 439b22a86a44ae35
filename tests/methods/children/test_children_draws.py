"""The draws of children: their laws, and that a generation uses each of its numbers once."""

import numpy as np
import pytest
import torch
from scipy.special import chdtrc

from opt_tree import Random
from opt_tree.children import LogProbs
from opt_tree.methods.children.draws import draws_of, over_vocabulary

LAW = torch.tensor([0.35, 0.0, 0.2, 0.05, 0.4], dtype=torch.float64)


def agree(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Pearson's chi-square test at one in a thousand; the seeds are fixed, so a verdict stays."""
    assert counts[probs == 0].sum() == 0
    seen, expected = counts[probs > 0], counts.sum() * probs[probs > 0]
    return bool(chdtrc(len(seen) - 1, ((seen - expected) ** 2 / expected).sum()) > 1e-3)


def test_draws_have_the_laws_they_stand_for() -> None:
    rows, draws, probs = LAW.expand(20_000, -1), draws_of(Random(0)), LAW.numpy()
    for drawn in draws.iid(rows, 2).T.numpy():
        assert agree(np.bincount(drawn, minlength=5), probs)
    first, second, third, fourth = draws.distinct(rows, 4).T.numpy()
    assert agree(np.bincount(first, minlength=5), probs)
    joint = np.outer(probs, probs) / (1 - probs[:, None])
    np.fill_diagonal(joint, 0)
    assert agree(np.bincount(first * 5 + second, minlength=25), joint.flatten())
    assert all(len({*row}) == 4 and 1 not in row for row in zip(first, second, third, fourth, strict=True))
    assert draws.distinct(rows[:3], 5)[:, 4].tolist() == [1, 1, 1]  # the impossible one comes last


def test_numbers_are_used_once_and_leave_the_race_alone() -> None:
    """The noise of a step must not come back in the next one."""
    probs, random = torch.full((2, 50), 0.02, dtype=torch.float64), Random(1)
    for name in ("iid", "distinct"):
        first, again = (getattr(draws_of(random), name)(probs, 20) for _ in range(2))
        assert not torch.equal(first, again) and not torch.equal(first[0], first[1])
        assert torch.equal(*(getattr(draws_of(Random(1)), name)(probs, 20) for _ in range(2)))
    law = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    one, other = Random(5), Random(5)
    draws_of(one).distinct(law, 3), draws_of(one).iid(law, 2)
    assert one.draw(law, np.array([4])) == other.draw(law, np.array([4]))


def test_the_numbers_of_a_seed_are_known() -> None:
    """Drawn in turn with coins, from one stream."""
    random, rows = Random(7), LAW.expand(3, -1)
    draws = draws_of(random)
    assert draws_of(random) is draws
    found = [draws.iid(rows, 3).tolist(), random.accept(0.5), draws.distinct(rows, 3).tolist()]
    found += [random.choose(LAW.numpy()), draws.iid(rows, 1).tolist()]
    assert found == [[[4, 0, 0], [0, 2, 2], [4, 0, 0]], False, [[0, 4, 3], [4, 3, 0], [2, 4, 0]], 0, [[4], [4], [4]]]


def test_a_draft_vocabulary_has_a_column_for_each_token_to_its_last() -> None:
    tokens = torch.tensor([1, 2, 5])
    answer = LogProbs.of(torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 0.0]]), tokens)
    wide = over_vocabulary(answer)
    assert wide.shape == (2, 6) and torch.equal(wide[:, tokens], answer.values)
    assert wide[:, [0, 3, 4]].isneginf().all()


def test_a_few_named_tokens_are_no_distribution_unless_the_whole_is_behind_them() -> None:
    whole = LogProbs.of(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    few = whole.values[:, 2:], torch.tensor([[2, 3]])
    assert over_vocabulary(LogProbs(*few, lambda: whole)) is whole.values
    with pytest.raises(TypeError, match="names a few tokens only"):
        over_vocabulary(LogProbs(*few))
