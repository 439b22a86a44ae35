"""The first call on a GPU, tried on a CPU: what it writes, when, and what a failing part leaves."""

import json

import pytest

from experiments import gpu_first_light as first_light
from experiments.gpu_first_light import ESTIMATES, PARTS, Place, Row


def test_each_part_is_on_disk_before_the_next_begins(tmp_path, monkeypatch, capsys):
    output, seen = tmp_path / "light", []

    def fails(place: Place) -> list[Row]:
        """Fails."""
        seen.append(json.loads(output.with_suffix(".json").read_text())["parts"])
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(PARTS, "exact", fails)
    status = first_light.main(["--dry-run", "--parts", "machine,exact", "--output", str(output)])
    assert status == 1, "a part failed"
    assert seen[0].keys() == {"machine"} and seen[0]["machine"]["rows"][0]["launch us"] > 0
    found = json.loads(output.with_suffix(".json").read_text())
    assert found["dry_run"] and found["parts"].keys() == {"machine", "exact"}
    assert found["parts"]["exact"]["error"] == "RuntimeError: no such kernel"
    text = output.with_suffix(".md").read_text()
    assert "A dry run: its times mean nothing" in text and "no such kernel" in text and "launch us" in text
    assert "exact failed: RuntimeError: no such kernel" in capsys.readouterr().out


def test_all_parts_fit_into_the_time():
    assert next(iter(PARTS)) == "exact" and list(ESTIMATES) == list(PARTS)
    assert sum(ESTIMATES.values()) < 600


def test_no_part_begins_when_the_time_is_over(tmp_path):
    output = tmp_path / "light"
    assert first_light.main(["--dry-run", "--parts", "machine,exact", "--minutes", "0", "--output", str(output)]) == 0
    parts = json.loads(output.with_suffix(".json").read_text())["parts"]
    assert [part["error"] for part in parts.values()] == ["not begun: 0 minutes were over"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "all", "--dry-run"], "no part 'all'"),
        (["--shapes", "7b,9b", "--dry-run"], "no shape '9b'; there are demo, smollm2, 1b, 7b"),
        ([], "there is no CUDA device here"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert first_light.main(arguments) == 2
    assert message in capsys.readouterr().err
