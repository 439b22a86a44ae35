"""What is advised, from texts and given costs: no clock."""

import dataclasses
import json

import numpy as np
import pytest

import opt_tree
from opt_tree import Decoder, OptTree, load_pair
from opt_tree.methods.policies.costs import Costs
from opt_tree.tools import advising
from opt_tree.tools.advising import break_even, grid, weigh
from opt_tree.tools.along import along
from opt_tree.tools.cost_files import read_costs
from opt_tree.tools.display.advice import draw_advice
from opt_tree.tools.stored_text import written
from opt_tree.training import advise as command

CHEAP = Costs.straight(plain=5e-3, step=5e-3, row=1e-4, layer=1e-4, draft_row=0)
DEAR = Costs.straight(plain=5e-3, step=5e-3, row=1e-3, layer=2e-2, draft_row=1e-4)
PROMPTS = ["Why is the sky blue?", "Name three colours."]


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", dtype="float32")


@pytest.fixture(scope="module")
def texts(pair):
    return [written(pair.target, pair.encode(prompt), 16, pair.stop) for prompt in PROMPTS]


def walked(pair, texts, policy):
    return [along(pair.drafter, text, {"it": policy}, pair.target)["it"] for text in texts]


@pytest.fixture(scope="module")
def found(pair, texts):
    return weigh(pair, texts, {"here": CHEAP, "dear": DEAR})


FEW = {"Static.chain(3)": opt_tree.Static.chain(3), "OptTree(2, 0.3)": OptTree(2, 0.3)}
"""A grid where the settings do not matter."""


@pytest.fixture(scope="module")
def refused(pair, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advising, "grid", lambda: FEW)
        return weigh(pair, texts, {"here": DEAR})


@pytest.mark.slow
def test_the_best_tree_is_that_of_the_cheapest_decoding(pair, texts, found):
    """The grid's seconds are those of decoding with each setting, steps priced by the same table."""
    few = {name: policy for name, policy in grid().items() if name in (found.here.best.name, "OptTree(2, 0.3)")}
    plain = sum(CHEAP.of_all(one) for one in walked(pair, texts, opt_tree.Static.empty()))
    for name, policy in few.items():
        decoder = Decoder(pair.target, pair.drafter, policy)
        decoded = [decoder.generate(text.prompt, 16, stop=pair.stop) for text in texts]
        assert [one.tokens for one in decoded] == [text.tokens for text in texts]
        assert plain / sum(map(CHEAP.of_all, decoded)) == pytest.approx(found.here.grid[name], rel=0.02)
    assert found.here.best.speed_up == max(rate for name, rate in found.here.grid.items() if name != "auto")
    assert found.use and found.verdict.startswith("Use it: with") and found.tokens == sum(len(t.tokens) for t in texts)
    assert found.here.best.low <= found.here.best.speed_up <= found.here.best.high
    assert found.prospects["dear"].best.speed_up < 1 and found.prospects["dear"].emitted < found.prospects["dear"].step


@pytest.mark.slow
def test_do_not_use_it_where_its_layers_cost_more_than_they_bring(refused):
    verdict = refused.verdict
    assert refused.use is False and verdict.startswith("Do not use this drafter here") and "\n" not in verdict
    assert refused.here.auto.speed_up <= 1 and refused.here.break_even is None
    assert verdict in str(refused) and json.dumps(refused.to_dict())
    assert f"; {refused.texts} texts of 1 token, greedy" in str(dataclasses.replace(refused, tokens=1))
    assert "the first layer 20.10, each further one of 5 rows 20.50" in str(refused)


def test_break_even_is_where_the_best_chain_is_as_fast_as_plain_decoding():
    costs = Costs.straight(plain=1.0, step=1.0, row=0.0, layer=0.5, draft_row=0.0)
    assert break_even(costs) == pytest.approx(0.5, abs=1e-6)  # a chain of one: 1 + a tokens for 1.5 seconds
    costs = Costs(((1, 1.0), (2, 1.0)), 0.5, ((1, 0.1), (2, 0.2)))  # longer chains are better
    share = break_even(costs)
    chains = [sum(share**i for i in range(k + 1)) / (costs.score(k + 1) + costs.draft(k, k - 1)) for k in range(1, 17)]
    assert max(chains) == pytest.approx(1) and chains[0] < 0.99
    assert break_even(Costs.straight(1.0, 1.0, 0.0, 1.5, 0.0)) is None


def test_what_a_walk_costs(pair, texts):
    """The root reads two tokens, each layer of a chain one more; every step is paid behind the text so far."""
    (plainly,) = walked(pair, texts[:1], opt_tree.Static.empty())
    contexts = len(plainly.prompt) + np.arange(len(plainly.tokens))
    growing = Costs.straight(plain=1.0, step=1.0, row=0.0, layer=0.0, draft_row=0.0, growth=0.5)
    assert growing.of_all(plainly) == pytest.approx((1 + 0.5 * contexts).sum())
    (chain,) = walked(pair, texts[:1], opt_tree.Static.chain(3))
    assert (chain.steps[0].draft_forwards, chain.steps[0].draft_tokens) == (3, 2 + 1 + 1)


@pytest.mark.slow
def test_accepted_by_position_is_counted(pair, texts, found):
    generations = walked(pair, texts, grid()[found.here.best.name])
    steps = [step.accepted for one in generations for step in one.steps[:-1]]
    assert found.accepted[0] == pytest.approx(np.mean([accepted >= 1 for accepted in steps]))
    assert sum(found.accepted) == pytest.approx(np.mean(steps)) == pytest.approx(np.mean(found.found))


def test_costs_of_another_machine_are_read(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(dataclasses.asdict(CHEAP)))
    assert read_costs(path) == {"gpu": CHEAP}
    path.write_text(json.dumps({"a": dataclasses.asdict(CHEAP), "b": dataclasses.asdict(DEAR)}))
    assert read_costs(path) == {"a": CHEAP, "b": DEAR}
    for bad in ("no json", "[]", '{"alpha_seconds": [1]}', '{"scoring": [[2, 1]], "first": 0, "drafting": [[1, 0]]}'):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"gpu\.json"):
            read_costs(path)


@pytest.mark.slow
def test_the_command_and_its_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advising, "costs_of", lambda target, drafter, lanes=1: CHEAP)
    monkeypatch.setattr(advising, "grid", lambda: FEW)
    asked = tmp_path / "mine.txt"
    asked.write_text("\n".join(PROMPTS))
    few = ["--prompts", str(asked), "--max-new-tokens", "8", "--plots", str(tmp_path / "plots"), "--json"]
    assert command.main(["demo", *few]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["texts"] == 2 and figures["prospects"].keys() == {"here", "8 side by side"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        f"{name}.{kind}" for name in ("costs", "accepted") for kind in ("png", "svg")
    }


def test_mistakes_are_one_line(pair, capsys, tmp_path):
    with pytest.raises(ValueError, match="2 prompts at least, got 1"):
        opt_tree.advise(pair, ["one"])
    with pytest.raises(ValueError, match="2 prompts at least"):
        opt_tree.advise(pair, "one text")
    (tmp_path / "empty.jsonl").write_text("")
    for wrong in (["--prompts", str(tmp_path / "none.txt")], ["--prompts", str(tmp_path / "empty.jsonl")], ["nosuch"]):
        assert command.main([*wrong, "--limit", "2"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_draw_needs_few_steps(refused, tmp_path):
    few = dataclasses.replace(refused, expected=[0.5], found=[1], accepted=[1.0])
    assert len(draw_advice(few, tmp_path)) == 2
    assert OptTree(1, 0.05) == grid()["OptTree(1, 0.05)"]
