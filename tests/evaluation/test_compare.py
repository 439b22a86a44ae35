"""The comparison: what a line says, what is refused, what a killed run leaves, and that no budget is exceeded."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from table_models import TableDrafter, TableTarget, hashed_laws, written_laws
from tiny_models import save_pair

from evaluation import report
from evaluation.answers.comparison import counts, difference, promise, summarise
from evaluation.answers.record import seed_of
from evaluation.compare import __main__ as compare
from evaluation.compare import expectation, measure
from evaluation.compare.combinations import SIBLINGS, Combination, Grid, footprint
from evaluation.compare.expectation import Expectation
from evaluation.compare.plots import COLOURS, _shades, panels_of
from evaluation.compare.studies import STUDIES, study
from opt_tree import Decoder, OptTree, Sampling, load_pair
from opt_tree.methods.policies import registry
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.models.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter, and six questions."""
    root = save_pair(tmp_path_factory.mktemp("pair"))
    prompts = ("aabbcc", "hcgafb", "aaabac", "cbcacb", "bbbaac", "fafbfc")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text, "aa"]}) + "\n" for text in prompts))
    return root


def grid(folder: Path, output: Path, *more: str) -> int:
    files = f"--base-model-path {folder}/target --question-file {folder}/prompts.jsonl --output {output}"
    sizes = "--limit 2 --max-new-tokens 12 --budgets 6 --sharpening bare --dtype float64 --device cpu"
    return compare.main([*files.split(), *sizes.split(), *more])


def command(folder: Path, output: Path, *more: str) -> int:
    return grid(folder, output, "--draft-model-path", f"{folder}/draft", "--rates-questions", "2", *more)


DRAWN_FROM_TIMES = {"speed_up", "draft_ms_per_step", "overhead"}


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_line_says_what_the_decoder_did(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(folder, tmp_path / "a.jsonl", "--policies", "opt:0.1,binary", "--json") == 0
    opt, binary = lines(tmp_path / "a.jsonl")
    pair = load_pair(f"{folder}/target", f"{folder}/draft", dtype="float64", device="cpu")
    decoder = Decoder(pair.target, pair.drafter, OptTree(6, 0.1, 10))
    for answer, text in zip(opt["answers"], ("aabbcc", "hcgafb"), strict=True):
        direct = decoder.generate(pair.encode(text), 12, stop=pair.stop, seed=seed_of(0, answer["question_id"], 0, 0))
        (choice,) = answer["choices"]
        assert choice["accept_lengths"] == direct.accept_lengths
        assert choice["expected_lengths"] == pytest.approx(direct.expected_lengths, abs=1e-4)
        assert choice["draft_forwards"] == [sum(step.draft_forwards for step in direct.steps)]
    tokens, steps = counts(opt["answers"]).sum(0)
    figures = opt["figures"]
    assert figures["tokens_per_step"] == tokens / steps > 1
    assert figures["interval"][0] <= figures["tokens_per_step"] <= figures["interval"][1]
    assert figures["same_as_plain"] == binary["figures"]["same_as_plain"] == [1, 1]
    assert figures["verified_tokens_per_step"] <= 7
    assert figures["block_efficiency"] == {}
    assert len(opt["plain"]) == 1
    # The table's difference is the one of the lines, question by question.
    (row,) = [row for row in summarise([opt, binary]) if row["policy"] == "binary"]
    assert row["minus_opt"]["bare"]["difference"] == pytest.approx(
        binary["figures"]["tokens_per_step"] - figures["tokens_per_step"]
    )
    printed = capsys.readouterr().out
    cells = {cell["policy"]: cell for cell in json.loads(printed.splitlines()[-1])["cells"]}
    # All that the table shows is in the JSON line, too.
    shown = ("tokens_per_step", "interval", "expected_length", "promise", "draft_forwards_per_step")
    shown += ("draft_tokens_per_step", "draft_ms_per_step", "verified_tokens_per_step")
    shown += ("turns", "tokens_per_second", "same_as_plain", "block_efficiency")
    assert {key: cells["opt:0.1"][key] for key in shown} == {key: figures[key] for key in shown}
    assert cells["binary"]["minus_opt"] == row["minus_opt"]
    assert cells["opt:0.1"]["speed_up"] == figures["speed_up"]
    assert cells["opt:0.1"]["ceiling"] == figures["tokens_per_step_untrimmed"], "greedily a step emits what it can"
    header = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    assert header["settings"]["target_dtype"] == "float64" and header["sessions"][0]["environment"]["threads"] == 1


@pytest.mark.slow
def test_questions_side_by_side_give_the_same_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for their times, which are a batch's and not shown."""
    asked = ("--policies", "opt:0.1,chain", "--temperatures", "0,0.8", "--expect-every", "0", "--limit", "3")
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    assert command(folder, one, *asked) == 0
    assert "speed-up" in capsys.readouterr().out
    assert command(folder, many, *asked, "--batch-size", "2") == 0
    assert "speed-up" not in (said := capsys.readouterr().out) and "tokens/step" in said

    def untimed(known: Any) -> Any:
        if isinstance(known, dict):
            own = {key: untimed(value) for key, value in known.items() if "time" not in key and key != "lanes"}
            return {key: value for key, value in own.items() if "second" not in key and key not in DRAWN_FROM_TIMES}
        return [untimed(value) for value in known] if isinstance(known, list) else known

    def near(known: Any) -> Any:
        """E(A) is written to four decimals, and a batch's forwards differ in their last bits."""
        if isinstance(known, dict):
            return {key: near(value) for key, value in known.items()}
        if isinstance(known, list):
            return [near(value) for value in known]
        return pytest.approx(known, abs=2e-4) if isinstance(known, float) else known

    assert untimed(lines(many)) == near(untimed(lines(one))) and lines(many)[0]["figures"]["speed_up"] is None
    assert command(folder, one, *asked, "--batch-size", "2") == 2, "files do not mix"
    assert command(folder, tmp_path / "b.jsonl", "--policies", "opt", "--temperatures", "1", "--batch-size", "2") == 2
    assert "block efficiency is computed one by one" in capsys.readouterr().err


@pytest.mark.slow
def test_the_invalid_is_listed_once_and_not_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    asked = ["--policies", "opt:0.1,chains:2", "--verifiers", "multi_round,match", "--temperatures", "0.7,1"]
    asked += ["--limit", "1", "--max-new-tokens", "8", "--json"]
    assert command(folder, output, *asked) == 0
    run = lines(output)
    kept = {(r["cell"]["policy"], r["cell"]["verifier"], r["cell"]["temperature"]) for r in run}
    valid = [("opt:0.1", "match"), ("chains:2", "multi_round"), ("chains:2", "match")]
    assert kept == {(*pair, temperature) for pair in valid for temperature in (0.7, 1.0)} and len(run) == 6
    *printed, figures = capsys.readouterr().out.splitlines()
    (refused,) = json.loads(figures)["refused"]
    assert (refused["policy"], refused["verifier"]) == ("opt:0.1", "multi_round")
    assert "not exact for children of type TopK" in refused["refused"]
    told = f"refused: opt:0.1 with multi_round: {refused['refused']}"
    assert [line for line in printed if line.startswith("refused: ")] == [told]
    exact = {"k_seq", "khisti", "match", "multi_round", "multipath_block", "naive", "traversal"}
    assert {frozenset(r["figures"]["block_efficiency"]) for r in run} == {frozenset(exact), frozenset({"match"})}
    assert all(row["ceiling"] == row["block_efficiency"]["match"] >= 1 for row in summarise(run))
    assert (
        command(folder, tmp_path / "b.jsonl", "--policies", "opt", "--verifiers", "block", "--temperatures", "1") == 2
    )
    assert "every combination asked for is refused" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    asked = ("--policies", "opt:0.1,binary,sequoia")
    assert command(folder, output, *asked) == 0
    whole = output.read_bytes()
    before = [record["question_id"] for record in lines(output)]
    output.write_bytes(whole[:-200])
    measured: list[str] = []
    original = measure.Bench.measure
    monkeypatch.setattr(measure.Bench, "measure", lambda self, one: (measured.append(one.key), original(self, one))[1])
    monkeypatch.setattr(measure, "count_acceptance", None)  # the rates are there already
    assert command(folder, output, *asked) == 0
    assert measured == before[-1:] and [record["question_id"] for record in lines(output)] == before
    assert output.read_bytes()[:1000] == whole[:1000]
    assert command(folder, output, *asked, "--max-new-tokens", "9") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "belongs to another configuration (max_new_tokens 12 there, 9 now)" in error
    # Another grid is no other configuration: it adds cells.
    assert command(folder, output, "--policies", "chain") == 0
    assert len(lines(output)) == len(before) + 1


@pytest.mark.slow
def test_rates_are_measured_on_other_questions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    judges = ("--verifiers", "without_replacement", "--temperatures", "1")
    assert command(folder, output, "--policies", "sequoia,medusa", *judges) == 0
    settings = json.loads((tmp_path / "a.jsonl.run.json").read_text())["settings"]
    assert settings["ids"] == [0, 1] and settings["rates_ids"] == [4, 5]
    (rates,) = lines(tmp_path / "a.jsonl.rates")
    assert rates["question_id"] == f"lm:{folder}/draft, T 1, WithoutReplacement"
    assert 0 < rates["rates"]["by_rank"][0] <= 1
    assert command(folder, tmp_path / "b.jsonl", "--policies", "sequoia", "--limit", "6") == 2
    assert "all 6 questions are compared" in capsys.readouterr().err
    monkeypatch.setattr(measure, "LEAST_TRIALS", 10**6)
    assert command(folder, tmp_path / "c.jsonl", "--policies", "sequoia") == 2
    assert "too few questions for acceptance rates: the first rank was tried" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [*registry.POLICIES, "delayed:2:1:3", "chains:4", "kary:3", "opt:0:4", "eagle2:3:2", "dynamic_depth:0"]
)
def test_no_budget_is_exceeded(name: str) -> None:
    """And it is spent, but for what does not divide, by policies that do not stop early."""
    laws, seen = hashed_laws(3, 12), set()
    for budget in (1, 3, 8):
        for children in SIBLINGS:
            cell = Combination(name, budget, "lm:demo", "bare", 0.0, children, "greedy")
            if cell.refusal(lossy=False) is not None:
                assert name in ("delayed:2:1:3", "chains:4", "chains") and budget < 8
                continue
            decoder = Decoder(TableTarget(laws, 12), TableDrafter(laws), cell.build())
            nodes = [step.tree.nodes for step in itertools.islice(decoder.steps([1, 2], 12), 2)]
            assert max(nodes) <= budget, (budget, children, nodes)
            seen.add(max(nodes) / budget)
    assert max(seen) > 0.8 or name == "plain"


@pytest.mark.parametrize("name", STUDIES)
def test_studies_ask_for_valid_combinations_only(name: str) -> None:
    cells = study(name)
    assert len(cells) == len({cell.key for cell in cells}) > 6
    assert [cell.key for cell in cells if cell.refusal(lossy=False) is not None] == []


def test_the_grid_knows_judges_children_and_sharpening() -> None:
    cells = Grid(
        ("opt", "binary", "dyspec"), ("match", "traversal"), (0, 1), (9,), sharpening=("bare", "fitted")
    ).combinations()
    greedy = [(c.policy, c.children, c.sharpening) for c in cells if c.temperature == 0]
    assert {c.verifier for c in cells if c.temperature == 0} == {"greedy"}
    assert greedy == [
        ("opt", "TopK", "bare"),
        ("binary", "TopK", "either"),
        ("dyspec", "WithoutReplacement", "bare"),
        ("opt", "TopK", "fitted"),
    ]
    drawn = [(c.policy, c.children, c.verifier) for c in cells if c.temperature == 1]
    assert drawn == [
        ("opt", "TopK", "match"),
        ("opt", "TopK", "traversal"),
        ("binary", "TopK", "match"),
        ("binary", "IID", "traversal"),
        ("binary", "WithoutReplacement", "traversal"),
        ("dyspec", "WithoutReplacement", "match"),
        ("dyspec", "WithoutReplacement", "traversal"),
    ]
    assert {c.sharpening for c in cells if c.temperature == 1} == {"bare"}


def test_lossy_verifiers_must_be_asked_for() -> None:
    (cell,) = Grid(("opt",), ("typical",), (1,), (9,)).combinations()
    assert "lossy=True" in (cell.refusal(lossy=False) or "") and cell.refusal(lossy=True) is None


@pytest.mark.parametrize("every", [1, 3])
def test_expectation_is_what_happens_where_nothing_is_random(every: int) -> None:
    """A target of point masses: every verifier's expected tokens are the emitted ones, of each step that is asked."""
    target = written_laws({(): (0.0, 1.0, 0.0), (1, 1): (0.0, 0.0, 1.0), (2,): (1.0, 0.0, 0.0)})
    policy = Sampled.chains(2, 3)
    watch = Expectation("multi_round", policy.children, every=every)
    decoder = Decoder(TableTarget(target, 3), TableDrafter(hashed_laws(5, 3)), policy, watch)
    steps = decoder.generate([1, 2], 24, Sampling(1.0)).steps
    values = watch.values
    assert set(values) == {"k_seq", "khisti", "match", "multi_round", "multipath_block", "naive", "traversal"}
    emitted = [len(step.tokens) for step in steps]
    for name, expected in values.items():
        assert expected == pytest.approx(emitted[::every], abs=1e-4), name
    assert len(set(emitted[::every])) > 1


def test_the_time_of_expectations_is_not_the_decoders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def look() -> float:
        clock[0] += 0.001
        return clock[0]

    def slow(*known: Any) -> float:
        clock[0] += 1000
        return 1.0

    monkeypatch.setattr(expectation.time, "perf_counter", look)
    monkeypatch.setattr(expectation, "block_efficiency", slow)
    asked = ("--policies", "chains:2", "--verifiers", "naive", "--temperatures", "1", "--limit", "1")
    assert command(folder, tmp_path / "a.jsonl", *asked) == 0
    (record,) = lines(tmp_path / "a.jsonl")
    assert clock[0] > 1000 and record["answers"][0]["choices"][0]["wall_time"][0] < 1


def test_what_was_promised_is_compared_step_by_step() -> None:
    """Steps that a stop may have trimmed are left out, and of one question there is no interval."""

    def answer(accepted: list[int], expected: list[float], reason: str) -> dict[str, Any]:
        one = {
            "accept_lengths": [length + 1 for length in accepted],
            "expected_lengths": [length + 1 for length in expected],
            "decoding_steps": [len(accepted)],
            "finish_reason": [reason],
        }
        return {"choices": [one]}

    one, other = answer([1, 3, 0], [2.0, 3.0, 9.0], "stop"), answer([2, 2], [1.0, 2.0], "length")
    assert promise([one]) == {"ratio": 5 / 4, "interval": None}
    both = promise([one, other])
    assert both is not None and both["ratio"] == 1 and both["interval"] == pytest.approx([3 / 4, 5 / 4])
    assert promise([answer([0, 0], [1.0, 1.0], "length")]) is None
    seldom = promise([answer([0], [2.0], "length"), answer([1], [1.0], "length")])  # half the resamples accept nothing
    assert seldom is not None and seldom["interval"][1] == 4


@pytest.mark.slow
def test_plots_come_from_the_file_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    assert command(folder, output, "--policies", "opt:0.1") == 0
    (greedy,) = lines(output)

    def like(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
        cell = Combination(**{**record["cell"], **changes})
        return {**record, "question_id": cell.key, "cell": vars(cell)}

    records = [like(greedy, policy=f"opt:{t}", budget=n) for t in (0.1, 0.3, 0.6) for n in (5, 25)]
    records += [like(greedy, policy=name, sharpening="either", budget=25) for name in ("binary", "sequoia")]
    records += [like(greedy, policy="opt:0.1", temperature=t, verifier="match", budget=25) for t in (0.5, 1.0)]
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    capsys.readouterr()
    monkeypatch.setattr(compare, "Bench", None)
    assert compare.main(["--output", str(output), "--plots", str(tmp_path / "plots")]) == 0
    found = {path.name for path in (tmp_path / "plots").iterdir()}
    structures = "structures_" + re.sub(r"\W+", "_", f"lm:{folder}/draft")
    wanted = ("length_by_budget", structures)
    assert found == {f"compare_{name}{kind}" for name in wanted for kind in (".png", ".svg", ".pdf")}
    assert compare.main(["--output", str(tmp_path / "absent.jsonl")]) == 2


def test_no_panel_is_alone_in_a_row() -> None:
    rows = [len({axes.get_subplotspec().rowspan.start for axes in panels_of(count)[1]}) for count in (4, 5, 9)]
    assert rows == [1, 2, 3] and panels_of(5)[1][0].get_gridspec().ncols == 3


def lab(colour: str) -> np.ndarray:
    """A colour where distances are what an eye sees: CIE L*a*b*."""
    share = np.array(to_rgb(colour))
    light = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = light @ np.array([[0.4339, 0.2126, 0.0177], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8729]])
    root = np.cbrt(np.maximum(seen, 1e-9))
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def test_no_two_lines_of_a_picture_look_alike() -> None:
    colours = [lab(COLOURS[name]) for name in registry.POLICIES]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) > 20


def test_several_of_one_kind_grow_darker() -> None:
    shades = _shades(["opt:0.2", "binary", "opt:0.4", "opt:0.7"])
    assert shades["opt:0.2"] == COLOURS["opt"] and shades["binary"] == COLOURS["binary"]
    light = [lab(shades[f"opt:{threshold}"])[0] for threshold in (0.2, 0.4, 0.7)]
    assert light[0] > light[1] + 10 > light[2] + 20


@pytest.mark.slow
def test_both_drafters_of_the_embedded_pair_bare_and_fitted(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    sizes = f"--limit 1 --max-new-tokens 6 --budgets 5 --dtype float32 --device cpu --output {output}".split()
    asked = ["--policies", "opt:0.1", "--drafter", "eagle:demo,lm:demo", "--sharpening", "bare,fitted"]
    assert compare.main([*sizes, *asked]) == 0
    cells = [(record["cell"]["drafter"], record["cell"]["sharpening"]) for record in lines(output)]
    assert cells == [(drafter, how) for drafter in ("eagle:demo", "lm:demo") for how in ("bare", "fitted")]
    assert all(record["figures"]["same_as_plain"] == [1, 1] for record in lines(output))
    lengths = [record["answers"][0]["choices"][0]["expected_lengths"][0] for record in lines(output)]
    assert lengths[0] < lengths[1] and lengths[2] < lengths[3]


@pytest.mark.parametrize("flag", [["--drafter", "lm:demo"], ["--temperatures", "0"], ["--policies", "binary"]])
def test_a_preset_does_not_swallow_the_flags_of_a_grid(flag, capsys):
    assert compare.main(["--preset", "paper", *flag]) == 2
    assert f"leave out {flag[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--policies", "opt,beam"), "unknown policy 'beam'; there are binary, "),
        (("--policies", "opt", "--verifiers", "best"), "unknown verifier 'best'; there are block"),
        (("--policies", "opt:0.2:3:4"), "opt takes threshold, max_depth, got 3 numbers"),
        (("--policies", "chains:two"), "must be numbers: k"),
        (("--policies", "opt", "--budgets", "0"), "at least 1 node, got 0"),
        (("--policies", "opt", "--budgets", "6,x"), "not a comma list of numbers: '6,x'"),
        (("--policies", "opt", "--budgets", "6,4.5"), "not a whole number: 4.5"),
        (("--policies", "opt", "--budgets", "1000000000"), "at most 4096, got 1000000000"),
        (("--policies", "opt", "--temperatures", "-1"), "got -1"),
        (("--policies", "opt", "--sharpening", "fitted"), "no calibration is stored"),
        (("--policies", "opt", "--sharpening", "sharpened"), "unknown 'sharpened'; there are bare, fitted"),
        (("--policies", "opt", "--limit", "0"), "--limit must be at least 1"),
        ((), "nothing to do"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str
) -> None:
    assert command(folder, tmp_path / "a.jsonl", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"question_id": 1, "choices": []}, "is another command's"),
        ({"question_id": "x", "cell": None}, "did not write: TypeError"),
        ({"question_id": "x", "cell": {"sharpening": "bare"}, "figures": {}}, "did not write: KeyError"),
        ({"question_id": "x", "cell": {"policy": "opt"}, "figures": {}}, "did not write: KeyError"),
    ],
)
def test_an_output_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], named: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert compare.main(["--output", str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}") and named in error and error.count("\n") == 1


def test_a_difference_is_paired() -> None:
    """Two cells that differ by the same step count on every question: the interval is a point where lengths are."""

    def record(steps: list[int]) -> dict[str, Any]:
        choices = [{"new_tokens": [12], "decoding_steps": [n]} for n in steps]
        return {"answers": [{"question_id": i, "choices": [choice]} for i, choice in enumerate(choices)]}

    found = difference(record([3, 3, 3]), record([4, 4, 4]))
    assert found == {"difference": 1.0, "interval": [1.0, 1.0]}
    mixed = difference(record([3, 6, 2]), record([4, 6, 3]))
    assert mixed["difference"] == pytest.approx(36 / 11 - 36 / 13)
    assert mixed["interval"][0] == 0 and mixed["interval"][1] == pytest.approx(2.0)


@pytest.mark.slow
def test_the_report_sets_all_drafters_beside_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every drafter, plain decoding and transformers' own ways, with what each weighs; a killed run keeps its peers."""
    output, drafters = tmp_path / "a.jsonl", f"lm:{folder}/draft,ngram,recycling"
    (folder / "draft" / "training.json").write_text('{"minutes": 2.5}')
    files = f"--base-model-path {folder}/target --question-file {folder}/prompts.jsonl --drafter {drafters}"
    sizes = "--limit 2 --max-new-tokens 8 --budgets 6 --sharpening bare --dtype float64 --device cpu --temperatures 0,1"
    asked = [*f"{files} {sizes} --output {output}".split(), "--policies", "opt:0.1", "--peers", "--json"]
    assert compare.main(asked) == 0
    *printed, machine = capsys.readouterr().out.splitlines()
    assert report.main([str(output), "--json"]) == 0
    *told, figures = capsys.readouterr().out.splitlines()
    assert told == printed and json.loads(machine) == json.loads(figures) | {"refused": []}, "one table, one reading"
    block = "\n".join(told).split("\n\n")[1].splitlines()
    assert block[0] == "temperature 0, at most 6 nodes, 2 questions:" and block[1].rstrip().endswith("trained min")
    rows = {row.split("  ")[0]: row for row in block[2:]}
    assert rows[f"lm:{folder}/draft"].endswith(" 2.5") and rows["recycling"].endswith(" 0.0") and len(rows) == 3
    found = {peer["name"]: peer for peer in json.loads(figures)["peers"] if peer["temperature"] == 0}
    assert all(peer["exact_match"]["rate"] == 1 and peer["speed_up"]["micro"] > 0 for peer in found.values())
    assert found["plain decoding"]["tokens_per_step"] == 1
    names = {"plain decoding", "transformers", "transformers, prompt lookup", "transformers, assisted"}
    assert names == found.keys() and names <= {line.split("  ")[0] for line in told}
    # At temperature 0 whatever decodes says the same.
    said = [record["peers"] for record in lines(output) if "peers" in record and record["temperature"] == 0]
    texts = {name: [answer["choices"][0]["turns"] for answer in answers] for name, answers in said[0].items()}
    assert all(text == texts["plain decoding"] for text in texts.values())
    draft = next(record for record in lines(output) if record.get("cell", {}).get("drafter", "").startswith("lm:"))
    size = (folder / "draft" / "model.safetensors").stat().st_size
    assert (draft["figures"]["weights_bytes"], draft["figures"]["training_minutes"]) == (size, 2.5)
    before = output.read_bytes()
    assert compare.main(asked) == 0 and output.read_bytes() == before


def test_what_a_drafter_weighs_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    for name, size in (("a", 5), ("b", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * size)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "a" / "training.json").write_text('{"minutes": 3}')
    pair = f"eagle:{tmp_path}/a+store:{tmp_path}/b"
    assert footprint(f"eagle:{tmp_path}/a") == {"weights_bytes": 5, "training_minutes": 3.0}
    for spec in (f"graft:2:{pair}", f"rasd:{pair}"):
        assert footprint(spec) == {"weights_bytes": 12, "training_minutes": None}
    assert footprint("ngram") == {"weights_bytes": 0, "training_minutes": 0.0}
    assert footprint(f"lm:{tmp_path}/absent")["weights_bytes"] is None
    (tmp_path / "a" / "training.json").write_text('{"minutes": "long"}')
    with pytest.raises(CheckpointError, match=r"training.json does not say the minutes"):
        footprint(pair.partition("+")[0])


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["graft:1:lm:{}/draft+recycling", "rasd:lm:{}/draft+recycling"])
def test_a_table_that_learns_begins_each_line_with_nothing(drafter: str, folder: Path, tmp_path: Path) -> None:
    """The same questions come in every line: what was learnt of their answers in one would be known in the next."""

    def lengths(budgets: str) -> dict[str, list]:
        output = tmp_path / f"{budgets}.jsonl"
        asked = ("--policies", "opt:0", "--drafter", drafter.format(folder), "--budgets", budgets)
        assert grid(folder, output, *asked, "--max-new-tokens", "24") == 0
        return {
            line["question_id"]: [answer["choices"][0]["accept_lengths"] for answer in line["answers"]]
            for line in lines(output)
        }

    assert lengths("4,6") == lengths("6,4")


@pytest.mark.slow
def test_what_learns_may_be_warmed_on_other_questions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("asked", "aabbcc"), ("others", "bbbbcc")):
        (tmp_path / name).write_text(json.dumps({"question_id": 1, "turns": [text]}) + "\n")
    asked = ("--policies", "opt:0", "--drafter", "recycling", "--question-file", f"{tmp_path}/asked")
    steps = []
    for warm in ((), ("--warm-set", f"{tmp_path}/others")):
        output = tmp_path / f"{len(warm)}.out"
        assert grid(folder, output, *asked, *warm, "--max-new-tokens", "24") == 0
        (line,) = lines(output)
        steps.append(line["figures"]["steps"])
    assert steps[1] < steps[0]
    assert grid(folder, tmp_path / "refused.out", *asked, "--warm-set", f"{tmp_path}/asked") == 2
    assert "are compared themselves" in capsys.readouterr().err
