"""The report's figures on answer files written by hand, where every one of them is known."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evaluation
from evaluation import report
from evaluation.answers import comparison, metrics
from evaluation.answers.metrics import METRICS, Metric
from evaluation.answers.record import exact_match
from evaluation.answers.steps import acceptance_by_depth, by_position, calibration, step_time, steps_of
from evaluation.timing import contested


def choice(emitted: list[list[int]], seconds: list[float], **more: Any) -> dict[str, Any]:
    """A choice whose turns emitted the given tokens step by step; each drafted four nodes, two layers deep."""
    steps = [length for turn in emitted for length in turn]
    count = len(emitted)
    return {
        "index": 0,
        "turns": [f"turn {i}" for i in range(count)],
        "idxs": [len(turn) - 1 for turn in emitted],
        "new_tokens": [sum(turn) for turn in emitted],
        "wall_time": seconds,
        "decoding_steps": [len(turn) for turn in emitted],
        "draft_forwards": [2 * len(turn) for turn in emitted],
        "draft_tokens": [5 * len(turn) for turn in emitted],
        "verified_tokens": [5 * len(turn) for turn in emitted],
        "draft_time": [0.3 * s for s in seconds],
        "verify_time": [0.4 * s for s in seconds],
        "commit_time": [0.1 * s for s in seconds],
        "draft_forward_time": [0.2 * s for s in seconds],
        "target_forward_time": [0.35 * s for s in seconds],
        "prefill_time": [0.1 * s for s in seconds],
        "finish_reason": ["length"] * count,
        "prompt_ids": [[1, 2]] * count,
        "token_ids": [list(range(sum(turn))) for turn in emitted],
        "accept_lengths": steps,
        "expected_lengths": [1.0 + length / 2 for length in steps],
        "tree_nodes": [4] * len(steps),
        "tree_depths": [2] * len(steps),
    } | more


def answer(key: int, category: str, *choices: dict[str, Any]) -> dict[str, Any]:
    return {"question_id": key, "answer_id": f"a{key}", "category": category, "choices": list(choices)}


def write(path: Path, answers: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in answers))
    return path


ANSWERS = [answer(1, "math", choice([[3, 1, 2], [2, 2]], [1.0, 1.0])), answer(2, "writing", choice([[1, 1, 1]], [3.0]))]
BASELINE = [
    answer(1, "math", choice([[1] * 6, [1] * 4], [5.0, 5.0])),
    answer(2, "writing", choice([[1] * 3], [3.0])),
    answer(3, "writing", choice([[1] * 9], [1.0])),
]


def test_speeds_are_those_of_the_definitions() -> None:
    figures = metrics.summary(ANSWERS)
    assert figures["tokens_per_second"] == pytest.approx(13 / 5)
    assert figures["tokens_per_second_macro"] == pytest.approx((10 / 2 + 3 / 3) / 2)
    assert figures["decode_tokens_per_second"] == pytest.approx(13 / 4.5)
    assert figures["tokens_per_step"] == pytest.approx(13 / 8) and figures["steps"] == 8
    assert figures["tokens_per_step_macro"] == pytest.approx((10 / 5 + 3 / 3) / 2), "SPEED-Bench's mean"
    assert figures["draft_forwards_per_step"] == 2 and figures["verified_tokens_per_step"] == 5


def test_speed_up_is_paired_by_question() -> None:
    figures = metrics.speed_up(ANSWERS, BASELINE)
    assert figures["questions"] == 2
    assert figures["micro"] == pytest.approx((13 / 5) / (13 / 13))
    assert figures["macro"] == pytest.approx(((5 + 1) / 2) / ((1 + 1) / 2))
    assert figures["decode"] == pytest.approx((13 / 4.5) / (13 / 11.7))
    # Two questions: a resample has both, the first twice (5 times as fast) or the second twice (equally fast).
    assert figures["interval"] == pytest.approx([1, 5])
    assert metrics.speed_up(ANSWERS[:1], BASELINE)["interval"] is None
    assert metrics.speed_up(ANSWERS, BASELINE[2:]) is None


def test_files_of_other_tools_are_reported_as_far_as_they_go(tmp_path, capsys):
    eagle = ["index", "turns", "new_tokens", "wall_time"]
    spec_bench = [*eagle, "decoding_steps", "accept_lengths"]
    base = write(tmp_path / "b.jsonl", BASELINE)
    for known, tokens_per_step in ((spec_bench, pytest.approx(13 / 8)), (eagle, None)):
        answers = [a | {"choices": [{key: a["choices"][0][key] for key in known}]} for a in ANSWERS]
        path = write(tmp_path / "a.jsonl", answers)
        assert report.main([str(path), "--baseline", str(base), "--json"]) == 0
        ours = json.loads(capsys.readouterr().out.splitlines()[-1])["reports"][0]["overall"]
        assert ours["speed_up"]["micro"] == pytest.approx(2.6)
        assert ours["tokens_per_step"] == tokens_per_step


def test_exact_match_compares_tokens_and_shows_the_first_difference() -> None:
    one = choice([[2], [2]], [1, 1], token_ids=[[5, 6], [7, 8]], turns=["abcd", "efgh"])
    other = choice([[2], [2]], [1, 1], token_ids=[[5, 9], [7, 8]], turns=["abXd", "efgh"], prompt_ids=[[1, 2], [3]])
    match = exact_match([answer(1, "math", one)], [answer(1, "math", other)])
    assert (match["compared"], match["equal"], match["other_prompt"]) == (1, 0, 1)
    (where,) = match["divergences"]
    assert (where["question_id"], where["turn"], where["position"], where["unit"]) == (1, 0, 1, "token")
    # Without token ids the texts are compared, and without prompts every turn behind a difference has another one.
    for c in (one, other):
        del c["token_ids"], c["prompt_ids"]
    match = exact_match([answer(1, "math", one)], [answer(1, "math", other)])
    assert (match["compared"], match["equal"], match["other_prompt"]) == (1, 0, 1)
    assert match["divergences"][0]["position"] == 2 and match["divergences"][0]["unit"] == "character"
    # One that ends early differs where it ends.
    short, long = (choice([[len(ids)]], [1], token_ids=[ids]) for ids in ([5, 6], [5, 6, 7]))
    match = exact_match([answer(1, "math", short)], [answer(1, "math", long)])
    assert match["rate"] == 0 and match["divergences"][0]["position"] == 2


def test_the_trimmed_step_counts_in_the_mean_and_in_nothing_else() -> None:
    stopped = choice([[3, 3], [3, 1]], [1, 1], finish_reason=["length", "stop_token"])
    figures = metrics.summary([answer(1, "math", stopped)])
    assert figures["tokens_per_step"] == pytest.approx(10 / 4)
    assert figures["tokens_per_step_untrimmed"] == pytest.approx(9 / 3)
    taken = steps_of([answer(1, "math", stopped)])
    assert taken.whole.tolist() == [True, True, True, False]
    assert acceptance_by_depth(taken)[1] == {"depth": 2, "drafted": 3, "accepted": 3, "rate": 1.0, "reach": 1.0}


def test_positions_count_the_prompt_and_fall_into_blocks() -> None:
    """A prompt of 250 tokens: three steps of 4 begin at 250, 254 and 258; the other turn begins anew."""
    given = {"prompt_ids": [[0] * 250, [0] * 3], "step_times": [0.1, 0.1, 0.2, 0.5]}
    first, second = by_position([answer(1, "math", choice([[4, 4, 4], [1]], [1.0, 1.0], **given))])
    assert [*first] == [*second] == ["context_up_to", "steps", "tokens_per_step", "tokens_per_second"]
    assert [*first.values()] == [256, 3, 3.0, pytest.approx(9 / 0.7)]
    assert [*second.values()] == [512, 1, 4.0, pytest.approx(20)]
    del given["step_times"]
    untimed = by_position([answer(1, "math", choice([[4, 4, 4], [1]], [1.0, 1.0], **given))])
    assert [block["tokens_per_second"] for block in untimed] == [None, None]
    batch = by_position([answer(1, "math", choice([[4, 4], [1]], [1.0, 1.0], step_times=[1.0] * 3, lanes=[2, 2]))])
    assert [block["tokens_per_second"] for block in batch] == [None]


def test_acceptance_by_depth_counts_only_steps_that_drafted_it() -> None:
    made = choice([[1, 2, 3, 3]], [1], tree_depths=[0, 1, 2, 3])
    taken = steps_of([answer(1, "math", made)])
    table = acceptance_by_depth(taken)
    assert [row["drafted"] for row in table] == [3, 2, 1]
    assert [row["accepted"] for row in table] == [3, 2, 0]
    assert [row["rate"] for row in table] == [1, 1, 0]
    assert [row["reach"] for row in table] == [0.75, 0.5, 0]


def drawn_steps(law: str, seed: int = 0) -> dict[str, Any]:
    """2,000 steps whose E(A) is uniform on [0.5, 4] and whose A is binomial around it, or around another line."""
    random = np.random.default_rng(seed)
    expected = random.uniform(0.5, 4, 2000)
    mean = {"right": expected, "timid": 2 * expected, "shifted": expected + 1.5}[law]
    accepted = random.binomial(10, np.clip(mean / 10, 0, 1))
    lengths = (accepted + 1).tolist()
    return choice([lengths], [10.0], expected_lengths=(expected + 1).tolist(), tree_depths=[10] * 2000)


@pytest.mark.parametrize(
    ("law", "slope", "wrong"), [("right", 1, []), ("timid", 2, ["slope", "mean"]), ("shifted", 1, ["mean"])]
)
def test_calibration_finds_the_slope_and_says_what_is_wrong(law: str, slope: float, wrong: list[str]) -> None:
    taken = steps_of([answer(1, "math", drawn_steps(law))])
    figures = calibration(taken)
    assert figures["slope"] == pytest.approx(slope, abs=4 * figures["slope_error"])
    assert figures["slope_error"] < 0.06
    assert figures["miscalibrated"] == wrong
    assert figures["pearson"] == pytest.approx(np.corrcoef(taken.expected, taken.lengths)[0, 1])
    scipy_stats = pytest.importorskip("scipy.stats")
    assert figures["spearman"] == pytest.approx(scipy_stats.spearmanr(taken.expected, taken.lengths).statistic)


def test_few_steps_say_nothing_about_calibration() -> None:
    wild = choice([[1, 3, 1]], [1.0], expected_lengths=[2.0, 2.1, 2.3])
    taken = steps_of([answer(1, "math", wild)])
    assert calibration(taken)["miscalibrated"] == []
    plain = steps_of([answer(1, "math", choice([[1, 1, 1]], [1.0], expected_lengths=[1.0, 1.0, 1.0]))])
    assert calibration(plain) is None


def test_steps_that_all_accept_nothing_have_no_slope_and_few_of_them_no_verdict(tmp_path, capsys) -> None:
    """NaN would be no JSON; a drafter that expected a thirtieth of a token in six steps may have been right."""
    for count, wrong in ((6, []), (600, ["mean"])):
        laid = choice([[1] * count], [1.0], expected_lengths=[1.03, 1.04] * (count // 2), tree_depths=[1] * count)
        figures = calibration(steps_of([answer(1, "math", laid)]))
        assert figures["miscalibrated"] == wrong and figures["slope_error"] == 0.0
        assert report.main([str(write(tmp_path / f"{count}.jsonl", [answer(1, "math", laid)]))]) == 0
        told = capsys.readouterr().out
        assert "A + 1 came to 1.00: the same at every step, over" in told and "nan" not in told
        assert ("the drafter is miscalibrated: the means" in told) == bool(wrong)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "python -m opt_tree.training.fitting.calibrate fits it"),
        ({"temperature": 1.0}, "serves greedy decoding only"),
    ],
)
def test_a_miscalibrated_law_is_named_with_the_command_that_fits_it(tmp_path, capsys, settings, advice):
    path = write(tmp_path / "a.jsonl", [answer(1, "math", drawn_steps("timid"))])
    header = {"settings": settings, "sessions": []}
    (tmp_path / "a.jsonl.run.json").write_text(json.dumps(header))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "the drafter is miscalibrated: the slope is far from 1" in text and advice in text
    assert re.search(r"slope (1\.9|2\.0|2\.1)\d \(standard error 0\.0\d\)", text)


def test_a_baseline_that_was_asked_otherwise_is_noted(tmp_path, capsys):
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        write(tmp_path / f"{name}.jsonl", [answer(1, "math", drawn_steps("timid"))])
        header = {"settings": {"temperature": temperature, "seed": 0}, "sessions": []}
        (tmp_path / f"{name}.jsonl.run.json").write_text(json.dumps(header))
    assert report.main([str(tmp_path / "a.jsonl"), "--baseline", str(tmp_path / "b.jsonl")]) == 0
    assert "note: a and its baseline differ in temperature 0.0 and 1.0" in capsys.readouterr().err


def test_a_step_is_the_sum_of_its_parts() -> None:
    times = step_time(ANSWERS)
    assert times is not None
    # 5 s in all, 10 % of them prefill, over 8 steps.
    assert sum(times.values()) == pytest.approx(1000 * 4.5 / 8)
    assert times["draft forwards"] == pytest.approx(1000 * 1.0 / 8) and times["tree building"] == pytest.approx(
        1000 * 0.5 / 8
    )
    unknown = [answer(1, "math", choice([[1]], [1.0], draft_time=[None]))]
    assert step_time(unknown) is None


def test_the_table_the_json_line_and_the_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, base = write(tmp_path / "a.jsonl", ANSWERS), write(tmp_path / "b.jsonl", BASELINE)
    assert report.main([str(path), "--baseline", str(base), "--plots", str(tmp_path / "plots"), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)["reports"][0]
    assert figures["categories"].keys() == {"math", "writing"}
    rows = [line.strip() for line in text if line.strip().startswith(("math", "writing"))]
    assert [row.split()[0] for row in rows] == ["math", "writing"], "a line for each category"
    assert figures["overall"]["exact_match"]["rate"] == 1
    row = next(line for line in text if line.startswith("a "))
    assert "2.60 [1.00, 5.00]" in row and "100.0 %" in row and "1.62" in row
    drawn = {name.name for name in (tmp_path / "plots").iterdir()}
    assert drawn == {f"a-{name}.{kind}" for name in ("expected", "depth") for kind in ("png", "svg", "pdf")}
    begins = {".png": b"\x89PNG", ".svg": b"<?xm", ".pdf": b"%PDF"}
    assert all((tmp_path / "plots" / name).read_bytes()[:4] == begins[Path(name).suffix] for name in drawn)


def test_a_difference_is_counted_and_exactness_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        write(tmp_path / f"{name}.jsonl", [answer(1, "math", choice([[2]], [1], token_ids=[[5, token]]))])
        for name, token in (("a", 6), ("b", 9))
    ]
    assert report.main([str(paths[0]), "--baseline", str(paths[1])]) == 0
    told = capsys.readouterr().out
    assert "exact match of a with b: 0 of 1 turn (0.0 %)" in told
    assert f"  why they differ: python -m evaluation.exactness {paths[0]} {paths[1]}\n" in told


def test_the_first_file_is_set_against_every_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = [
        a | {"choices": [a["choices"][0] | {"wall_time": [2 * s for s in a["choices"][0]["wall_time"]]}]}
        for a in BASELINE
    ]
    files = [
        str(write(tmp_path / f"{name}.jsonl", lines)) for name, lines in (("a", ANSWERS), ("b", BASELINE), ("c", other))
    ]
    assert report.main([*files, "--baseline", files[1], "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["reports"][0]["speed_up_over"]["c"]["micro"] == pytest.approx(5.2)
    assert "a is 5.20 [2.00, 10.00] times as fast as c" in text
    assert [line.split(" with b: ")[0] for line in text if line.startswith("exact")] == [
        "exact match of a",
        "exact match of c",
    ]


def test_without_json_nothing_but_the_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(write(tmp_path / "a.jsonl", ANSWERS))]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_metric_is_one_function_and_one_line(tmp_path, capsys, monkeypatch):
    """The report's table and its JSON have it, in every row."""

    def longest_step(answers: metrics.Records) -> int:
        return max(max(choice["accept_lengths"]) for line in answers for choice in line["choices"])

    monkeypatch.setattr(metrics, "METRICS", (*METRICS, Metric(longest_step, "longest")))
    assert report.main([str(write(tmp_path / "a.jsonl", ANSWERS)), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in text[:2]] == ["longest", "3"]
    assert json.loads(last)["categories"]["writing"]["longest_step"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no answer file"),
        ("", "has no answers"),
        ('{"question_id": 1}\n{"question_id": \n', "line 2"),
        ('{"question_id": 1, "choices": [{"turns": ["a"]}]}\n', "question 1 has no new_tokens"),
        ('{"question_id": 1, "choices": []}\n', "question 1 has no turns"),
        ('{"question": 1}\n', "line 1: not an answer: no question_id"),
        ('{"question_id": []}\n', "line 1: not an answer: no question_id"),
        ('{"question_id": 1, "choices": "x"}\n', "question 1: choices is no list of objects"),
        *(
            (json.dumps(answer(1, "math", choice([[3, 1], [2]], [1.0, 1.0], **changed))) + "\n", f"question 1: {why}")
            for changed, why in (
                ({"decoding_steps": None}, "decoding_steps is no list of numbers"),
                ({"decoding_steps": [None, 1]}, "has accept_lengths, but decoding_steps does not say"),
                ({"decoding_steps": [1, 1]}, "accept_lengths has 3 entries for 2 steps"),
                ({"tree_depths": [2]}, "tree_depths has 1 entries for 3 steps"),
                ({"new_tokens": [4]}, "new_tokens has 1 entries for 2 turns"),
                ({"wall_time": ["1.0", "1.0"]}, "wall_time is no list of numbers"),
                ({"turns": "text"}, "turns is no list of texts"),
                ({"turns": -1}, "turns is no list of texts"),
                ({"finish_reason": [None, "length"]}, "finish_reason is no list of texts"),
                ({"token_ids": [[1], ["x"]]}, "token_ids is no list of lists of ids"),
                ({"prompt_ids": [1, 2]}, "prompt_ids is no list of lists of ids"),
                ({"prompt_ids": [[1]]}, "prompt_ids has 1 entries for 2 turns"),
                ({"new_tokens": [1e308, 1e308]}, "new_tokens is no list of numbers"),
                ({"wall_time": [float("nan"), 1.0]}, "wall_time is no list of numbers"),
            )
        ),
    ],
)
def test_files_that_are_no_answer_files_are_named(tmp_path, capsys, text, message):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    assert report.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error and str(path) in error


# --- tables for pandas and for papers --------------------------------------------------------------------------------


def test_figures_are_the_reports(tmp_path: Path) -> None:
    file, base = write(tmp_path / "a.jsonl", ANSWERS), write(tmp_path / "b.jsonl", BASELINE)
    table = evaluation.figures(file, baseline=base)
    assert list(zip(table.file, table.category, strict=True)) == [
        *(("a", "math"), ("a", "writing"), ("a", "all"), ("b", "math"), ("b", "writing"), ("b", "all"))
    ]
    whole = metrics.summary(ANSWERS, BASELINE)
    row = table.iloc[2]
    assert row.tokens_per_step == whole["tokens_per_step"] and row.speed_up == whole["speed_up"]["micro"]
    assert [row.speed_up_low, row.speed_up_high] == whole["speed_up"]["interval"]
    assert row.same_text == whole["exact_match"]["rate"] and row.turns_compared == whole["exact_match"]["compared"]


def test_formats_are_what_pandas_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, base = write(tmp_path / "a_1.jsonl", ANSWERS), write(tmp_path / "b.jsonl", BASELINE)
    given = [str(file), "--baseline", str(base)]

    def printed(form: str) -> list[str]:
        assert report.main([*given, "--format", form]) == 0
        return capsys.readouterr().out.splitlines()

    table = evaluation.figures(file, baseline=base)
    assert "\n".join(printed("csv")) + "\n" == table.to_csv(index=False)
    latex = printed("latex")
    assert latex[1] == r"\toprule" and latex[2].startswith(r"file & category & questions & turns & new\_tokens & ")
    assert latex[6].startswith(r"a\_1 & all & 2 & 3 & 13 & ") and not any("nan" in line.lower() for line in latex)
    markdown = printed("markdown")
    assert len(markdown) == 2 + len(table) and re.match(r"\| a_1 +\| all +\| +2 \| +3 \| +13 \|", markdown[4])
    assert report.main([*given, "--format", "csv", "--json"]) == 2 and "leave out --json" in capsys.readouterr().err


def test_a_comparison_is_a_table_too(tmp_path: Path) -> None:
    path = write(tmp_path / "compare.jsonl", [cell_line("opt:0.2", 8)])
    table = evaluation.figures(path)
    assert table.tree.tolist() == ["opt:0.2"] and table.temperature.tolist() == [0.0] and table.nodes.tolist() == [8]
    assert table.speed_up[0] == metrics.speed_up(ANSWERS, BASELINE)["micro"]


def cell_line(policy: str, budget: int) -> dict[str, Any]:
    """A line of a comparison."""
    cell = {"drafter": "lm:demo", "sharpening": "bare", "temperature": 0.0, "policy": policy, "budget": budget}
    cell |= {"children": "TopK", "verifier": "greedy"}
    known = {"question_id": f"{policy}, {budget}", "cell": cell, "answers": ANSWERS, "plain": BASELINE}
    return known | {"figures": comparison.figures(ANSWERS, BASELINE, {})}


def test_the_tables_of_a_comparison_have_one_order_of_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever line comes first: OPT-Tree's has no difference to itself."""
    faster = cell_line("binary", 60) | {"answers": [answer(1, "math", choice([[6, 4]], [1.0])), ANSWERS[1]]}
    faster["figures"] = comparison.figures(faster["answers"], BASELINE, {}) | {"weights_bytes": 1e6}
    slower = cell_line("opt", 60)
    lines = [cell_line("opt", 8), cell_line("binary", 8), slower, faster]
    for line in lines[:3]:
        line["figures"] |= {"weights_bytes": 1e6}
    path = write(tmp_path / "c.jsonl", lines)
    assert report.main([str(path)]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("drafter")]
    assert len(heads) == 2 and heads[0] == heads[1] and "minus" in heads[0] and heads[0][-1] == "MB"


def test_plain_decoding_beside_a_file_is_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", ANSWERS)
    assert report.main([str(path)]) == 0 and "speed-up" not in capsys.readouterr().out
    write(tmp_path / "a.plain.jsonl", BASELINE)
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "speed-up" in printed and "exact match of a with a.plain" in printed
    assert report.main([str(path), "--format", "csv"]) == 0 and "a.plain" in capsys.readouterr().out


def test_a_machine_with_too_much_to_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, told in ((0.3, False), (4.2, False), (15.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        found = contested()
        assert (found is not None) == told
    assert found is not None and "worth nothing" in found and "15.0" in found and "4 cores" in found


def test_without_pandas_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert report.main([str(write(tmp_path / "a.jsonl", ANSWERS)), "--format", "latex"]) == 2
    assert "error: tables need pandas: pip install pandas tabulate jinja2" in capsys.readouterr().err


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no answer file"):
        evaluation.figures(tmp_path / "none.jsonl")


def whole_steps(count: int, depth: int = 4) -> Any:
    """So many whole steps, whose lengths follow what was expected of them; one of them is deep."""
    lengths = [1 + step % 3 for step in range(count - 1)] + [depth]
    turn = choice([lengths], [1.0], expected_lengths=[0.5 + length for length in lengths])
    turn["tree_depths"] = [2] * (count - 1) + [depth]
    return steps_of([answer(1, "math", turn)])


def test_few_steps_are_drawn_one_by_one_on_whole_axes() -> None:
    plots = pytest.importorskip("evaluation.answers.plots")
    few, many = (plots.expected_against_accepted(whole_steps(count)) for count in (24, 400))
    points, heat = (figure.axes[1].collections for figure in (few, many))
    assert len(points[0].get_offsets()) == 24 and len(points) == 1, "all steps, and no heat map"
    assert type(heat[0]).__name__ == "QuadMesh" and len(heat[1].get_offsets()) == 1, "the deep one is no dark cell"
    for figure in (few, many):
        axes = figure.axes[1]
        assert axes.get_xlim() == axes.get_ylim() == (0.5, 5.0)
        (diagonal,) = [line for line in axes.lines if line.get_label() == "A = E(A)"]
        assert diagonal.get_xdata()[-1] == 5.0
        assert not any(one.get_title() for one in figure.axes), "a file's name is no title"


def test_the_line_of_depths_goes_as_deep_as_the_bars() -> None:
    plots = pytest.importorskip("evaluation.answers.plots")
    (axes,) = plots.depths(whole_steps(24, depth=10)).axes
    assert [list(line.get_xdata())[-1] for line in axes.lines] == [10, 2], "few steps dotted, enough of them whole"
