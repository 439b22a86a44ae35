"""A DFlash model of transformers drafts a tree: its laws are those of transformers' chain, the text is the target's."""

import json

import pytest
import torch
from texts import refused
from tiny_models import HIDDEN, VOCAB, prompt, tiny
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation import DFlashTokenCandidateGenerator

from opt_tree import Decoder, OptTree, Static, load_drafter
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.heads.dflash import DFlashDrafter
from opt_tree.models.causal_lm import CausalLM

BLOCK = 5


def model(seed=3, **changes):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "block_size": BLOCK, "mask_token_id": VOCAB - 1}
    sizes |= {"target_layer_ids": [0, 1], "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    config = MuseGlimmerAssistantConfig(**{**sizes, "initializer_range": 0.4, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MuseGlimmerAssistantModel(config).double().eval().requires_grad_(False)


def target_of():
    return CausalLM(tiny("llama"))


def recorded(drafter, monkeypatch):
    """The laws of every context that is drafted for."""
    asked, found = drafter.laws, {}

    def laws(context):
        found[tuple(context)] = answer = asked(context)
        return answer

    monkeypatch.setattr(drafter, "laws", laws)
    return found


def test_the_laws_are_those_of_transformers_own_chain(monkeypatch):
    """Same contexts, same logits: over accepted runs, a sliding window, and the last layer behind its norm."""
    theirs, own = {}, DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = own(self, input_ids, *args, **kwargs)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = logits[0]
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    text = prompt(9)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = tiny("llama").generate(
        torch.tensor([text]), assistant_model=model(), speculation_type="dflash", **options
    )
    drafter = DFlashDrafter(model(), target_of())
    ours = recorded(drafter, monkeypatch)
    result = Decoder(drafter.target, drafter, OptTree(nodes=6, threshold=0.0)).generate(text, 30)
    assert result.tokens == generated[0, len(text) :].tolist()
    common = ours.keys() & theirs.keys()
    assert len(common) > 8 and max(map(len, common)) > len(text) + 12
    for context in common:
        assert ours[context].shape == (BLOCK - 1, VOCAB)
        assert torch.allclose(ours[context], theirs[context].double(), atol=1e-9)


def test_steps_without_a_draft_are_caught_up_with(monkeypatch):
    """What the target computed while nothing was drafted is read by the next forward: the laws are as if never idle."""
    text, laws = prompt(8), []
    for idle in (False, True):
        target = target_of()
        drafter = DFlashDrafter(model(), target)
        found = recorded(drafter, monkeypatch)
        policies = [Static.empty() if idle else OptTree(4, 0.0), OptTree(4, 0.0)]
        Decoder(target, drafter, Scheduled([policies[0]] * 4 + [policies[1]] * 3)).generate(text, 16)
        laws.append(found)
    busy, idle = laws
    common = busy.keys() & idle.keys()
    assert min(map(len, idle)) == len(text) + 4 and len(common) > 3
    assert all(torch.allclose(busy[context], idle[context], atol=1e-9) for context in common)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 16, "head_dim": 4}, "it is 16 wide"),
        ({"target_layer_ids": [0, 2]}, "it reads layer 2"),
        ({"mask_token_id": VOCAB}, f"its mask is token {VOCAB} of {VOCAB}"),
        ({"block_size": 1}, "blocks of 1 drafts nothing"),
    ],
)
def test_a_model_of_another_target_is_one_line(changes, complaint, tmp_path):
    model(**changes).save_pretrained(tmp_path)
    refused(f"dflash:{tmp_path}", target_of(), complaint)


def test_it_is_loaded_by_its_spec(tmp_path):
    model().save_pretrained(tmp_path)
    target = target_of()
    drafter = load_drafter(f"dflash:{tmp_path}", target)
    assert drafter.features == (0, -1) and "blocks of 5" in drafter.describe()
    text = Decoder(target, drafter, OptTree(6, 0.0)).generate(prompt(6), 10).tokens
    assert text == Decoder(target_of(), None, Static.empty()).generate(prompt(6), 10).tokens
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(f"dflash:{tmp_path}", target, str(tmp_path))
