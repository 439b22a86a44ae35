"""How fast trees of several budgets decode beside the baselines, one by one and side by side."""

import json
import time
from pathlib import Path

import pytest
from tiny_models import save_pair

from evaluation import latency
from evaluation.latency import auto_over_others
from evaluation.timing import Timed, Timings, interleave, overview
from opt_tree.methods.controllers.auto import Auto
from opt_tree.methods.policies.costs import Costs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter, and three questions."""
    root = save_pair(tmp_path_factory.mktemp("pair"))
    (root / "q.jsonl").write_text("".join(f'{{"question": "{text}"}}\n' for text in ("aabbcc", "hcgafb", "aa")))
    return root


def decode(folder: Path, flags: str) -> int:
    """Decode the questions as the flags say."""
    models = f"--base-model-path {folder}/target --draft-model-path {folder}/draft --question-file {folder}/q.jsonl"
    return latency.main(f"{models} --max-new-tokens 5 --dtype float64 --device cpu --json {flags}".split())


def test_lanes_are_compared_with_transformers_padded_batch(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert decode(folder, "--lanes 1,2 --nodes 4") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["method"], row["lanes"]) for row in rows] == [
        (method, lanes) for method in ("plain", "OPT-Tree 4/0.2", "transformers") for lanes in (1, 2)
    ]
    assert all(row["same text"] == "3/3" for row in rows) and rows[0]["x plain"] == rows[0]["x lanes 1"] == 1
    plain, _, tree, alone, *_ = rows
    assert plain["nodes/step"] == 0 and plain["tokens/step"] == 1 and rows[-1]["nodes/step"] is None
    assert alone["nodes/step"] == tree["nodes/step"] and alone["tokens/step"] == tree["tokens/step"]
    assert latency.main(["--lanes", "0"]) == 2


def test_trees_by_steps_on_the_device_have_lines_of_their_own(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert decode(folder, "--nodes 4 --on-device") == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    host, device = rows["OPT-Tree 4/0.2"], rows["OPT-Tree 4/0.2, on the device"]
    assert device["same text"] == "3/3" and device["tokens/step"] == host["tokens/step"]
    assert decode(folder, "--nodes 4 --on-device --lanes 2") == 2
    assert "leave out --on-device" in capsys.readouterr().err
    models = f"--base-model-path {folder}/target --drafter recycling --question-file {folder}/q.jsonl"
    assert latency.main(f"{models} --max-new-tokens 5 --dtype float64 --device cpu --nodes 4 --on-device".split()) == 2
    assert "TokenRecycling drafts on the host" in capsys.readouterr().err


# Auto beside a grid.


def test_every_ratio_has_an_interval_over_prompts() -> None:
    ours, plain = ([[Timed([1] * 60, wall)] for wall in walls] for walls in ((1.0, 2.0), (3.0, 3.0)))
    tree, alone = overview(Timings({"OPT-Tree 4/0.2": ours, "plain": plain}))
    assert tree["x plain"] == 2 and tree["x plain, 95 %"] == "1.50 to 3.00"
    assert alone["x plain"] == 1 and alone["x plain, 95 %"] is None


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
    assert auto_over_others(Timings(found)) == [
        {
            "auto over": "the best of the grid",
            "by the clock": "0.80 [0.50, 2.00], OPT-Tree 4/0.2",
            "in CPU time": "0.67 [0.50, 1.00], OPT-Tree 8/0.2",
        },
        {"auto over": "plain", "by the clock": "1.20 [0.75, 3.00]", "in CPU time": "2.00 [1.50, 3.00]"},
    ]
    assert auto_over_others(Timings({name: one for name, one in found.items() if name != "auto"})) == []
    assert auto_over_others(Timings({name: found[name] for name in ("auto", "plain")})) == []


def test_the_command_ends_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(latency, "auto", lambda *_: Auto(Costs.straight(5e-3, 5e-3, 1e-4, 1e-3, 3e-5)))
    assert decode(folder, "--nodes 3,auto --thresholds 0.1,0.5 --limit 2") == 0
    printed = capsys.readouterr().out.splitlines()
    best, plain = json.loads(printed[-1])["auto"]
    grid = {"OPT-Tree 3/0.1", "OPT-Tree 3/0.5"}
    for clock in ("by the clock", "in CPU time"):
        assert best[clock].rpartition(", ")[2] in grid and float(plain[clock].split()[0]) > 0
    assert [line.split("  ")[0] for line in printed[-3:-1]] == ["the best of the grid", "plain"]


def test_the_process_time_of_a_method_is_its_own() -> None:
    def work(prompt: list[int], count: int, seed: int) -> Timed:
        begin = time.process_time()
        while time.process_time() - begin < 0.02:
            pass
        return Timed([1] * count, 5.0)

    def wait(prompt: list[int], count: int, seed: int) -> Timed:
        time.sleep(0.1)
        return Timed([1] * count, 5.0)

    timings = interleave({"work": work, "wait": wait}, [[7], [8]], 3)
    assert all(seconds >= 0.02 for _, seconds in timings.spent("work", "cpu_seconds"))
    assert all(seconds < 0.1 for _, seconds in timings.spent("wait", "cpu_seconds"))
    assert timings.spent("work") == [(3, 5.0)] * 2


def test_what_lanes_cost_is_measured_before_the_clock_runs(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, asked, then = Costs.straight(5e-3, 5e-3, 1e-4, 1e-3, 1e-5), [], []
    monkeypatch.setattr(latency, "auto", lambda target, drafter, lanes=1: asked.append(lanes) or Auto(costs))
    measured = latency._measured
    monkeypatch.setattr(latency, "_measured", lambda *way: then.append(list(asked)) or measured(*way))
    assert decode(folder, "--lanes 1,3 --nodes auto") == 0 and then[0] == [1, 1, 3]
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["lanes"], row["same text"]) for row in rows if row["method"] == "auto"] == [(1, "3/3"), (3, "3/3")]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert latency.main(["--max-new-tokens", "0"]) == 2
    assert capsys.readouterr().err == "error: --max-new-tokens must be at least 1, got 0\n"
