"""The calibrated length of a chain: what it draws, what it learns, and that no text depends on it."""

import numpy as np
import pytest
import torch
from table_models import TableDrafter, TableTarget, hashed_laws

from opt_tree import Decoder, Static, Tree
from opt_tree.generation import Outcome, Step, StepTimes
from opt_tree.methods.controllers.calibrated_length import CalibratedLength, ScoredChain

VOCAB = 3
TARGET, DRAFTER = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)


def chain_of(said: list[float]) -> Tree:
    nodes = len(said)
    paths = np.concatenate([[0.0], np.log(said).cumsum()])
    return Tree(np.arange(nodes + 1), np.arange(-1, nodes), paths, np.full(nodes + 1, -1))


def told(controller: CalibratedLength, said: list[float], accepted: int) -> None:
    tree, path = chain_of(said), list(range(accepted + 1))
    tokens = [1] * (accepted + 1)
    times = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    step = Step(tree, path, tokens, controller.chain, len(said), len(said), times)
    controller.observe(step, Outcome(tree, path, tokens, {}, torch.zeros(len(said) + 1, VOCAB)))


@pytest.mark.parametrize(("least", "nodes"), [((), 4), ((0.0, 1.1), 2), ((1.1,), 1), ((0.0, 0.0, 1.1), 3)])
def test_a_chain_ends_where_its_newest_token_is_not_probable_enough(least, nodes):
    decoder = Decoder(TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER), ScoredChain(4, least))
    assert {step.tree.nodes for step in decoder.generate([0, 2], 12).steps[:-4]} == {nodes}


def test_it_is_the_tokens_own_probability_that_counts():
    drafter = TableDrafter(DRAFTER)
    target = TableTarget(TARGET, VOCAB)
    for step in Decoder(target, drafter, ScoredChain(5, (0.5,) * 4)).generate([0, 2], 30).steps[:-5]:
        own = np.exp(np.diff(step.tree.path_log_probs))
        assert (own[:-1] >= 0.5).all() and (step.tree.nodes == 5 or own[-1] < 0.5)


def test_drafting_goes_on_as_often_as_the_corrected_probability_says():
    """From one token of .4 and mean errors of 0, .2 and -.5: 1 or 0 where they are cut, and no luck is kept."""
    for errors, wanted in ((0, 0.4), (1000, 0.6)):
        controller = CalibratedLength(2, seed=3)
        controller._errors += errors, 0.2 * errors, 0.04 * errors
        mean, spread = controller.posterior()
        assert mean == pytest.approx(0.2 if errors else 0, abs=1e-3)
        least = np.array([controller.choose([0], None).least[0] for _ in range(4000)])
        if errors:
            assert spread < 0.01
            assert (least <= 0.4).mean() == pytest.approx(wanted, abs=0.03)
            assert (least <= 0.85).all() or (least <= 0.85).mean() > 0.99
        else:
            assert spread == 0.5  # drawn widely at first, alike to both sides
            assert (least <= 0.5).mean() == pytest.approx(0.5, abs=0.03)
    controller._errors += 9000, -0.7 * 9000, 0.49 * 9000
    assert (np.array([controller.choose([0], None).least[0] for _ in range(500)]) > 0.3).mean() > 0.99


def test_it_learns_from_accepted_tokens_and_the_first_rejected_one():
    controller = CalibratedLength(8)
    told(controller, [0.6, 0.9, 0.5, 0.5], 1)  # .4 of the first, -.9 of the second; the others were not judged
    assert controller._errors == pytest.approx([3, 0.4 - 0.9, 0.25 + 0.16 + 0.81])
    told(controller, [0.8, 0.5], 2)  # none was rejected
    assert controller._errors == pytest.approx([5, -0.5 + 0.2 + 0.5, 1.22 + 0.04 + 0.25])
    told(controller, [], 0)  # no room to draft: nothing was judged
    assert controller._errors[0] == 5
    controller.begin([1], None)
    assert controller.posterior() == (0.0, 0.5)


def test_what_it_learns_shortens_the_chains_of_a_drafter_that_promises_too_much():
    lengths = []
    for accepted in (0, 4):
        controller = CalibratedLength(8, seed=1)
        for _ in range(60):
            told(controller, [0.7] * 4, accepted)
        draws = [np.array(controller.choose([0], None).least) <= 0.7 for _ in range(200)]
        lengths.append(np.mean([1 + np.cumprod(on).sum() for on in draws]))
    assert lengths[0] < 1.3 and lengths[1] > 7


def test_it_changes_no_text_and_one_token_is_drafted_at_least():
    target, drafter = TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER)
    answer = Decoder(target, drafter, CalibratedLength(3, seed=1)).generate([0, 2], 40)
    assert answer.tokens == Decoder(target, None, Static.empty()).generate([0, 2], 40).tokens
    assert {step.tree.nodes for step in answer.steps[:-1]} >= {1, 2, 3}
    twice = Decoder(target, drafter, CalibratedLength(3, seed=1)).generate([0, 2], 40)
    assert [step.tree.nodes for step in twice.steps] == [step.tree.nodes for step in answer.steps]
