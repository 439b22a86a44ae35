"""Draws against the target's law: right verifiers pass, wrong ones do not, and the command says which is which."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from enumeration import target_law
from scipy.stats import chisquare
from statistical import draws
from statistical.draws import CASES, Case, draw, p_value
from table_models import hashed_laws
from tiny_models import tiny, tiny_drafter

from opt_tree import Sampling
from opt_tree.methods.children.iid import IID
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.rules import Probs, computes
from opt_tree.methods.verifiers.walks import walk_down
from opt_tree.verify import valid_for

VOCAB = 6
TARGET, DRAFTER = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)
WRONG = [name for name, case in CASES.items() if not case.lossless]


def without_residual(target: Probs, draft: Probs, tokens: np.ndarray) -> Probs:
    """What many a first implementation does: behind a rejection it draws from p instead of norm(p - q)+."""
    accepted = min(1.0, target[tokens[0]] / draft[tokens[0]])
    return accepted * np.eye(len(target))[tokens[0]] + (1 - accepted) * target


@valid_for(IID)
@computes(branching=without_residual)
def forgetful(tree, scores, random):  # type: ignore[no-untyped-def]
    return walk_down(tree, scores, random, without_residual)


FORGETFUL = Case(forgetful, Sampled.chain(2))


def p_value_from_tables(case: Case, count: int) -> float:
    return p_value(draw(case, (TARGET, DRAFTER), [0], count, Sampling(1.0)), target_law(TARGET, (0,), 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["match", "block", "without_replacement"])
def test_lossless_verifiers_pass(name: str) -> None:
    assert p_value_from_tables(CASES[name], 200) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", [FORGETFUL, *(CASES[name] for name in WRONG)], ids=["forgetful", *WRONG])
def test_wrong_ones_do_not(case: Case) -> None:
    assert p_value_from_tables(case, 300) < 1e-6


def test_texts_that_expect_few_draws_share_a_cell() -> None:
    law = {(0, 0): 0.5, (0, 1): 0.3, (1, 0): 0.16, (1, 1): 0.03, (2, 2): 0.01}
    drawn = Counter({(0, 0): 60, (0, 1): 20, (1, 0): 17, (1, 1): 3})  # four expected draws of the last two together
    assert p_value(drawn, law) == pytest.approx(chisquare([60, 20, 20], [50, 30, 20]).pvalue)
    twice = Counter({text: 2 * count for text, count in drawn.items()})  # eight
    assert p_value(twice, law) == pytest.approx(chisquare([120, 40, 34, 6], [100, 60, 32, 8]).pvalue)
    assert p_value(Counter({(0, 0): 50, (0, 1): 49, (3, 3): 1}), {(0, 0): 0.5, (0, 1): 0.5}) == 0, "impossible"
    with pytest.raises(ValueError, match="6 draws over 2 texts"):
        p_value(Counter({(0, 0): 6}), {(0, 0): 0.5, (0, 1): 0.5})


@pytest.mark.slow
def test_the_command_tells_right_from_wrong(capsys, monkeypatch) -> None:
    models = iter([SimpleNamespace(model=tiny("llama")), SimpleNamespace(model=tiny_drafter("llama"))])
    pair = SimpleNamespace(target=next(models), drafter=SimpleNamespace(models=[next(models)]), encode=lambda _: [3, 1])
    monkeypatch.setattr(draws, "load_pair", lambda *_, **__: pair)
    monkeypatch.setattr(draws, "SAMPLING", Sampling(2.0, top_k=3))
    asked = ["--draws", "60", "--verifiers"]
    assert draws.main([*asked, "match,mismatched"]) == 0
    assert capsys.readouterr().out.count("as it should be") == 2
    monkeypatch.setitem(CASES, "naive", replace(CASES["mismatched"], lossless=True))
    monkeypatch.setitem(CASES, "block", replace(CASES["match"], lossless=False))
    assert draws.main([*asked, "naive,block"]) == 1
    said = capsys.readouterr().out
    assert "BIASED" in said and "NOT NOTICED" in said
