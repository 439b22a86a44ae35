"""The tree for this machine: prices decide, nothing is lost, and what steps cost is measured once."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from asking import tiny_lm_drafter, tiny_target
from table_models import TableDrafter, TableTarget, hashed_laws, written_laws
from tiny_models import ARCHITECTURES, build, prompt, tiny_drafter

from evaluation.command_line import parse
from evaluation.demo.__main__ import Options as Demo
from evaluation.run.options import Options as Run
from experiments.controllers import CONTROLLERS
from experiments.controllers import main as compare_controllers
from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree, Sampling, Static, generate_batch
from opt_tree.backends.batch import shared_forwards as batch
from opt_tree.children import LogProbs
from opt_tree.methods.controllers.auto import PATIENCE, Auto
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.priced import KNOTS, Priced
from opt_tree.pool import CandidatePool
from opt_tree.tools import step_costs as pricing
from opt_tree.tools.presets import plain
from opt_tree.tools.step_costs import Timed, costs_of, fit

EAGER = Costs.straight(plain=5.4e-3, step=5.5e-3, row=1e-4, layer=1e-3, draft_row=3e-5, growth=3e-4, draft_growth=2e-4)
COMPILED = Costs.straight(plain=1.9e-3, step=2e-3, row=7e-5, layer=5.5e-4, draft_row=2e-5)
POOR = Costs.straight(plain=5e-3, step=5e-3, row=8e-4, layer=8e-3, draft_row=1e-4)


def tiny_pair() -> tuple[CausalLM, CausalLMDrafter]:
    return tiny_target(), tiny_lm_drafter()


def layer(*probs: float) -> LogProbs:
    return LogProbs(torch.tensor([probs], dtype=torch.float64).log(), torch.arange(len(probs))[None])


def test_nodes_and_layers_earn_their_price():
    """rate 100: a row costs .1 tokens, a layer .2; the second layer is expected to bring .7 * (.5 + .2)."""
    costs = Costs.straight(plain=1e-2, step=1e-2, row=1e-3, layer=2e-3, draft_row=0)
    policy = Priced(costs, rate=100.0)
    pool = CandidatePool(0, policy.children)
    pool.add(layer(0.6, 0.3, 0.08))
    assert policy.expand(pool).tolist() == [1, 2]
    assert policy.select(pool).tolist() == [0, 1, 2]
    assert policy.surplus(pool.path_log_probs[1:]) == pytest.approx([0.5, 0.2, -0.02])
    dear = Priced(Costs.straight(plain=1e-2, step=1e-2, row=1e-3, layer=5e-3, draft_row=0), rate=100.0)
    assert dear.expand(pool) is None
    # .49 of expected surplus do not pay for scoring: 100 * (.018 - .01) tokens.
    slow = Priced(Costs.straight(plain=1e-2, step=1.7e-2, row=1e-3, layer=2e-3, draft_row=0), rate=100.0)
    assert slow.select(pool).tolist() == [0]
    # Behind a long context a row costs more.
    costs = Costs.straight(1e-2, 0.9e-2, 1e-3, 2e-3, 0.0, growth=0.01)
    grown = Priced(costs, rate=100.0, now=costs.at(250))
    assert grown.select(pool).tolist() == [0, 1]


def test_calibration_is_a_rising_map_of_probabilities():
    halved = tuple(min(knot - np.log(2), 0) for knot in KNOTS)
    policy = Priced(EAGER, rate=0.0, trust=halved)
    logs = np.log([1.0, 0.5, 0.01, 1e-9, 0.0001])
    assert policy.surplus(logs) == pytest.approx(np.exp(logs) / 2)
    assert np.isfinite(policy.surplus(np.array([-np.inf]))).all()


def modelled(costs: Costs, policy, laws: tuple) -> float:
    """Tokens a modelled second of decoding 300 tokens of a language of tables at temperature 1."""
    decoder = Decoder(TableTarget(laws[0], 12), TableDrafter(laws[1]), policy)
    seconds, context = 0.0, 1
    for step in decoder.steps([1], 300, Sampling(1.0)):
        seconds += costs.at(context).of(step)
        context += len(step.tokens)
    return (context - 1) / seconds


@pytest.mark.slow
@pytest.mark.parametrize("costs", [EAGER, COMPILED, POOR], ids=["eager", "compiled", "poor"])
def test_it_is_about_as_good_as_the_best_fixed_setting(costs):
    """By modelled seconds, so that the comparison is exact; learning included, the best chosen afterwards."""
    table = np.random.default_rng(4).dirichlet(np.full(12, 0.15), 12)
    laws = (lambda path: table[path[-1]],) * 2
    grid = [Static.empty(), OptTree(3, 0.8), OptTree(9, 0.45), OptTree(9, 0.8), OptTree(24, 0.45)]
    rates = [modelled(costs, policy, laws) for policy in grid]
    assert max(rates) > 1.15 * min(rates)
    assert modelled(costs, Auto(costs), laws) >= 0.95 * max(rates)


@pytest.mark.slow
def test_a_useless_drafter_is_left_alone():
    """It is tried ever more seldom, and decoding is plain decoding."""
    laws = written_laws({(): (1.0, 0.0, 0.0)}), written_laws({(): (0.0, 0.9, 0.1)})
    auto = Auto(EAGER)
    decoder = Decoder(TableTarget(laws[0], 3), TableDrafter(laws[1]), auto)
    sizes = [step.tree.nodes for step in decoder.steps([0], 500)]
    assert sizes[0] > 0 and sum(size > 0 for size in sizes[250:]) <= 250 / PATIENCE[1] + 1


@pytest.mark.slow
def test_it_comes_back_when_drafting_pays_again():
    told = {(): (0.0, 1.0, 0.0)}
    auto = Auto(EAGER)
    wrong = TableDrafter(written_laws({(): (1.0, 0.0, 0.0)}))
    list(Decoder(TableTarget(written_laws(told), 3), wrong, auto).steps([0], 120))
    right = TableDrafter(written_laws(told))
    sizes = [step.tree.nodes for step in Decoder(TableTarget(written_laws(told), 3), right, auto).steps([0], 600)]
    assert sizes[0] == 0 and np.mean(sizes[-20:]) > 2


def test_the_same_text_by_the_same_trees_however_busy_the_machine_is():
    target, drafter = tiny_pair()
    runs = [Decoder(target, drafter, Auto(EAGER, 12)).generate(prompt(9), 24) for _ in range(2)]
    assert runs[0].tokens == plain(target).generate(prompt(9), 24).tokens
    assert [s.tree.nodes for s in runs[0].steps] == [s.tree.nodes for s in runs[1].steps]
    assert 0 < max(step.tree.nodes for step in runs[0].steps) <= 12
    sampled = Decoder(target, drafter, Auto(EAGER)).generate(prompt(9), 14, Sampling(0.9), seed=3)
    assert sampled.tokens == plain(target).generate(prompt(9), 14, Sampling(0.9), seed=3).tokens


def test_costs_are_fitted():
    """Steps of known costs, some of them disturbed: medians give back what made them, a cliff in rows included."""
    true = Costs(((1, 5e-3), (6, 6e-3), (7, 9e-3), (9, 10e-3)), 1e-3, ((1, 5e-4), (6, 9e-4)), 3e-4, 2e-4)
    steps = []
    for rows, frontier in ((1, 0), (2, 1), (6, 3), (7, 5), (9, 6)):
        for turn in range(11):
            context = (40 if turn % 2 else 400) + turn
            now, late = true.at(context), 3.0 if turn in (4, 7) else 1.0
            layers = tuple((k, float(now.layers(k)[-1]) * late) for k in range(1, frontier + 1))
            steps.append(Timed(context, rows, now.score(rows) * late, now.draft(1, 1) * late, layers))
    found = fit(steps)
    assert found.growth == pytest.approx(true.growth, rel=0.1)
    assert found.draft_growth == pytest.approx(true.draft_growth, rel=0.1)
    assert found.first == pytest.approx(true.first, rel=0.02)
    assert found.scores(9)[[0, 1, 5, 6, 8]] == pytest.approx(true.scores(9)[[0, 1, 5, 6, 8]], rel=0.02)
    assert found.layers(6) == pytest.approx(true.layers(6), rel=0.02)
    slower = [Timed(40, rows, seconds) for rows, seconds in ((1, 2.0), (2, 1.0), (3, 3.0))]
    assert fit(slower).scoring == ((1, 1.5), (2, 1.5), (3, 3.0))  # one of each may be noise
    faster = [
        Timed(40, rows, seconds + wobble) for rows, seconds in ((1, 2.0), (2, 1.0), (3, 3.0)) for wobble in (0, 0.02)
    ]
    assert dict(fit(faster * 4).scoring) == pytest.approx({1: 2.0, 2: 1.0, 3: 3.0}, rel=0.02)


def test_a_curve_is_asked_between_and_behind_its_points():
    costs = Costs(((1, 1.0), (3, 2.0), (5, 6.0), (9, 8.0)), 0.5, ((2, 1.0), (4, 2.0)), growth=0.5)
    assert costs.scores(6).tolist() == [1, 1.5, 2, 4, 6, 6.5]
    assert costs.score(11) == 9.0  # as between the last two points
    assert costs.at(2).score(3) == 4.0 and costs.at(2).plain == 2.0
    assert costs.layers(5).tolist() == [1, 1, 1.5, 2, 2.5]
    assert [costs.draft(*asked) for asked in ((0, 0), (1, 9), (2, 3), (3, 7), (3, 0))] == [0, 0.5, 2.0, 4.0, 2.5]
    assert Costs.read(json.loads(json.dumps(dataclasses.asdict(costs)))) == costs
    line = Costs.straight(1.0, 2.0, 0.5, 3.0, 0.25)
    assert (line.score(1), line.score(9), line.row) == (1.0, 6.5, 0.5)
    assert line.draft(3, 6) == pytest.approx(3 * 3.0 + 0.25 * 7)


def test_a_tree_stops_before_a_cliff():
    """The third row costs as much as ten others: two nodes more are worth it only together with the third."""
    pool = CandidatePool(0, Priced(EAGER).children)
    pool.add(layer(0.5, 0.2, 0.15, 0.1))
    cliff = Costs(((1, 1.0), (2, 1.1), (3, 1.5), (5, 1.51)), 0.0, ((1, 1.0),))
    assert [Priced(cliff, rate=rate).select(pool).tolist() for rate in (1.5, 1.0, 0.4)] == [
        [0, 1],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    assert Priced(Costs(((1, 1.0), (2, 2.0)), 0.0, ((1, 1.0),)), rate=1.0).select(pool).tolist() == [0]


def test_a_child_earns_what_is_beyond_the_node_that_it_pushes_out():
    """Three nodes are free, a further one costs .1 tokens; that, or the last node, is what one more child is up to."""
    costs = Costs(((1, 1.0), (4, 1.0), (5, 2.0), (40, 37.0)), 0.0, ((1, 0.01),))
    policy = Priced(costs, rate=0.1)
    for probs, price in (((0.5, 0.3), 0.0), ((0.5, 0.3, 0.08, 0.05), 0.08), ((0.4, 0.3, 0.2, 0.05), 0.1)):
        pool = CandidatePool(0, policy.children)
        pool.add(layer(*probs))
        assert policy._row_now(pool) == pytest.approx(price)
    # .4 .3 .2 bring .7 * (.9 - .3) beyond the fourth row, and .7 * (.9 - 3 * 13 / 150) beyond rows of a small tree.
    for seconds, rows in ((4.0, [1, 2, 3]), (4.3, None)):
        found = Priced(Costs(costs.scoring, 0.0, ((1, seconds),)), rate=0.1).expand(pool)
        assert (None if found is None else found.tolist()) == rows


@pytest.mark.slow
def test_costs_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path))
    monkeypatch.setattr(pricing, "ROUNDS", 3)
    target, drafter = tiny_pair()
    costs = costs_of(target, drafter)
    assert costs.plain > 0 and costs.first + costs.layers(1)[0] > 0 and costs.score(9) > 0  # no clock fails a test
    (kept,) = tmp_path.iterdir()
    assert Costs.read(json.loads(kept.read_text())) == costs
    monkeypatch.setattr(pricing, "measure_costs", lambda *_: pytest.fail("measured again"))
    assert costs_of(target, drafter) == costs
    monkeypatch.setattr(pricing, "measure_costs", lambda *_: COMPILED)
    kept.write_text("{")  # damaged
    assert costs_of(target, drafter) == COMPILED and costs_of(target, drafter) == COMPILED
    other = CausalLMDrafter(CausalLM(copy.deepcopy(tiny_drafter("llama")).float()))
    assert pricing._facts(target, other) != pricing._facts(target, drafter)


def test_packed_weights_have_costs_of_their_own():
    target = CausalLM(build(ARCHITECTURES["llama"]()).bfloat16())
    if not target.eager.packed:
        pytest.skip("this CPU packs no bfloat16")
    drafter = tiny_lm_drafter()
    packed = pricing._facts(target, drafter)
    target.pack(False)
    assert pricing._facts(target, drafter) != packed


def costs_in_lanes(costs: Costs, lanes: int) -> Costs:
    """What a batch's step costs whose forwards hold the rows of all lanes, where one lane's cost these."""
    rows = range(1, 65)
    scoring = tuple((n, costs.score(n * lanes)) for n in rows)
    return Costs(scoring, costs.layers(lanes)[-1], tuple((n, costs.layers(n * lanes)[-1]) for n in rows))


def test_a_batch_is_decoded_by_its_own_costs():
    """Nodes that pay for the rows of all lanes are fewer; each lane learns for itself, from the decoder's own."""
    table = np.random.default_rng(4).dirichlet(np.full(12, 0.15), 12)
    laws = (lambda path: table[path[-1]],) * 2
    auto = Auto(costs_in_lanes(EAGER, 3))
    plainly, fixed, priced = (
        generate_batch(Decoder(TableTarget(laws[0], 12), TableDrafter(laws[1]), policy), [[1], [2], [3]], 60, width=8)
        for policy in (Static.empty(), Auto(EAGER), auto)
    )
    assert auto.rate == Auto(costs_in_lanes(EAGER, 3)).rate  # the decoder's own is as it was
    assert [one.tokens for one in fixed] == [one.tokens for one in priced] == [one.tokens for one in plainly]
    nodes = [sum(step.tree.nodes for one in answers for step in one.steps) for answers in (fixed, priced)]
    assert nodes[1] < nodes[0]
    alone = Decoder(TableTarget(laws[0], 12), TableDrafter(laws[1]), Auto(costs_in_lanes(EAGER, 3))).generate([1], 60)
    assert [step.tree.nodes for step in alone.steps] == [step.tree.nodes for step in priced[0].steps]


@pytest.mark.slow
def test_what_a_batch_costs_is_measured_in_a_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path))
    monkeypatch.setattr(pricing, "ROUNDS", 1)
    monkeypatch.setattr(pricing, "SIZES", (0, 1, 2, 4))
    monkeypatch.setattr(pricing, "CONTEXTS", (8,))
    packed: list[int] = []
    run = batch.SharedModel.run
    monkeypatch.setattr(batch.SharedModel, "run", lambda self, asked: packed.append(len(asked)) or run(self, asked))
    target, drafter = tiny_pair()
    alone = costs_of(target, drafter)
    assert not packed
    assert pricing.auto(target, drafter).costs == alone
    assert pricing.auto(target, drafter, lanes=3).costs == costs_of(target, drafter, 3) != alone
    assert set(packed) == {3} and len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def timed(monkeypatch) -> Callable[..., list[Timed]]:
    """Set what `pricing` measures by, clocks by how long a look at each takes; returns the list of what is timed."""

    def begin(perf_counter: float | None = None, process_time: float | None = None, **settings: Any) -> list[Timed]:
        steps: list[Timed] = []
        for name, value in settings.items():
            monkeypatch.setattr(pricing, name, value)
        for name, seconds in (("perf_counter", perf_counter), ("process_time", process_time)):
            if seconds:
                clock = itertools.count(0.0, seconds)
                monkeypatch.setattr(pricing.time, name, lambda clock=clock: next(clock))
        monkeypatch.setattr(pricing, "fit", lambda found: steps.extend(found) or fit(found))
        return steps

    return begin


@pytest.mark.slow
def test_a_table_is_measured_layer_by_layer_and_learns_nothing_by_it(timed):
    steps = timed(ROUNDS=3)
    target = tiny_target()
    table = TokenRecycling(target.vocab)
    pricing.measure_costs(target, table)
    grown = [step for step in steps if step.rows > 9]
    assert grown and all(0 < len(step.layers) <= pricing.DEPTH and step.layers[0][0] > 0 for step in grown)
    assert (table.table < 0).all() and table.rates.tolist() == TokenRecycling(target.vocab).rates.tolist()


def test_costs_are_measured_where_texts_are(timed, monkeypatch):
    """Each size once a round behind either context, whose text does not run away; no moment of a step is left out."""
    target, drafter = tiny_pair()
    target.max_context = drafter.max_context = 300
    steps = timed(1, ROUNDS=2, CONTEXTS=(8, 40), SIZES=(0, 2, 4), SECONDS=10.0**6)
    monkeypatch.setattr(pricing.time, "process_time", pricing.time.perf_counter)  # a look at either is a second
    pricing.measure_costs(target, drafter)
    assert [step.rows for step in steps] == 2 * [5, 3, 1] + 2 * [1, 3, 5]
    assert [step.context < 40 for step in steps] == 2 * (3 * [True] + 3 * [False])
    # From the end of the draft on: of a tree two looks at the judge and the cache, and those of the forward within.
    assert all(step.scoring >= 3 and (step.first > 0) == (step.rows > 1) for step in steps)


@pytest.mark.parametrize(("seconds", "rows"), [(0.5, [1, 2, 1, 2]), (200.0, None)])
def test_a_large_model_is_measured_in_the_time_there_is(timed, seconds, rows):
    """The beginning of a round tells enough: plain decoding and small trees. No step is begun behind the time's end."""
    steps = timed(1, CONTEXTS=(8, 16), SECONDS=seconds)
    costs = pricing.measure_costs(*tiny_pair())
    assert costs.plain > 0 and costs.score(65) >= costs.plain
    found = [step.rows for step in steps]
    assert found == rows if rows else 3 < max(found) < 65 and found.count(1) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_neighbours_turns_belong_to_no_step(timed, monkeypatch, threads):
    """Of one thread, that is; several wait for each other, and their seconds are the clock's."""
    monkeypatch.setattr(pricing.torch, "get_num_threads", lambda: threads)
    steps = timed(1000, 1, CONTEXTS=(8,), ROUNDS=0, SECONDS=10.0**6)
    pricing.measure_costs(*tiny_pair())
    parts = [(step.scoring, step.first, *(taken for _, taken in step.layers)) for step in steps]
    assert len(steps) == len(pricing.SIZES) and all(one[0] > 0 and (one[1] > 0) == (len(one) > 2) for one in parts[2:])
    assert all((max(one) < 100) == (threads == 1) for one in parts)


def test_a_policy_with_what_was_learned_is_the_same_one():
    """So that a decoder takes it for the one that it has checked."""
    learned = {"rate": 100.0, "trust": tuple(0.5 * knot for knot in KNOTS), "carry": (0.2, 0.9)}
    one, two = Priced(EAGER, 12), Priced(EAGER, 12, now=EAGER.at(70), **learned)
    pool = CandidatePool(0, one.children)
    pool.add(layer(0.4, 0.2, 0.15, 0.1, 1e-6))
    assert two == one and two.children == one.children and two.select(pool).tolist() != one.select(pool).tolist()


def test_the_largest_tree_that_costs_are_known_of_is_drafted():
    laws = hashed_laws(1, 300)
    policy = Priced(EAGER, nodes=255, max_depth=2, rate=1.0)
    step = next(Decoder(TableTarget(laws, 300), TableDrafter(laws), policy).steps([1], 9))
    assert step.tree.nodes == 255


def test_the_budget_is_what_it_is_told(monkeypatch):
    monkeypatch.setattr(pricing, "costs_of", lambda target, drafter, lanes: EAGER)
    assert str(pricing.auto(*tiny_pair())) == "Auto, at most 64 nodes and 10 layers"
    told = pricing.auto(*tiny_pair(), 12, 3)
    assert str(told) == "Auto, at most 12 nodes and 3 layers" and [one.nodes for one in told.policies[1:]] == [8, 12]


@pytest.mark.slow
def test_every_controller_stands_beside_the_best_that_it_could_have_chosen(tmp_path, capsys):
    (tmp_path / "costs.json").write_text(json.dumps({"one": dataclasses.asdict(EAGER)}))
    asked = ["--limit", "1", "--max-new-tokens", "6", "--dtype", "float32", "--seeds", "3", "--json"]
    asked += ["--costs", str(tmp_path / "costs.json")]
    assert compare_controllers([*asked, "--drafter", "eagle:demo"]) == 0
    rows = {row["controller"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert list(rows) == list(CONTROLLERS)
    for name, row in rows.items():
        assert row["= plain"] == "1/1" and row["best fixed"] in CONTROLLERS[name].fixed
        assert row["of best"] == pytest.approx(row["x plain"] / row["its x plain"]) and row["its x plain"] >= 1
        assert row["from"] <= row["of best"] + 1e-9 and row["of best"] <= row["to"] + 1e-9
        assert CONTROLLERS[name].draws or row["from"] == row["to"]
    assert any(row["from"] < row["to"] for row in rows.values())
    assert compare_controllers([*asked, "--drafter", "eagle:demo", "--predictor", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert compare_controllers([*asked, "--seeds", "0"]) == 2
    assert "seeds must be at least 1, got 0" in capsys.readouterr().err


def test_the_command_line_takes_auto():
    assert parse(Run, "run", "", ["--nodes", "auto"]).nodes == "auto"
    assert parse(Demo, "demo", "", ["--nodes", "7"]).nodes == 7
    for kind, more, message in (
        (Run, ["--threshold", "0.2"], "--nodes auto takes no --threshold"),
        (Run, ["--method", "chain"], "a chain takes --max-depth"),
        (Demo, ["--threshold", "0.2"], "--nodes auto takes no --threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(kind, "run", "", ["--nodes", "auto", *more])
    with pytest.raises(ValueError, match="--nodes: neither a number nor auto: 'many'"):
        parse(Run, "run", "", ["--nodes", "many"])
    with pytest.raises(ValueError, match="takes no --threshold"):  # also where it is the default's number
        parse(Run, "run", "", ["--nodes", "auto", "--threshold", str(OptTree.threshold)])
