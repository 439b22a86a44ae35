"""The temperature under which E(A) is A."""

import json

import pytest

from opt_tree.training.fitting import calibrate
from opt_tree.training.fitting.reliability import balance


@pytest.mark.parametrize("root, power", [(0.67, 1.2), (0.9, 0.4), (1.7, 1.0), (0.3, 2.0)])
def test_balance_finds_where_what_is_promised_is_what_comes(root: float, power: float) -> None:
    asked: list[float] = []

    def ratio(temperature: float) -> float:
        asked.append(temperature)
        return (root / temperature) ** power

    assert ratio(balance(ratio)) == pytest.approx(1, abs=0.006)
    assert len(asked) <= 8


def test_of_a_ratio_that_jumps_the_best_trial_is_taken() -> None:
    assert balance(lambda temperature: 1.02 if temperature < 0.7 else 0.97) < 0.7


@pytest.mark.parametrize("ratio", [3.0, 0.3])
def test_no_temperature_balances(ratio: float) -> None:
    with pytest.raises(ValueError, match="no temperature makes E\\(A\\) A"):
        balance(lambda _: ratio)


def test_the_command_balances_and_says_so(tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Name three colours.", "What is a fair price?", "Tell me a story.", "How do I boil an egg?")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    args = f"--prompts {prompts} --count 4 --nodes 8 --threshold 0.05 --max-new-tokens 24 --dtype float32 --balance"
    assert calibrate.main([*args.split(), "--output", str(tmp_path / "fitted")]) == 0
    record = json.loads((tmp_path / "fitted" / "calibration.json").read_text())
    assert record["by"] == "balance" and 0.05 < record["temperature"] < 5 and record["prompts"] == 2
    assert "checked on 2 others" in capsys.readouterr().out
