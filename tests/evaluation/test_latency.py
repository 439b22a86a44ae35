"""Latency curves, and the budget that follows from them and from answers."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from tiny_models import build, tiny, tiny_head
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import opt_tree
from evaluation.answers.file import AnswerSet
from evaluation.latency import batches, turns
from evaluation.latency import command as latency
from evaluation.latency.advice import elsewhere
from evaluation.latency.budget import Acceptance, AcceptanceCurve, Choice, advise
from evaluation.latency.decoding import beside_grid
from evaluation.latency.forwards import ForwardTime, Probe, curve, measure
from evaluation.timing import Timed, Timings, interleave
from opt_tree.controllers import Auto
from opt_tree.models.causal_lm import Wanted
from opt_tree.policies import Costs


def answers(nodes: int, length: float, layers: int, **seconds: float) -> list[dict]:
    """One answer of 100 steps: `length` tokens, `layers` draft forwards and `nodes` nodes each; times in all."""
    steps, tokens = 100, round(100 * length)
    lengths = [math.ceil(length)] * (tokens - steps * math.floor(length)) or [math.floor(length)]
    lengths += [math.floor(length)] * (steps - len(lengths))
    times = {
        "wall_time": 1.0,
        "prefill_time": 0.0,
        "draft_time": 0.4,
        "draft_forward_time": 0.2,
        "target_forward_time": 0.5,
    } | seconds
    choice = {
        "index": 0,
        "turns": ["text"],
        "accept_lengths": lengths,
        "expected_lengths": [1 + (length - 1) / 2] * steps,
        "decoding_steps": [steps],
        "new_tokens": [tokens],
        "draft_forwards": [layers * steps],
        "draft_tokens": [layers * steps * nodes // 3],
        "verified_tokens": [(nodes + 1) * steps],
        "finish_reason": ["length"],
        "prompt_ids": [[1] * 20],
        "token_ids": [[2] * tokens],
    }
    return [{"question_id": 1, "choices": [choice | {name: [value] for name, value in times.items()}]}]


def test_lanes_are_compared_with_transformers_padded_batch(capsys: pytest.CaptureFixture) -> None:
    flags = "--lanes 1,2 --nodes 4 --shared --limit 3 --max-new-tokens 5 --dtype float32 --device cpu --json"
    assert latency.main(flags.split()) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["method"], row["lanes"]) for row in rows] == [
        (method, lanes) for method in ("plain", "OPT-Tree 4/0.2", "shared 4/0.2", "transformers") for lanes in (1, 2)
    ]
    assert all(row["same text"] == "3/3" for row in rows) and rows[0]["x plain"] == rows[0]["x lanes 1"] == 1
    plain, _, tree, _, alone, shared, *_ = rows
    assert plain["nodes/step"] == 0 and plain["tokens/step"] == 1 and rows[-1]["nodes/step"] is None
    assert alone["nodes/step"] == tree["nodes/step"] and alone["tokens/step"] == tree["tokens/step"]
    assert 0 < shared["nodes/step"] <= 4 and all(row["MB more"] is None or row["MB more"] >= 0 for row in rows)
    for refused in (["--lanes", "0"], ["--shared", "--lanes", "2"]):
        assert latency.main(refused) == 2


# Auto beside a grid.


def test_auto_is_set_beside_the_best_of_the_grid_by_either_clock() -> None:
    def runs(*seconds: tuple[float, float]) -> list[list[Timed]]:
        return [[Timed([1] * 60, wall, cpu_seconds=cpu)] for wall, cpu in seconds]

    found = {
        "OPT-Tree 4/0.2": runs((2.0, 1.5), (2.0, 1.5)),
        "OPT-Tree 8/0.2": runs((2.5, 1.0), (2.5, 1.0)),
        "auto": runs((1.0, 1.0), (4.0, 2.0)),
        "plain": runs((3.0, 3.0), (3.0, 3.0)),
        "transformers": runs((0.1, 0.1), (0.1, 0.1)),  # faster, and no tree
    }
    # Sums over sums; an interval spans the two prompts, as both can be drawn twice.
    assert beside_grid(Timings(found)) == [
        {
            "auto over": "the best of the grid",
            "by the clock": "0.80 [0.50, 2.00], OPT-Tree 4/0.2",
            "in CPU time": "0.67 [0.50, 1.00], OPT-Tree 8/0.2",
        },
        {"auto over": "plain", "by the clock": "1.20 [0.75, 3.00]", "in CPU time": "2.00 [1.50, 3.00]"},
    ]
    assert beside_grid(Timings({name: one for name, one in found.items() if name != "auto"})) == []
    assert beside_grid(Timings({name: found[name] for name in ("auto", "plain")})) == []


def test_the_command_ends_with_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(latency, "auto", lambda *_: Auto(Costs.straight(5e-3, 5e-3, 1e-4, 1e-3, 3e-5)))
    flags = "--nodes 3,auto --thresholds 0.1,0.5 --limit 2 --max-new-tokens 5 --dtype float32 --device cpu --json"
    assert latency.main(flags.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    best, plain = json.loads(printed[-1])["auto"]
    grid = {"OPT-Tree 3/0.1", "OPT-Tree 3/0.5"}
    for clock in ("by the clock", "in CPU time"):
        assert best[clock].rpartition(", ")[2] in grid and float(plain[clock].split()[0]) > 0
    assert [line.split("  ")[0] for line in printed[-3:-1]] == ["the best of the grid", "plain"]


def test_the_process_time_of_a_method_is_its_own() -> None:
    def work(prompt: list[int], count: int) -> Timed:
        begin = time.process_time()
        while time.process_time() - begin < 0.02:
            pass
        return Timed([1] * count, 5.0)

    def wait(prompt: list[int], count: int) -> Timed:
        time.sleep(0.1)
        return Timed([1] * count, 5.0)

    timings = interleave({"work": work, "wait": wait}, [[7], [8]], 3)
    assert all(seconds >= 0.02 for _, seconds in timings.spent("work", "cpu_seconds"))
    assert all(seconds < 0.1 for _, seconds in timings.spent("wait", "cpu_seconds"))
    assert timings.spent("work") == [(3, 5.0)] * 2


def test_what_lanes_cost_is_measured_before_the_clock_runs(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, asked, then = Costs.straight(5e-3, 5e-3, 1e-4, 1e-3, 1e-5), [], []
    auto = Auto(costs, in_lanes=lambda lanes: asked.append(lanes) or costs)
    monkeypatch.setattr(latency, "auto", lambda target, drafter: auto)
    schedule = batches.schedule
    monkeypatch.setattr(batches, "schedule", lambda cells, pairs: then.extend(asked) or schedule(cells, pairs))
    flags = "--lanes 1,3 --nodes auto --limit 2 --max-new-tokens 4 --dtype float32 --device cpu --json"
    assert latency.main(flags.split()) == 0 and then == [3]
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["lanes"], row["same text"]) for row in rows if row["method"] == "auto"] == [(1, "2/2"), (3, "2/2")]


# The arithmetic.


def test_acceptance_is_the_mean_over_steps() -> None:
    one = Acceptance.of(answers(15, 3.5, 4), "a.jsonl")
    assert (one.nodes, one.length, one.layers, one.width) == (15, 3.5, 4, 5)
    assert one.expected == pytest.approx(2.25)
    assert (one.draft, one.rest, one.rate) == pytest.approx((0.004, 0.006, 350))


def test_answers_without_drafts_or_counts_are_refused() -> None:
    plain = answers(0, 1.0, 0)
    with pytest.raises(ValueError, match=r"a\.jsonl was answered without drafts"):
        Acceptance.of(plain, "a.jsonl")
    foreign = [{"question_id": 1, "choices": [{"turns": ["text"], "new_tokens": [3], "wall_time": [1.0]}]}]
    with pytest.raises(ValueError, match=r"a\.jsonl does not count steps"):
        Acceptance.of(foreign, "a.jsonl")


def test_the_curve_goes_through_what_was_measured() -> None:
    accepted = AcceptanceCurve((Acceptance.of(answers(63, 4.0, 6), "b"), Acceptance.of(answers(7, 2.5, 3), "a")))
    assert [accepted.length(nodes) for nodes in (0, 7, 63)] == pytest.approx([1, 2.5, 4.0])
    assert [accepted.layers(nodes) for nodes in (0, 7, 63)] == pytest.approx([0, 3, 6])
    # Half way in log2(n + 1) between 3 and 6 doublings; beyond, along the last piece.
    assert accepted.length(2**4.5 - 1) == pytest.approx(3.25)
    assert accepted.length(127) == pytest.approx(4.5)
    assert accepted.width(63) == pytest.approx(21)
    assert accepted.width(31) == pytest.approx(21 * 31 / 63)
    # A and E(A) as in `answers`: twice as many accepted as expected.
    assert accepted.calibration() == pytest.approx(2)


def test_where_nodes_are_free_the_largest_budget_wins_and_where_they_cost_a_small_one() -> None:
    accepted = AcceptanceCurve((Acceptance.of(answers(31, 3.5, 1), "a"),))
    free = advise(accepted, lambda rows: 0.01, lambda rows: 0.0, outside="ignored")
    assert (free.best.nodes, free.best.extrapolated) == (60, True)
    dear = advise(accepted, lambda rows: 0.01 * rows, lambda rows: 0.0, outside="ignored")
    assert dear.best.nodes == 3
    # A step between 32 and 33 rows: fill the bucket, not one more.
    stairs = advise(accepted, lambda rows: 0.01 if rows <= 32 else 0.02, lambda rows: 0.0, outside="ignored")
    assert stairs.best.nodes == 31


def test_the_best_budget_and_the_threshold_agree_with_brute_force() -> None:
    accepted = AcceptanceCurve((Acceptance.of(answers(60, 4.2, 6), "a"),))

    def target(rows: float) -> float:
        return 0.020 + 0.0004 * rows

    def drafter(rows: float) -> float:
        return 0.001 + 0.00002 * rows

    advice = advise(accepted, target, drafter, outside="ignored")
    speeds = {
        nodes: accepted.length(nodes) / (accepted.layers(nodes) * drafter(accepted.width(nodes)) + target(nodes + 1))
        for nodes in [choice.nodes for choice in advice.choices]
    }
    assert advice.best.nodes == max(speeds, key=lambda nodes: speeds[nodes])
    theta = max(speeds.values())
    assert advice.best.rate == pytest.approx(theta)
    # At the best price nothing else is worth more than it costs (Dinkelbach).
    assert max(c.length - theta * c.step_seconds for c in advice.choices) == pytest.approx(0, abs=1e-12)
    assert advice.threshold == pytest.approx(theta * drafter(accepted.width(advice.best.nodes)) / 2, rel=0.05)
    assert advice.flags == f"--nodes {advice.best.nodes} --threshold {advice.threshold:g}"
    assert advice.plain_rate == pytest.approx(1 / target(1))


def test_time_outside_the_forwards_counts_on_the_same_machine_only() -> None:
    accepted = AcceptanceCurve((Acceptance.of(answers(15, 3.0, 4, draft_time=0.4, wall_time=1.0), "a"),))
    bare = advise(accepted, lambda rows: 0.004, lambda rows: 0.0005, outside="ignored")
    real = advise(accepted, lambda rows: 0.004, lambda rows: 0.0005, outside="remainder")
    assert bare.own.step_seconds == pytest.approx(0.006)
    # What was measured: 1 s for 100 steps.
    assert real.own.step_seconds == pytest.approx(0.010)
    assert real.own.layer_seconds == pytest.approx(0.001)
    assert real.own.rate == pytest.approx(300)
    # A curve slower than the answers were is no negative overhead.
    slow = advise(accepted, lambda rows: 0.4, lambda rows: 0.05, outside="remainder")
    assert slow.own.step_seconds == pytest.approx(0.6)
    # By the answers' own clocks: 2 ms a step around the drafter, 1 ms around the target, however fast forwards are now.
    clocked = advise(accepted, lambda rows: 0.4, lambda rows: 0.05, outside="timed")
    assert clocked.own.step_seconds == pytest.approx(0.603)


def test_a_layer_that_takes_half_a_step_needs_half_the_tokens_of_one() -> None:
    choice = Choice(nodes=7, length=3.0, layers=1.0, layer_seconds=0.5, step_seconds=1.0, extrapolated=False)
    assert choice.price == 1.5


# The measuring.


def test_every_size_is_measured_and_leaves_nothing_behind() -> None:
    target = opt_tree.CausalLM(tiny("llama"))
    cells = measure([Probe("target", target)], [16, 250], [1, 8, 32], repeats=4, patience=60.0)
    # The model holds 256 tokens: behind 250 there is room for 1 only.
    assert [(cell.context, cell.tokens, cell.repeats) for cell in cells] == [
        (16, 1, 4),
        (16, 8, 4),
        (16, 32, 4),
        (250, 1, 4),
    ]
    assert all(0 < cell.low <= cell.ms <= cell.high for cell in cells)
    assert target.length == 250


def test_patience_ends_the_repetition_of_slow_sizes() -> None:
    cells = measure([Probe("target", opt_tree.CausalLM(tiny("llama")))], [16], [1], repeats=10, patience=0.0)
    assert cells[0].repeats == 3


def test_forwards_are_those_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = opt_tree.CausalLM(tiny("llama")), []
    run = opt_tree.CausalLM.run

    def spy(self: opt_tree.CausalLM, wanted: Wanted, *rest: object, **options: object) -> object:
        asked.append((len(wanted.tokens), self.length, wanted.positions.tolist()))
        return run(self, wanted, *rest, **options)

    probe = Probe("target", target)
    probe.fill(20)
    monkeypatch.setattr(opt_tree.CausalLM, "run", spy)
    probe.time(4)
    probe.time(2)
    assert asked == [(4, 20, [20, 21, 22, 23]), (2, 20, [20, 21])]


def test_the_curve_is_linear_between_and_behind_the_sizes() -> None:
    cells = [ForwardTime("target", 16, tokens, ms, ms, ms, 5) for tokens, ms in ((8, 20.0), (1, 6.0), (16, 24.0))]
    at = curve([*cells, ForwardTime("drafter", 16, 1, 1.0, 1.0, 1.0, 5)], "target", 16)
    assert [at(rows) for rows in (1, 4.5, 8, 16, 32)] == pytest.approx([0.006, 0.013, 0.020, 0.024, 0.032])
    assert curve([ForwardTime("drafter", 16, 1, 1.0, 1.0, 1.0, 5)], "drafter", 16)(9) == 0.001


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk: the tiny Llama and a tokenizer of numbers."""
    path = tmp_path_factory.mktemp("target")
    build(tiny("llama").config, dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def call(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, dict, str]:
    """Run the command; return its exit status, its JSON line and everything it printed."""
    status = latency.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    last = captured.out.strip().rpartition("\n")[2]
    return status, json.loads(last) if last.startswith("{") else {}, captured.out + captured.err


def test_measure_draw_and_advise(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made, picture, file = tmp_path / "latency.json", tmp_path / "latency.png", tmp_path / "a.jsonl"
    models = ["--base-model-path", folder, "--draft-model-path", folder, "--dtype", "float32", "--inflate", "64x3"]
    sizes = ["--tokens", 1, 4, 16, "--contexts", 8, 32, "--repeats", 3]
    file.write_text(json.dumps(answers(15, 3.0, 4)[0]) + "\n")
    status, result, printed = call(
        capsys, *models, *sizes, "--device", "cpu", "--output", made, "--plot", picture, "--answers", file
    )
    assert status == 0
    measured = json.loads(made.read_text())
    assert {(c["model"], c["context"], c["tokens"]) for c in measured["cells"]} == {
        (model, context, tokens) for model in ("target", "drafter") for context in (8, 32) for tokens in (1, 4, 16)
    }
    assert measured["models"]["inflate"] == "64x3"
    assert "inflated target" in printed
    assert picture.stat().st_size > 5000
    assert result["flags"] in printed
    assert result["flags"].startswith("--nodes ")
    # The answers have no header, so nothing says that they were written here.
    assert "has no header): only their acceptance is used" in printed
    # The same file gives the same advice again without measuring.
    status, again, _ = call(capsys, "--measured", made, "--answers", file)
    assert (status, again["flags"]) == (0, result["flags"])


def test_where_answers_come_from_is_compared() -> None:
    measured = {
        "models": {"target_dtype": "float32", "inflate": None, "base_model_path": "demo"},
        "environment": {"device": "here", "threads": 1, "torch": "2"},
    }
    session = {"environment": {"device": "here", "threads": 1, "torch": "2"}}
    settings = {"target_dtype": "float32", "inflate": None, "base_model_path": "demo", "device": "cpu"}
    same = AnswerSet(Path("a"), [], [], {"settings": settings, "sessions": [session]})
    assert elsewhere(same, measured) == []
    other = AnswerSet(
        Path("a"),
        [],
        [],
        {"settings": settings | {"inflate": "7b"}, "sessions": [{"environment": {"device": "there"}}]},
    )
    assert elsewhere(other, measured)[0] == "device there there, here here"
    assert "inflate 7b there, None here" in elsewhere(other, measured)


def test_an_eagle_head_is_timed_with_features() -> None:
    target = opt_tree.CausalLM(tiny("llama"))
    drafter = opt_tree.EagleDrafter(tiny_head(tiny("llama")), target)
    cells = measure([Probe("drafter", drafter.lm, bool(drafter.features))], [16], [1, 4], repeats=3, patience=60.0)
    assert [cell.tokens for cell in cells] == [1, 4]


def test_bad_input_gives_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def complaint(*arguments: object) -> str:
        status, _, printed = call(capsys, *arguments)
        assert status == 2
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        return errors[0]

    models = [
        "--base-model-path",
        folder,
        "--draft-model-path",
        folder,
        "--output",
        tmp_path / "l.json",
        "--device",
        "cpu",
    ]
    assert "no answer file" in complaint(*models, "--answers", tmp_path / "missing.jsonl")
    assert "--threads must be at least 1, got 0" in complaint(*models, "--threads", 0)
    assert "--contexts 300 and one token more are beyond the target's 256" in complaint(*models, "--contexts", 300)
    ngram = ["--base-model-path", folder, "--drafter", "ngram", *models[4:]]
    assert "ngram runs no model" in complaint(*ngram)
    assert "unknown shape 'huge'" in complaint(*models, "--inflate", "huge")
    assert "nowhere" in complaint("--base-model-path", tmp_path / "nowhere", "--output", tmp_path / "l.json")
    assert "no such folder" in complaint(*models[:4], "--output", tmp_path / "no such folder" / "l.json")
    (tmp_path / "other.json").write_text("[]")
    assert "is not a measurement of this command" in complaint("--measured", tmp_path / "other.json")


def test_the_turns_of_a_conversation(capsys: pytest.CaptureFixture) -> None:
    short = ["--dtype", "float32", "--max-new-tokens", "12", "--rounds", "1", "--limit", "2"]
    assert turns.main([*short, "--drafter", "eagle:demo", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (first["turn"], second["turn"]) == (1, 2) and second["prompt"] > first["prompt"] + 12
    assert second["kept, CPU ms"] > 0 and second["anew, CPU ms"] > 0
    assert turns.main(["--rounds", "0"]) == 2
    assert "rounds must be at least 1" in capsys.readouterr().err
