"""The temperature under which the target's choices are likeliest, and what the command says and leaves of it."""

import json

import numpy as np
import pytest
import torch

from opt_tree.models.checkpoints import read_calibration
from opt_tree.training.fitting import calibrate
from opt_tree.training.fitting.calibrate import Likelihood


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_that_choices_were_drawn_at_is_found(temperature: float) -> None:
    random, likelihood = np.random.default_rng(0), Likelihood()
    for logits in torch.from_numpy(random.normal(size=(3000, 12))):
        law = (logits / temperature).softmax(-1).numpy()
        likelihood.add(logits.log_softmax(-1), int(random.choice(12, p=law)))
    assert likelihood.count == 3000 and likelihood.temperature() == pytest.approx(temperature, rel=0.08)


def test_a_token_that_cannot_be_drafted_says_nothing_and_a_wrong_drafter_fits_none() -> None:
    likelihood = Likelihood()
    log_probs = torch.tensor([0.5, 0.5, 0.0]).log()
    for choice in (2, 3):  # never proposed; outside the drafter's vocabulary
        likelihood.add(log_probs, choice)
    with pytest.raises(ValueError, match=r"no temperature between 0\.05 and 5 fits 0 nodes"):
        likelihood.temperature()
    likelihood.add(torch.tensor([0.9, 0.1]).log(), 1)
    with pytest.raises(ValueError, match=r"fits 1 node$"):
        likelihood.temperature()


@pytest.mark.slow
def test_the_command_fits_checks_and_writes(tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Name three colours.", "What is a fair price?", "Tell me a story.", "How do I boil an egg?")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    args = f"--prompts {prompts} --count 4 --nodes 8 --threshold 0.05 --max-new-tokens 12 --dtype float32"
    assert calibrate.main([*args.split(), "--output", str(tmp_path / "fitted")]) == 0
    record = json.loads((tmp_path / "fitted" / "calibration.json").read_text())
    assert 0.05 < record["temperature"] < 1 and record["prompts"] == 2
    bare, fitted = (abs(record[title]["accepted"] - record[title]["expected"]) for title in ("bare", "sharpened"))
    assert fitted < bare
    assert read_calibration(str(tmp_path / "fitted")) == record["temperature"]
    assert "checked on 2 others" in capsys.readouterr().out
