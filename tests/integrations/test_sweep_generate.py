"""The sweep over the options of `generate`: what is equal, refused and failed is counted as such."""

import json
from typing import Any

import pytest
from integrations import sweep_generate as sweep

from opt_tree.integrations import hf_generate

pytestmark = pytest.mark.slow

FEW = ("greedy, a dict", "num_beams", "a padded batch", "token_healing")


def here(name: str, seconds: int, judge: Any) -> tuple[str, str]:
    """Judge in this process."""
    return judge(name)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    every = sweep.calls
    monkeypatch.setattr(sweep, "calls", lambda made: (call for call in every(made) if call[0] in FEW))


def test_calls_are_counted_by_what_came_of_them(capsys, tmp_path):
    assert sweep.main(["llama", "bloom", "jamba", "blt", "--json", str(tmp_path / "found.json")], here) == 0
    said = capsys.readouterr().out
    assert "2 architectures, 8 calls" in said
    counts = {"equal": 3, "equal without padding": 1, "refused": 2, "transformers refuses": 2, "failed": 0}
    assert "\n".join(f"- {kind}: {count}" for kind, count in counts.items()) in said, "Bloom's padding makes NaN"
    assert "| 2 | refused | num_beams: num_beams=N: draft trees decode by argmax" in said
    assert "- jamba: refused, JambaForCausalLM has layers" in said and "- blt: not built" in said
    kind, found = json.loads((tmp_path / "found.json").read_text())["llama"]
    assert kind == "wrapped" and {call for call, _, _ in found} == set(FEW)


@pytest.mark.parametrize(
    "wrong, told",
    [
        (lambda out: out | {"scores": out["scores"][1:]} if hasattr(out, "keys") else out, "greedy, a dict: scores"),
        (lambda out: out.flip(1) if not hasattr(out, "keys") else out, "a padded batch: ids"),
    ],
)
def test_another_answer_has_failed(wrong, told, capsys, monkeypatch):
    right = hf_generate._generate

    def off(*args, **given):
        out = right(*args, **given)
        changed = wrong(out)
        if changed is not out and hasattr(out, "keys"):
            changed = type(out)(**changed)
        return changed

    monkeypatch.setattr(hf_generate, "_generate", off)
    assert sweep.main(["llama"], here) == 1
    said = capsys.readouterr().out
    assert "- failed: 1" in said and f"| 1 | failed | llama, {told}" in said


def test_an_error_of_ours_that_is_no_refusal_has_failed(capsys, monkeypatch):
    monkeypatch.setattr("opt_tree.integrations.hf_generate._generate", lambda *args, **given: 1 / 0)
    assert sweep.main(["llama"], here) == 1
    assert "| 1 | failed | llama, num_beams: ZeroDivisionError" in capsys.readouterr().out
