"""A target is checked once: whatever may change the verdict has it checked again."""

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opt_tree.backends.mapped import mapped
from opt_tree.models import canonical
from opt_tree.models.canonical import make_canonical
from opt_tree.models.checkpoints import load_causal_lm

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="the system does not tell of pages")
LARGE = {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model whose weights are large enough to be known as a file's."""
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LARGE, num_hidden_layers=1, num_key_value_heads=8, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are checked, none of which is run."""
    found: list[str] = []
    monkeypatch.setattr(canonical, "load_kernel", lambda device: None)
    monkeypatch.setattr(canonical, "check", lambda lm: found.append(lm.name))
    return found


def load(folder: str):
    lm = load_causal_lm(folder, torch.bfloat16)
    if mapped(lm.model.lm_head.weight.detach()) is None:
        pytest.skip("transformers maps no weights here")
    return lm


@pytest.mark.slow
def test_the_same_files_are_checked_once(folder, checks, monkeypatch):
    for _ in range(2):
        lm = load(folder)
        make_canonical(lm)
        assert lm.canonical
    assert len(checks) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    make_canonical(load(folder))
    assert len(checks) == 2
    for _ in range(2):  # converted: no file's numbers, which are read
        make_canonical(load_causal_lm(folder, torch.float32))
    assert len(checks) == 3


@pytest.mark.slow
def test_a_weight_that_was_changed_before_has_it_checked(folder, checks):
    make_canonical(load(folder))
    for name in ("lm_head", "model.norm"):  # a large one and a small one
        lm = load(folder)
        lm.model.get_submodule(name).weight.data[5] += 1
        make_canonical(lm)
    assert len(checks) == 3


@pytest.mark.slow
def test_quantised_weights_are_known_by_their_numbers(folder, checks, quantised_kernel):
    for _ in range(2):
        lm = load_causal_lm(folder, torch.bfloat16, weights="int4")
        make_canonical(lm)
    assert len(checks) == 1
    lm = load_causal_lm(folder, torch.bfloat16, weights="int4")
    lm.model.lm_head.packed[0, 0, 0] += 1
    make_canonical(lm)
    assert len(checks) == 2


@pytest.mark.slow
def test_a_target_that_fails_is_checked_again(folder, checks, monkeypatch):
    def fails(lm):
        checks.append(lm.name)
        raise canonical.NotCanonicalError("other bits")

    monkeypatch.setattr(canonical, "check", fails)
    for _ in range(2):
        with pytest.raises(canonical.NotCanonicalError):
            make_canonical(load(folder))
    assert len(checks) == 2
