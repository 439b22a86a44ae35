"""A family's models with tokens added behind the vocabulary: ids that mean the same are drafted, others never."""

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, build, perturbed, prompt, tiny_tokenizer

from opt_tree import Decoder, OptTree, Sampling, Static, load_pair
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.small_models import loading
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import load_tokenizer

FP64 = {"dtype": "float64", "device": "cpu"}


def save(folder, added, size, seed=0):
    """A model whose tokenizer has some tokens behind the common ones; of these it thinks most."""
    config = ARCHITECTURES["llama"]()
    config.vocab_size = size
    common = build(ARCHITECTURES["llama"]())
    model = build(config, seed)
    with torch.no_grad():
        tensors = {name: weight.clone() for name, weight in model.state_dict().items()}
        for name, weight in common.state_dict().items():
            tensors[name][: len(weight)] = weight
        tensors["lm_head.weight"][VOCAB:] *= 3
        model.load_state_dict(tensors)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for token in added:
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    (perturbed(model, 0.03) if seed else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


CASES = {
    "the target has more": (("<tool>", "</tool>"), VOCAB + 3, (), VOCAB, VOCAB),
    "the draft model has more": ((), VOCAB, ("<tool>", "</tool>"), VOCAB + 3, VOCAB),
    "padded, and one named": (("<tool>",), VOCAB + 9, (), VOCAB + 9, VOCAB),
    "each its own": (("<tool>", "</tool>"), VOCAB + 2, ("<pad>",), VOCAB + 1, VOCAB),
    "one shared behind others": (("<tool>", "<end>"), VOCAB + 2, ("<pad>", "<end>"), VOCAB + 2, VOCAB + 2),
}


@pytest.mark.quick("the draft model has more", "one shared behind others")
@pytest.mark.parametrize("name", CASES)
def test_ids_that_mean_the_same_are_drafted_and_others_never(tmp_path, name):
    more, size, others, its, end = CASES[name]
    target, draft = save(tmp_path / "target", more, size), save(tmp_path / "draft", others, its, seed=2)
    pair = load_pair(target, f"lm:{draft}", **FP64)
    gap = end > VOCAB
    assert isinstance(pair.drafter, TrimmedDrafter if gap else CausalLMDrafter)
    plain = Decoder(CausalLM(pair.target.model), None, Static.empty())
    warm = Sampling(temperature=1.0)
    for verifier, policy, sampling in (
        (None, OptTree(9, 0.0, 4), Sampling()),
        (multi_round, Sampled.kary(2, 3), warm),
    ):
        decoder = Decoder(pair.target, pair.drafter, policy, *([verifier] if verifier else []))
        found = decoder.generate(prompt(9), 12, sampling=sampling, stop=None)
        drafted = {token for step in found.steps for token in step.tree.tokens[1:].tolist()}
        assert drafted <= {*range(VOCAB), *([VOCAB + 1] if gap else [])} and len(drafted) > 9
        if verifier is not multi_round:
            assert found.tokens == plain.generate(prompt(9), 12, sampling=sampling, stop=None).tokens
    if gap:
        assert VOCAB + 1 in drafted, "a token that both have is drafted, wherever it stands"


def test_a_draft_model_that_lacks_much_is_told_of(tmp_path):
    target = save(tmp_path / "target", ("<tool>", "</tool>"), VOCAB + 3)
    draft = save(tmp_path / "draft", (), VOCAB)
    with pytest.warns(UserWarning, match=rf"draft lacks 2 of the {VOCAB + 2} tokens of .*target: they are never draft"):
        load_pair(target, f"lm:{draft}", **FP64)


@pytest.mark.parametrize("file", [None, "tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_a_tokenizer_of_the_same_bytes_is_loaded_once(tmp_path, monkeypatch, file):
    """Any other byte or file may mean other tokens: then it is read and compared."""
    target, draft = (save(tmp_path / name, ("<tool>",), VOCAB + 1) for name in ("target", "draft"))
    if file is not None:
        with open(f"{draft}/{file}", "a", encoding="utf-8") as changed:
            changed.write("{}" if file == "added_tokens.json" else "\n")
    read = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda path: read.append(path) or load_tokenizer(path))
    assert type(load_pair(target, f"lm:{draft}", **FP64).drafter) is CausalLMDrafter
    assert read == ([] if file is None else [draft])
