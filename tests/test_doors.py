"""The other doors: a custom_generate repository as the Hub lays it out, loaded from its folder."""

from pathlib import Path

import pytest
import torch
from models import prompt, tiny, tiny_drafter

REPOSITORY = Path(__file__).parent.parent / "examples" / "custom_generate_repo"
IDS = torch.tensor([prompt(12)])


@pytest.fixture
def copied(tmp_path, monkeypatch) -> str:
    """The repository, with a cache of its own for the code that transformers copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    return str(REPOSITORY)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_repository_generates_what_the_model_does(copied, drafter):
    model = tiny("llama")
    given = {"input_ids": IDS, "max_new_tokens": 20, "do_sample": False}
    chosen = tiny_drafter("llama") if drafter == "model" else drafter
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        found = model.generate(**given, custom_generate=copied, trust_remote_code=True, drafter=chosen, nodes=8)
    drafted = len(calls) / 2
    expected = model.generate(**given)
    hook.remove()
    assert torch.equal(found, expected)
    assert drafter == "ngram" or drafted < 20


def test_the_repository_samples_by_seed_and_names_what_it_lacks(copied):
    model = tiny("llama")
    given = {"custom_generate": copied, "trust_remote_code": True, "max_new_tokens": 12, "do_sample": True}
    one, same = (model.generate(IDS, **given, drafter="ngram", seed=3) for _ in range(2))
    assert torch.equal(one, same) and one.shape[1] == IDS.shape[1] + 12
    with pytest.raises(ValueError, match="no drafter named"):
        model.generate(IDS, **given)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(IDS, custom_generate=copied, trust_remote_code=False, drafter="ngram")


def test_the_repository_is_laid_out_as_the_hub_asks():
    assert "tags:\n  - custom_generate\n" in (REPOSITORY / "README.md").read_text()
    assert (REPOSITORY / "custom_generate" / "requirements.txt").read_text().split() == [
        "torch>=2.11",
        "transformers>=5.17",
    ]
