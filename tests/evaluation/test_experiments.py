"""The one-off studies that have no test file of their own."""

import json

import pytest

from experiments import turns, vocabulary


def test_the_turns_of_a_conversation(capsys: pytest.CaptureFixture) -> None:
    short = ["--dtype", "float32", "--max-new-tokens", "12", "--rounds", "1", "--limit", "2"]
    assert turns.main([*short, "--drafter", "eagle:demo", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (first["turn"], second["turn"]) == (1, 2) and second["prompt"] > first["prompt"] + 12
    assert second["kept, CPU ms"] > 0 and second["anew, CPU ms"] > 0
    assert turns.main(["--rounds", "0"]) == 2
    assert "rounds must be at least 1" in capsys.readouterr().err


def test_what_sampling_costs_at_a_vocabulary(capsys: pytest.CaptureFixture) -> None:
    assert vocabulary.main(["--vocabulary", "500", "--nodes", "12", "--steps", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["verifier"] for row in rows] == ["match", "traversal", "without_replacement"]
    assert all(0 < row["nodes"] <= 12 and row["outside the forwards ms"] > 0 for row in rows)
    assert vocabulary.main(["--temperature", "0"]) == 2
    assert "greedy decoding draws nothing" in capsys.readouterr().err
