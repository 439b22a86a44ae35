"""The one-off studies that have no test file of their own."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluation import eval_opt_classic
from evaluation.timing import Timed, Timings
from experiments import (
    canonical_price,
    certificates,
    contested,
    early_exit,
    host_time,
    hybrids,
    linear_kernels,
    quantised,
    surviving_edges,
    systems,
    turns,
    vocabulary,
)
from opt_tree.backends.prepacked import _works


@pytest.mark.slow
def test_the_turns_of_a_conversation(capsys: pytest.CaptureFixture) -> None:
    short = ["--dtype", "float32", "--max-new-tokens", "12", "--rounds", "1", "--limit", "2"]
    assert turns.main([*short, "--drafter", "eagle:demo", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (first["turn"], second["turn"]) == (1, 2) and second["prompt"] > first["prompt"] + 12
    assert second["kept, CPU ms"] > 0 and second["anew, CPU ms"] > 0
    assert turns.main(["--rounds", "0"]) == 2
    assert "rounds must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_systems_beside_opt_tree_alone(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many nodes and layers, and plain decoding's texts; a method of twice the seconds is half as fast."""
    real = systems.interleave

    def timed(*given: Any) -> Timings:
        names = real(*given).runs
        return Timings({name: [[Timed([1] * 8, 2.0 if name == systems.PLAIN else 4.0)]] for name in names})

    monkeypatch.setattr(systems, "interleave", timed)
    short = ["--dtype", "float32", "--limit", "1", "--max-new-tokens", "8"]
    assert systems.main([*short, "--systems", "parallelspec,delayed", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    inside, alone, *_ = found["parallelspec"]
    assert (inside["method"], inside["= plain"], alone["= plain"]) == ("parallelspec_eagle", "1/1", "1/1")
    assert 0 < inside["nodes/step"] <= 25 and 0 < inside["draft forwards/step"] <= 1
    assert (inside["tokens/s"], inside["x plain"]) == (2, 0.5)
    assert alone["method"] == f"OPT-Tree, {round(inside['nodes/step'])} nodes, 5 layers"
    assert found["delayed"][0]["method"] == "delayed" and found["delayed"][0]["nodes/step"] <= 14
    assert systems.main(["--systems", "rasp"]) == 2
    assert "there is no system rasp" in capsys.readouterr().err


@pytest.mark.slow
def test_what_sampling_costs_at_a_vocabulary(capsys: pytest.CaptureFixture) -> None:
    assert vocabulary.main(["--vocabulary", "500", "--steps", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["verifier"] for row in rows] == ["match", "traversal", "without_replacement"]
    assert all(0 < row["nodes"] <= 60 and row["outside the forwards ms"] > 0 for row in rows)
    assert vocabulary.main(["--steps", "0"]) == 2
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_what_a_step_costs_the_host(capsys: pytest.CaptureFixture) -> None:
    assert host_time.main(["--nodes", "4,20", "--steps", "2", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    kinds = ("host", "device", "captured")
    assert [(row["nodes"], row["steps"]) for row in rows] == [(nodes, kind) for nodes in (4, 20) for kind in kinds]
    small, other, few, large, wide, same = (row["operations"] for row in rows)
    assert max(small, large) < other == wide, "as many operations, whatever the tree"
    assert few == same <= 3, "what a step begins with is sent and copied, and no more"
    assert host_time.main(["--rounds", "0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["delta nets", "mamba-2"])
def test_a_hybrid_scores_a_tree_in_one_forward(
    layers: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"HIDDEN": 128, "LAYERS": 4, "VOCABULARY": 200, "CONTEXT": 9, "ROWS": (1, 7)}
    for name, value in small.items():
        monkeypatch.setattr(hybrids, name, value)
    assert hybrids.main(["--layers", layers, "--repeats", "1", "--json"]) == 0
    one, seven = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert one["paths"] == one["rows path by path"] == 1 < seven["paths"] and seven["rows path by path"] > 7
    assert float(seven["logits off by"]) < 1e-3


@pytest.mark.slow
def test_how_much_the_linear_programme_is_worth(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contested, "CONTESTED", (2, 8))
    short = ["--dtype", "float32", "--limit", "1", "--max-new-tokens", "6", "--laws", "2"]
    assert contested.main([*short, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    rounds, two, eight, most = (row["accepted"] for row in rows)
    assert 0 < two <= eight + 1e-9 <= most + 2e-9 and 0 < rounds <= most + 1e-9
    assert two < most - 1e-6
    assert contested.main([*short, "--top-k", "3", "--json"]) == 0
    *_, eight, most = (row["accepted"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"])
    assert eight == pytest.approx(most, abs=1e-6), "over all six tokens that are left the programme is optimal"
    assert contested.main(["--laws", "0"]) == 2
    assert "laws must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_three_readings_of_a_drafter(capsys: pytest.CaptureFixture) -> None:
    """The trees of each along the same texts; what nobody mapped stays as it is."""
    short = ["--dtype", "float32", "--drafter", "lm:demo", "--limit", "2", "--fit-limit", "2"]
    assert surviving_edges.main([*short, "--max-new-tokens", "16", "--nodes", "6", "--json"]) == 0
    bare, sharpened, mapped = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (bare["reading"], sharpened["reading"][:4], mapped["reading"][:3]) == ("bare", "temp", "map")
    assert bare["E(A)"] < min(sharpened["E(A)"], mapped["E(A)"]), "a drafter of this family is too modest"
    assert surviving_edges.main(["--fit-limit", "0"]) == 2


def test_probabilities_that_hold_are_mapped_to_themselves() -> None:
    likely = np.repeat([0.2, 0.6], 10)
    held = surviving_edges.Survival.fit(np.log(likely), np.r_[[1] * 2, [0] * 8, [1] * 6, [0] * 4])
    assert (held.slope, held.shift) == pytest.approx((1, 0), abs=1e-3)
    assert held(torch.tensor([0.0, -torch.inf])).tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize("seed", range(20))
def test_over_all_pairs_the_programme_reaches_the_bound(seed: int) -> None:
    """With two children no rule accepts more (arXiv:2410.18234)."""
    target, draft = np.random.default_rng(seed).dirichlet(np.full(6, 0.5), 2)
    most = contested.bound(target, draft)
    assert contested.by_duel(target, draft, 6) == pytest.approx(most, abs=1e-6)
    assert contested.by_duel(target, draft, 2) <= most + 1e-9 and contested.by_rounds(target, draft) <= most + 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_the_price_of_canonical_arithmetic(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical_price, "NODES", (5,))
    short = ["--max-new-tokens", "6", "--prompts", "2", "--contexts", "20,5000", "--json"]
    assert canonical_price.main(short) == 0
    said = capsys.readouterr()
    first, second = json.loads(said.out.splitlines()[-1])["rows"]
    assert (first["nodes"], second["nodes"]) == ("plain", 5) and second["as plain, canonical"] == "2 of 2"
    assert second["tokens/step, canonical"] > 1 == first["tokens/step, canonical"]
    ratio = second["step ms, canonical"] / second["step ms, today"]
    assert second["step ms, canonical / today"] == pytest.approx(ratio)
    assert "5000 tokens: " in said.err
    assert canonical_price.main(["--contexts", "0"]) == 2
    assert "--contexts must be at least 1 each" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_certificates_of_every_way(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All equal, and one bit of one row is seen. Each way's figures are on disk before the next one begins."""
    output = tmp_path / "certificates.json"

    def found() -> dict[str, dict[str, int]]:
        return {row["way"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}

    short = ["--limit", "2", "--max-new-tokens", "5", "--lanes", "2", "--also", "store:demo", "--json"]
    short += ["--output", str(output)]
    decoded, kept = certificates.decoded, list[int]()

    def watched(*given: Any) -> list[Any]:
        kept.append(len(json.loads(output.read_text())["rows"]) if output.exists() else 0)
        return decoded(*given)

    monkeypatch.setattr(certificates, "decoded", watched)
    assert certificates.main(short) == 0
    rows = found()
    assert {"plain", "lm:demo, 60 nodes", "store:demo, 12 nodes", "2 lanes, 12 nodes"} < rows.keys()
    assert kept == list(range(len(rows))) and json.loads(output.read_text())["rows"] == list(rows.values())
    assert all(row["texts as plain"] == 2 for row in rows.values())
    assert all(row["rows as one prefill"] == row["rows"] == 10 for way, row in rows.items() if "lanes" not in way)

    digests, ways, seen = certificates.digests, certificates.ways_of, [0]

    def other(logits: Tensor) -> list[bytes]:
        seen[0] += 1
        return digests(-logits if seen[0] == 1 else logits)

    monkeypatch.setattr(certificates, "digests", other)
    monkeypatch.setattr(certificates, "ways_of", lambda pairs, options: islice(ways(pairs, options), 1))
    assert certificates.main(short) == 1
    plain = found()["plain"]
    assert (plain["rows"], plain["rows as one prefill"]) == (10, 9)
    assert certificates.main([*short, "--no-exact"]) == 2
    assert "not canonical" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("kernel", "quantised_kernel")
def test_what_a_target_of_fewer_bits_costs_and_says(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_PREFILL", 20)
    monkeypatch.setattr(quantised, "_BEHIND", 20)
    text, answers = tmp_path / "text.jsonl", tmp_path / "plain.jsonl"
    text.write_text(json.dumps({"text": "The sky is blue because of the light. " * 60}))
    ask = ["--bench-name", "demo", "--limit", "2", "--dtype", "bfloat16", "--max-new-tokens", "16", "--method", "none"]
    assert eval_opt_classic.main([*ask, "--output", str(answers)]) == 0
    few = ["--rows", "1,3", "--rounds", "3", "--limit", "2"]
    assert quantised.main([*few, "--text", str(text), "--answers", str(answers), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [line["weights"] for line in found["times"]] == ["bfloat16", "int8", "int4"]
    assert all(line["3 rows, ms"] > 0 and line["3: times the limit"] > 0.5 for line in found["times"])
    full, eight, four = found["quality"]
    assert full["of bfloat16's tokens"] == 1 and full["tokens"] == eight["tokens"]
    assert 0.7 < four["of bfloat16's tokens"] <= 1 and abs(eight["perplexity"] / full["perplexity"] - 1) < 0.05
    assert quantised.main([*few, "--text", str(tmp_path / "absent")]) == 2
    assert "no file at" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("quantised_kernel")
@pytest.mark.skipif(not _works(torch.bfloat16), reason="this CPU multiplies no packed bfloat16")
def test_kernels_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(linear_kernels, "SHAPES", {"smollm2": [(128, 64, 2)]})
    monkeypatch.setattr(linear_kernels, "_COLD", 1e4)
    assert linear_kernels.main(["--rows", "1,6", "--rounds", "1", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["kernels"]
    assert len(lines) == len(linear_kernels.KERNELS) and all(line["6 rows, ms"] > 0 for line in lines)


@pytest.mark.slow
def test_an_early_exits_chains_and_its_posteriors(capsys: pytest.CaptureFixture) -> None:
    """A step of k tokens costs k (depth + 1) layers and all of the target's; plain decoding's texts are cut alike."""
    short = ["--dtype", "float32", "--limit", "2", "--max-new-tokens", "12", "--longest", "3", "--seeds", "2"]
    assert early_exit.main([*short, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["chain"] for row in rows] == ["of 1", "of 2", "of 3", "Beta", "calibrated"]
    for row in rows:
        tokens, nodes = row["tokens/step"], row["nodes/step"]
        if row["chain"].startswith("of"):
            assert row["x plain, 4/12"] == pytest.approx(tokens * 12 / (nodes * 5 + 12))
            assert int(row["chain"][3:]) - 1 < nodes <= int(row["chain"][3:])  # less at a text's end
        assert 1 < tokens <= nodes + 1
    assert rows[0]["tokens/step"] <= rows[1]["tokens/step"] <= rows[2]["tokens/step"]
    assert early_exit.main(["--drafter", "eagle:demo", "--limit", "1"]) == 2
    assert "--drafter eagle:demo is no early exit" in capsys.readouterr().err
