"""The evaluation along stored texts: what it says of a policy is what decoding with that policy does."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.real_pair import __main__ as real_pair
from experiments.real_pair import measure, sampled
from experiments.real_pair import plots as real_pair_plots
from experiments.real_pair.measure import lines
from experiments.real_pair.questions import asked, in_rounds
from experiments.real_pair.tables import Along, more, rate
from experiments.real_pair.taken import Way, taken_of
from opt_tree import Decoder, OptTree, Pair, Static, load_pair
from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY
from opt_tree.methods.policies.acceptance_rates import AcceptanceRates
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sequoia import sequoia_tree
from opt_tree.models.canonical import make_canonical
from opt_tree.tools.along import along
from opt_tree.tools.stored_text import written

WAYS = {
    "threshold 0": Way(OptTree(40, 0)),
    "smaller": Way(OptTree(8, 0.2)),
    "sharpened": Way(OptTree(30, 0.2), 0.6),
    "beam": Way(Eagle2(6, 3, 20)),
    "fixed": Way(sequoia_tree(AcceptanceRates((0.6, 0.2, 0.1)), 20, 4)),
    "chain": Way(Static.chain(5)),
    "plain": Way(Static.empty()),
}


@pytest.fixture(scope="module")
def pair(kernel: None) -> Pair:
    pair = load_pair("demo", drafter="lm:demo", bare=True, canonical=True, dtype="float32")
    make_canonical(pair.drafter.models[0])
    return pair


@pytest.mark.slow
def test_steps_are_kept_as_decoding_takes_them(pair: Pair) -> None:
    """Lengths, draft forwards, nodes and E(A), step by step, by the drafter sharpened or not."""
    prompt = pair.encode("Why is the sky blue?")
    text = written(pair.target, prompt, 40, pair.stop)
    for name, (policy, temperature) in WAYS.items():
        drafter = pair.drafter.calibrated(temperature)
        found = taken_of(text, along(drafter, text, {name: policy})[name])
        real = Decoder(pair.target, drafter, policy).generate(prompt, 40, stop=pair.stop)
        assert real.tokens == text.tokens
        assert [one.emitted for one in found] == real.accept_lengths, name
        assert [one.expected for one in found] == [step.expected_accepted for step in real.steps]
        assert [one.nodes for one in found] == [step.tree.nodes for step in real.steps]
        assert [one.forwards for one in found] == [step.draft_forwards for step in real.steps]
        assert [one.place + one.emitted for one in found][-1] == len(text.tokens)


@pytest.mark.slow
def test_the_whole_command_goes_on_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, kernel: None
) -> None:
    monkeypatch.setattr(measure, "load", functools.cache(measure.load))
    command = ["--sets", "demo", "--count", "4", "--max-new-tokens", "10", "--output", str(tmp_path), "--json"]
    assert real_pair.main([*command, "--minutes", "0", "--rounds", "3"]) == 2
    assert "nothing was drafted" in capsys.readouterr().err
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 3
    assert real_pair.main([*command, "--minutes", "0"]) == 2 and "is empty" in capsys.readouterr().err
    texts = (tmp_path / "texts.jsonl").read_text()
    assert len(texts.splitlines()) == 4 and (tmp_path / "fit.json").exists()
    assert real_pair.main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["texts"] == 3 and (tmp_path / "texts.jsonl").read_text() == texts
    assert [Path(path).stat().st_size > 5000 for path in found["pictures"]] == [True]
    monkeypatch.setattr(measure, "draw_all", lambda texts, folder: [])
    steps = (tmp_path / "steps.jsonl").read_text()
    assert real_pair.main([*command, "--check", "1", "--sampled", "1"]) == 0  # nothing is missing, nothing is written
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    checked = said["checked"]
    assert checked["texts"] == checked["texts equal"] == 6 and checked["steps"] == checked["steps equal"] > 6
    assert checked["differ"] == []
    assert (tmp_path / "steps.jsonl").read_text() == steps
    save_file({"d2t": torch.ones(2048, dtype=torch.int32)}, tmp_path / VOCABULARY)
    assert real_pair.main([*command, "--bare", "--only", "opt 60", "--trimmed", str(tmp_path)]) == 0
    assert (tmp_path / "steps.trimmed.jsonl").exists() and (tmp_path / "steps.jsonl").read_text() == steps
    drawn = (tmp_path / "sampled.jsonl").read_text()
    alone = ["--bare", "--only", "opt 60", "--check", "1", "--sampled", "1"]  # one policy of those that are there
    assert real_pair.main([*command, *alone]) == 0 and (tmp_path / "sampled.jsonl").read_text() == drawn
    printed = capsys.readouterr().out
    assert "1 policies" in printed and json.loads(printed.splitlines()[-1])["checked"]["texts"] == 1
    for line in map(json.loads, drawn.splitlines()):
        assert line["tokens"].keys() == line["steps"].keys() == sampled.WAYS.keys()
        assert len({tuple(tokens) for tokens in line["tokens"].values()}) == 1
        for name, steps in line["steps"].items():
            assert sum(step[0] for step in steps) == len(line["tokens"][name]) > 0
    found = next(one for one in said["tables"] if one["title"] == "Temperature 1")
    assert [row[-1] for row in found["rows"]] == ["1 of 1"] * len(sampled.WAYS)
    for text in Along.all_of(lines(tmp_path / "steps.jsonl")):
        length = next(len(line["tokens"]) for line in lines(tmp_path / "texts.jsonl") if line["id"] == text.id)
        assert {text.sums(name)[0] for name in text.steps} == {length}
    for one in json.loads((tmp_path / "tables.json").read_text()):
        assert one["rows"] and {len(row) for row in one["rows"]} == {len(one["columns"])}


def test_the_dearest_policies_are_run_where_they_are_named() -> None:
    ways = dict.fromkeys(("opt 60", "opt 500", "opt 60, fitted"), WAYS["plain"])
    assert measure.wanted(ways, ["opt"]).keys() == {"opt 60", "opt 60, fitted"}
    assert measure.wanted(ways, ["opt 500"]).keys() == {"opt 500"}


def test_a_policy_s_name_means_it_alone_and_a_part_of_one_means_several() -> None:
    ways = dict.fromkeys(("opt 8", "opt 60", "opt 60/6", "opt 60, fitted", "opt 60/6, fitted"), Way(Static.chain(1)))
    assert list(measure.wanted(ways, ["opt 60"])) == ["opt 60", "opt 60, fitted"]
    assert list(measure.wanted(ways, ["opt 60/", "opt 8"])) == ["opt 8", "opt 60/6", "opt 60/6, fitted"]
    assert not measure.wanted(ways, ["opt 7"])


def test_the_picture_s_axis_ends_where_its_lines_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that some text lacks has no point, and no tick either."""
    row = [0, 4, 3, True, 2.5, 4, 2, 3, 5]
    names = ("opt 8", "opt 25", "opt 60", "opt 60, fitted")
    both = [{"set": "s", "id": n, "steps": {name: [row, row] for name in names}} for n in ("1", "2")]
    both[0]["steps"]["opt 140"] = [row]
    made = []
    monkeypatch.setattr(real_pair_plots.plots, "save", lambda figure, path: made.append(figure) or path)
    real_pair_plots.draw_all(Along.all_of(both), tmp_path)
    left = made[0].axes[0]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["8", "25", "60"]
    assert left.get_xlim()[1] < 70


@pytest.mark.slow
def test_both_models_can_be_quantised(quantised_kernel: None, capsys: pytest.CaptureFixture) -> None:
    lm, _ = measure.load("demo", "target", "int4")
    assert lm.canonical and {type(layer).__name__ for layer in lm.model.modules()} >= {"QuantisedLinear"}
    assert real_pair.main(["--weights", "int3"]) == 2 and "int8 or int4" in capsys.readouterr().err


def test_at_temperature_1_rates_are_of_the_same_texts() -> None:
    """Ratios of sums, the difference from the chain of ten, and a text that is another tree's."""

    def line(name: str, chain: list[int], others: list[int]) -> dict:
        steps = {way: [[n, 2, 1.5] for n in (chain if way == "chain 10" else others)] for way in sampled.WAYS}
        return {"set": name, "id": "1", "steps": steps, "tokens": {way: [1] for way in sampled.WAYS} | {"opt 60": [2]}}

    found = sampled.sampled_table([line("a", [2, 2], [4]), line("b", [1, 1, 1, 1], [2, 2])])
    rows = {row[1]: dict(zip(found["columns"], row, strict=True)) for row in found["rows"]}
    assert rows[60]["tokens a step"] == round(8 / 3, 2) and (rows[60]["a"], rows[60]["b"]) == (4, 2)
    assert rows[60]["less the chain of ten"] == round(8 / 3 - 8 / 6, 2) and rows[10]["less the chain of ten"] is None
    assert rows[60]["same text as the chain of six"] == "0 of 2" and rows[8]["E(A)"] == 1.5


def test_rates_are_ratios_of_sums() -> None:
    def text(name: str, lengths: list[int], others: list[int]) -> Along:
        rows = {"a": [[0, length, length - 1, True, 1.0, 4, 2, 3, 5] for length in lengths]}
        rows["b"] = [[0, length, length - 1, True, 1.0, 4, 2, 2, 3] for length in others]
        return Along.all_of([{"set": "s", "id": name, "steps": rows}])[0]

    texts = [text("1", [4, 4], [8]), text("2", [12], [6, 6])]
    assert rate(texts, "a")[0] == pytest.approx(20 / 3) and rate(texts, "a", 2)[0] == 3
    assert rate(texts, "a", 4)[0] == pytest.approx(1 / 3)
    assert more(texts, "b", "a")[0] == pytest.approx(20 / 3 - 20 / 3)


def test_what_is_asked(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    turn = "Complete the code I provided.\n\ndef f(x):\n    '''Return x.'''\n"
    rows = [json.dumps({"question_id": n, "category": "code", "turns": [turn]}) for n in range(20)]
    (tmp_path / "humaneval" / "question.jsonl").write_text("\n".join(rows))
    body, whole = (asked(name, 10, str(tmp_path), False) for name in ("humaneval", "humaneval_repeated"))
    assert body[0].given == "```python\ndef f(x):\n    '''Return x.'''\n" and whole[0].given == ""
    assert body[0].message == whole[0].message and "I provided" not in body[0].message
    assert [one.id for one in body] == [str(2 * n) for n in range(10)] and [one.fit for one in body].index(True) == 2
    assert [(one.set, one.id) for one in in_rounds([body, whole])][:3] == [
        ("humaneval", "0"),
        ("humaneval_repeated", "0"),
        ("humaneval", "2"),
    ]
