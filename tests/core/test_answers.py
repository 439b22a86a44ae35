"""What drafters answer: normalised whatever the dtype, and shown as a column a token where that is asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_tree.children import LogProbs, TopK

INF = float("inf")


@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.5, 3.0]))
def test_scores_become_log_probabilities(seed: int, scale: float) -> None:
    """In float32 at least, times the scale; the scores are left as they are."""
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 7)) * 3)
    scores[1, 2:5] = -INF
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        given_scores = scores.to(dtype)
        answer, wide = LogProbs.of(given_scores, scale=scale), given_scores.double() * scale
        expected = wide - wide.exp().sum(-1, keepdim=True).log()
        assert answer.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(answer.values.double(), expected, rtol=0, atol=1e-5)
        assert answer.tokens is None and answer.unpicked is answer
        assert torch.equal(given_scores, scores.to(dtype)), "written over"


@pytest.mark.parametrize("host", [True, False])
def test_a_row_without_scores_stays_and_a_fault_shows(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf throughout: nothing is known. NaN is somebody's mistake and is not hidden."""
    if not host:
        monkeypatch.setattr("opt_tree.children.on_host", lambda tensor: False)
    scores = torch.tensor([[0.0, 0.0], [-INF, -INF], [-INF, 1.0], [torch.nan, 0.0]])
    for rows in (scores, scores[:1], scores[1:2], scores[2:]):
        values = LogProbs.of(rows).values
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            if row[0] != row[0]:
                assert np.isnan(value).all()
            else:
                expected = {0.0: [-np.log(2)] * 2, -INF: [-INF, -INF if row[1] == -INF else 0.0]}[row[0]]
                assert value == pytest.approx(expected)
    answer = LogProbs.of(scores[1:3])
    assert TopK(total=4).pick(answer, np.zeros(2), -INF).rows.tolist() == [1], "no child where nothing is known"
    assert not len(TopK(total=4).pick(LogProbs(torch.zeros(0, 2)), np.zeros(0), -INF).tokens)


def test_of_a_draft_vocabulary_the_children_are_the_targets_tokens() -> None:
    answer = LogProbs.of(torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 0.0]]), torch.tensor([1, 2, 5]))
    picked = TopK(per_node=2).pick(answer, np.zeros(2), -INF)
    assert picked.tokens.reshape(2, 2).tolist() == [[5, 2], [1, 2]] and picked.rows.tolist() == [0, 0, 1, 1]
    best = TopK(total=2).pick(answer, np.array([0.0, -9.0]), -INF)
    assert sorted(best.tokens.tolist()) == [2, 5] and best.rows.tolist() == [0, 0]


def test_behind_a_few_named_tokens_may_be_the_whole() -> None:
    whole = LogProbs.of(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    few = whole.values[:, 2:], torch.tensor([[2, 3]])
    assert LogProbs(*few, lambda: whole).unpicked is whole
    assert TopK(per_node=2).pick(LogProbs(*few), np.zeros(1), -INF).tokens.tolist() == [3, 2]


@given(st.integers(0, 10_000), st.sampled_from([TopK(per_node=2), TopK(total=1), TopK(total=5)]))
def test_each_node_may_name_tokens_of_its_own(seed: int, children: TopK) -> None:
    """On the host, and as on a device; against a sort of all."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(np.sort(rng.normal(size=(3, 5)))).log_softmax(-1)
    names = torch.from_numpy(np.stack([rng.permutation(50)[:5] for _ in range(3)]))
    above = -rng.random(3)
    paths = (values + torch.from_numpy(above)[:, None]).numpy()
    best = sorted(((paths[cell], cell[0], int(names[cell])) for cell in np.ndindex(3, 5)), reverse=True)
    if children.total:
        best = best[: children.total]
    else:
        best = [one for one in best if sum(other[1] == one[1] and other > one for other in best) < 2]
    for host in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not host:
                patch.setattr("opt_tree.children.on_host", lambda tensor: False)
            picked = children.pick(LogProbs(values, names), above, -INF)
        found = sorted(zip(picked.path_log_probs, picked.rows, picked.tokens, strict=True), reverse=True)
        assert [one[1:] for one in found] == [one[1:] for one in best]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in best])


def test_a_token_that_a_model_masks_by_the_least_number_is_no_child() -> None:
    """As models do whose vocabulary is padded: its log-probability is finite, and its probability 0."""
    answer = LogProbs.of(torch.tensor([[0.0, 1.0, 2.0, *[torch.finfo(torch.float32).min] * 3]]))
    for total in (4, 6):
        assert sorted(TopK(total=total).pick(answer, np.zeros(1), -INF).tokens.tolist()) == [0, 1, 2]
