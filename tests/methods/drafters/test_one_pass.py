"""One pass drafts every layer: what each head is asked and says, the texts, the files."""

import json

import pytest
import torch
from asking import recorded, tiny_target
from safetensors.torch import save_file
from texts import refused
from tiny_models import HIDDEN, VOCAB, drawn, prompt, tiny

from opt_tree import CheckpointError, Decoder, OptTree, load_drafter
from opt_tree.methods.drafters.heads.one_pass import MedusaDrafter, MedusaHeads

POLICY = OptTree(nodes=9, threshold=0.0, max_depth=6)


def medusa(target, own_output=True, layers=1):
    return MedusaDrafter(drawn(MedusaHeads(target.hidden, target.vocab, 3, layers, own_output)), target)


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_s_heads_read_the_feature_that_chose_the_root(layers, monkeypatch):
    """Head i speaks of the token i + 2 behind the feature: i + 1 behind the root."""
    target = tiny_target()
    drafter = medusa(target, layers=layers)
    found = recorded(drafter, monkeypatch)
    for _ in Decoder(target, drafter, POLICY).steps(prompt(6), 12):
        pass
    assert len(found) > 3
    for context, laws in found.items():
        with torch.no_grad():
            states = tiny("llama").base_model(torch.tensor([context[:-1]]), use_cache=False).last_hidden_state[0, -1]
            for law, head in zip(laws.log_softmax(-1), drafter.heads.heads, strict=True):
                x = states
                for block in head[:-1]:
                    x = x + torch.nn.functional.silu(block.linear(x))
                assert torch.allclose(law, (head[-1].weight @ x).log_softmax(-1), atol=1e-9)


def test_nothing_is_known_beyond_the_last_head():
    target = tiny_target()
    for step in Decoder(target, medusa(target), OptTree(30, 0.0, 9)).steps(prompt(6), 8):
        assert step.tree.depths.max() <= 3


class TestFiles:
    def publish(self, folder, heads, prefix="", file="medusa_lm_head.pt", **config):
        tensors = {prefix + name: weight.float() for name, weight in heads.heads.state_dict().items()}
        if prefix:
            tensors["lm_head.weight"] = torch.zeros(2, 2)
        if file.endswith(".pt"):
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        numbers = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
        (folder / "config.json").write_text(json.dumps(numbers | config))
        return f"medusa:{folder}"

    @pytest.mark.parametrize(
        ("prefix", "file"),
        [("", "medusa_lm_head.pt"), ("", "medusa_lm_head.safetensors"), ("medusa_head.", "model.safetensors")],
    )
    def test_published_medusa_heads_draft(self, tmp_path, prefix, file):
        target = tiny_target()
        ours = medusa(target)
        assert set(ours.heads.heads.state_dict()) == {
            f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        }
        loaded = load_drafter(self.publish(tmp_path, ours.heads, prefix, file), target)
        for ours_, theirs in zip(ours.heads.parameters(), loaded.heads.parameters(), strict=True):
            assert theirs.dtype == torch.float64 and torch.allclose(ours_, theirs, atol=1e-7)

    def test_heads_of_another_target_and_torn_ones(self, tmp_path):
        target = tiny_target()
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB + 3, 3))
        with pytest.raises(
            CheckpointError, match=r"no Medusa heads for .*: 0.1.weight is \(64, 32\), expected \(61, 32\)"
        ):
            load_drafter(spec, target)
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB, 2))
        refused(spec, target, r"missing 2.0.linear.weight")
        file = tmp_path / "medusa_lm_head.pt"
        file.write_bytes(file.read_bytes()[:-200])
        refused(spec, target, r"medusa_lm_head.pt is corrupt")

    @pytest.mark.parametrize("config", ["{", "[]", "{}", '{"medusa_num_heads": 0}'])
    def test_a_config_that_is_none(self, tmp_path, config):
        spec = self.publish(tmp_path, MedusaHeads(HIDDEN, VOCAB, 3))
        (tmp_path / "config.json").write_text(config)
        refused(spec, tiny_target(), "is not the config of Medusa heads")
