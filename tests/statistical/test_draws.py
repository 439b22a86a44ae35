"""Draws against the target's law: that memoised models change nothing, the test itself, and the command."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Laws, TableDrafter, TableTarget, hashed_laws
from enumeration import unchecked
from scipy.stats import chisquare
from tiny_models import causal_logits, prompt, save_pair, tiny, tiny_drafter, tiny_head

from opt_tree import CausalLM, CausalLMDrafter, Drafter, EagleDrafter, Sampling
from opt_tree.core.children import IID
from opt_tree.policies import Sampled
from opt_tree.verifiers import valid_for
from opt_tree.verifiers.base import Probs, walk_down
from tests.statistical import draws
from tests.statistical.chi_square import Text, cells, fit
from tests.statistical.draws import CASES, Case, Draws, draw, target_probs
from tests.statistical.memoised import MemoisedDrafter, MemoisedTarget

CONTEXT = [0]
VOCAB = 6
TARGET, DRAFTER = hashed_laws(1, VOCAB), hashed_laws(2, VOCAB)
WRONG = [name for name, case in CASES.items() if not case.lossless]


def without_residual(target: Probs, draft: Probs, tokens: np.ndarray) -> Probs:
    """What many a first implementation does: behind a rejection it draws from p instead of norm(p - q)+."""
    accepted = min(1.0, target[tokens[0]] / draft[tokens[0]])
    return accepted * np.eye(len(target))[tokens[0]] + (1 - accepted) * target


@valid_for(IID, branching=without_residual)
def forgetful(tree, scores, random):  # type: ignore[no-untyped-def]
    return walk_down(tree, scores, random, without_residual)


FORGETFUL = Case(forgetful, Sampled.chain(2))


def table_probs(laws: Laws) -> dict[Text, float]:
    """The law of two tokens behind the context."""
    first = laws((*CONTEXT,))
    return {(a, b): first[a] * laws((*CONTEXT, a))[b] for a in range(VOCAB) for b in range(VOCAB)}


def from_tables(case: Case, count: int) -> Draws:
    with unchecked():
        return draw(case, TableTarget(TARGET, VOCAB), TableDrafter(DRAFTER), CONTEXT, Sampling(1.0), range(count))


@pytest.mark.parametrize("name", ["match", "block", "without_replacement"])
def test_lossless_verifiers_pass(name: str) -> None:
    drawn = from_tables(CASES[name], 200)
    assert fit(drawn.texts, table_probs(TARGET)).p_value > 1e-4
    assert drawn.texts.total() == drawn.accepted.total() == 200
    assert min(drawn.accepted[accepted] for accepted in (0, 1, 2)) > 0


@pytest.mark.parametrize("case", [FORGETFUL, *(CASES[name] for name in WRONG)], ids=["forgetful", *WRONG])
def test_wrong_ones_do_not(case: Case) -> None:
    assert fit(from_tables(case, 300).texts, table_probs(TARGET)).p_value < 1e-6


def causal(target: CausalLM) -> Drafter:
    return CausalLMDrafter(CausalLM(tiny_drafter("llama")))


def eagle(target: CausalLM) -> Drafter:
    return EagleDrafter(tiny_head(tiny("llama")), target)


@pytest.mark.parametrize(("make", "context"), [(causal, prompt(7)), (causal, [5]), (eagle, prompt(7))])
def test_memoised_models_give_the_same_draws(make: Callable[[CausalLM], Drafter], context: list[int]) -> None:
    """Seed for seed. One memory serves all cases, as in the command, and is asked for every seed twice."""
    target = CausalLM(tiny("llama"))
    drafter, sampling = make(target), Sampling(0.7, top_k=5)
    memoised = MemoisedTarget(target), MemoisedDrafter(drafter, target)
    with unchecked():
        for name in ("match", "without_replacement", "traversal", "rheo"):
            real = [draw(CASES[name], target, drafter, context, sampling, range(i, i + 1)) for i in range(3)]
            for _ in range(2):
                work = target.work, drafter.work
                assert [draw(CASES[name], *memoised, context, sampling, range(i, i + 1)) for i in range(3)] == real
        assert (target.work, drafter.work) == work, "the second time nothing runs"
    assert len({text for drawn in real for text in drawn.texts}) > 1


def test_the_probabilities_are_those_of_plain_forwards() -> None:
    context, model, sampling = prompt(5), tiny("llama"), Sampling(0.8, top_k=3)
    law = target_probs(CausalLM(model), context, sampling)
    assert len(law) == 9 and sum(law.values()) == pytest.approx(1)
    for (one, two), probability in law.items():
        expected = 1.0
        for token, logits in zip((one, two), causal_logits(model, [*context, one])[-2:].numpy(), strict=True):
            kept = np.sort(logits)[-3:]
            expected *= np.exp(logits[token] / 0.8) / np.exp(kept / 0.8).sum()
        assert probability == pytest.approx(expected, rel=1e-9)


def test_the_statistic_is_pearsons() -> None:
    law = {(0, 0): 0.5, (0, 1): 0.3, (1, 0): 0.16, (1, 1): 0.03, (2, 2): 0.01}
    drawn = Counter({(0, 0): 60, (0, 1): 20, (1, 0): 17, (1, 1): 3})
    # Three and one expected draws are too few even together, and join the cell of 16; of 200 draws they make one.
    assert cells(law, 100) == [[(0, 0)], [(0, 1)], [(1, 0), (1, 1), (2, 2)]]
    assert cells(law, 150) == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1), (2, 2)]]
    expected = chisquare([60, 20, 20], [50, 30, 20])
    found = fit(drawn, law)
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert (found.cells, found.impossible) == (3, 0)


def test_one_impossible_draw_refutes_a_law() -> None:
    found = fit(Counter({(0, 0): 50, (0, 1): 49, (3, 3): 1}), {(0, 0): 0.5, (0, 1): 0.5})
    assert (found.impossible, found.p_value) == (1, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its drafter."""
    return save_pair(tmp_path_factory.mktemp("pair"))


def command(folder: Path, *more: str) -> int:
    models = f"--base-model-path {folder}/target --draft-model-path {folder}/draft --prompt hcgafb"
    with unchecked():
        return draws.main(
            [*f"{models} --draws 150 --temperature 2 --top-k 3".split(), "--output", f"{folder}/draws.json", *more]
        )


def test_the_command_tells_right_from_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(folder, "--verifiers", "match,mismatched") == 0
    printed = capsys.readouterr().out
    document = json.loads((folder / "draws.json").read_text())
    right, wrong = document["results"]
    assert right["p_value"] > 0.001 == document["level"] > wrong["p_value"]
    assert sum(right["accepted"].values()) == 150 and document["texts"] == 9
    assert "agrees" in printed and "refuted" in printed


@pytest.mark.parametrize(
    ("case", "said"),
    [(replace(CASES["mismatched"], lossless=True), "BIASED"), (replace(CASES["match"], lossless=False), "MISSED")],
)
def test_the_command_fails_where_a_verdict_is_not_the_expected_one(folder, capsys, monkeypatch, case, said):
    monkeypatch.setitem(CASES, "naive", case)
    assert command(folder, "--verifiers", "naive") == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--verifiers", "match,nss"], "unknown verifiers nss"),
        (["--draws", "0"], "got 0 and 2"),
        (["--draws", "6"], "6 draws over 9 texts"),
        (["--top-k", "1"], "150 draws over 1 texts"),
        (["--temperature", "0"], "got 150 and 0"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--prompt", "aa" * 255], "no room for two in 256"),
        (["--output", "absent/folder/a.json"], "no folder absent/folder"),
        (["--base-model-path", "absent"], "absent"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: str) -> None:
    assert command(folder, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error
