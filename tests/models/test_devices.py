"""A target whose layers lie in several places, as far as a CPU can show: some on disk, fetched for a forward."""

from pathlib import Path

import pytest
from tiny_models import VOCAB, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import generate_batch
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import load_causal_lm
from opt_tree.policy import OptTree
from opt_tree.tools.presets import plain

IDS = [prompt(length, seed=length) for length in (9, 4)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    lm = load_causal_lm(str(path), "float64", device_map=places, offload_folder=str(Path(path) / "disk"))
    assert {weight.device.type for weight in lm.model.parameters()} == {"cpu", "meta"}
    return lm


@pytest.mark.quick("draft")
@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_texts_and_trees_are_those_of_one_place(target, kind):
    def decoder(lm: CausalLM) -> Decoder:
        head = EagleDrafter(tiny_head(tiny("llama")), lm)
        small: Drafter = CausalLMDrafter(CausalLM(tiny_drafter("llama")), VOCAB)
        return Decoder(lm, head if kind == "eagle" else small, OptTree(12, 0.1, 5))

    whole = decoder(CausalLM(tiny("llama")))
    alone = [whole.generate(ids, 12) for ids in IDS]
    for found in (
        [decoder(target).generate(ids, 12) for ids in IDS],
        generate_batch(decoder(target), IDS, 12, width=2),
    ):
        assert [one.tokens for one in found] == [one.tokens for one in alone]
        assert [one.accept_lengths for one in found] == [one.accept_lengths for one in alone]
    assert [one.tokens for one in alone] == [plain(whole.target).generate(ids, 12).tokens for ids in IDS]
