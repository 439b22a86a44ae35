"""ParallelSpec and P-EAGLE: what the masks see and read, the texts, the draft vocabulary, and the files."""

import json

import pytest
import torch
from asking import Witness, recorded, tiny_target
from methods.drafters.published_head import COLUMNS, HEADS, KNOWN, SIZE, Loops, head_weights, normed, write_head
from methods.drafters.published_head import target_of as deep_target
from safetensors.torch import save_file
from texts import refused
from tiny_models import HIDDEN, VOCAB, prompt, tiny, tiny_head

from opt_tree import Decoder, OptTree, Static, load_drafter
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads import parallel_spec
from opt_tree.methods.drafters.heads.parallel_spec import ParallelHead, ParallelSpecDrafter

pytestmark = pytest.mark.slow

DEPTHS = 4
SOME = torch.arange(VOCAB - 1, 0, -2)
"""A draft vocabulary, in falling order."""
POLICY = OptTree(nodes=9, threshold=0.0, max_depth=6)


def head_of(target):
    own = tiny_head(target.model)
    head = ParallelHead(own.config, DEPTHS)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.nn.init.normal_(head.masks.weight, std=0.5)
    head.load_state_dict(own.state_dict() | {"masks.weight": head.masks.weight.detach().clone()})
    return head.double().eval().requires_grad_(False)


def drafter_of(target, tokens=None):
    return ParallelSpecDrafter(head_of(target), target, tokens=tokens)


def expected(head, context):
    """The laws behind a context, a row at a time: each mask in a forward of its own, over the pairs and its masks."""
    model = tiny("llama")
    ids = torch.tensor([context])
    features = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
    laws = []
    for masks in range(DEPTHS):
        own = torch.tensor([[VOCAB + mask for mask in range(masks)]], dtype=torch.long)
        tokens = torch.cat([ids[:, 1:], own], 1)
        given = torch.cat([features, features[:, -1:].expand(-1, masks, -1)], 1)
        seen = torch.full((tokens.shape[1],) * 2, -torch.inf).double().triu(1)[None, None]
        (states,) = head(tokens, given, torch.arange(tokens.shape[1])[None], attention_mask=seen)
        laws.append(model.get_output_embeddings()(states[0, -1]))
    return torch.stack(laws)


@pytest.mark.parametrize("pairs", [512, 3])
def test_a_mask_sees_the_true_pairs_and_the_masks_before_it(pairs, monkeypatch):
    """What a step's one forward says, over steps that accept and steps that do not, is what fresh forwards say."""
    monkeypatch.setattr(parallel_spec, "_PAIRS", pairs)
    target = tiny_target()
    drafter = drafter_of(target)
    found = recorded(drafter, monkeypatch)
    for text in (prompt(6), prompt(5) * 6):
        accepted = Decoder(target, drafter, OptTree(30, 0.0)).generate(text, 12).steps
        assert len(accepted) > 2
    assert len(found) > 8
    for context, laws in found.items():
        assert torch.allclose(laws.log_softmax(-1), expected(head_of(target), list(context)).log_softmax(-1), atol=1e-9)


def test_a_step_without_a_draft_is_caught_up_with(monkeypatch):
    text, target = prompt(8), tiny_target()
    drafter = drafter_of(target)
    found = recorded(drafter, monkeypatch)
    policies = [OptTree(4, 0.0), *[Static.empty()] * 3, OptTree(4, 0.0), OptTree(4, 0.0)]
    Decoder(target, drafter, Scheduled(policies)).generate(text, 12)
    assert len(found) >= 3
    for context, laws in found.items():
        assert torch.allclose(laws.log_softmax(-1), expected(head_of(target), list(context)).log_softmax(-1), atol=1e-9)


def test_a_draft_vocabulary_holds_for_every_depth(monkeypatch):
    target = tiny_target()
    drafter = drafter_of(target, SOME)
    found = recorded(drafter, monkeypatch)
    Decoder(target, drafter, POLICY).generate(prompt(8), 8)
    assert drafter.tokens.tolist() == SOME.tolist()[::-1]
    for context, laws in found.items():
        whole = expected(head_of(target), list(context))
        assert torch.allclose(laws.log_softmax(-1), whole[:, SOME.flip(0)].log_softmax(-1), atol=1e-9)


class TestFiles:
    def write(self, folder, target, drop=(), **changes):
        head = head_of(target)
        tensors = {n: t.float() for n, t in head.state_dict().items() if n not in ("embed_tokens.weight", *drop)}
        save_file(tensors | changes, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(head.config.to_diff_dict()))
        return f"parallelspec:{folder}"

    def test_it_is_loaded_by_its_spec(self, tmp_path):
        target = tiny_target()
        changes = vocabulary_tensors(SOME, VOCAB)
        drafter = load_drafter(self.write(tmp_path, target, **changes), target)
        assert drafter.tokens.tolist() == SOME.tolist()[::-1]
        assert f"{DEPTHS} layers a pass, {len(SOME)} tokens of {VOCAB}" in drafter.describe()
        own, loaded = head_of(target).state_dict(), drafter.eagle.lm.model.base_model.state_dict()
        assert all(torch.allclose(own[name], weight) for name, weight in loaded.items())

    @pytest.mark.parametrize(
        ("drop", "changes", "complaint"),
        [
            (("masks.weight",), {}, "is no parallel head: it has no masks.weight"),
            (("fc.weight",), {}, "missing fc.weight"),
            ((), {"masks.weight": torch.zeros(3, 7)}, r"masks.weight is \(3, 7\), expected \(3, 32\)"),
            ((), {"d2t": torch.tensor([0, 9000])}, "d2t leads to tokens 0 to 9001"),
        ],
    )
    def test_what_is_none_is_one_line(self, tmp_path, drop, changes, complaint):
        target = tiny_target()
        spec = self.write(tmp_path, target, drop, **changes)
        refused(spec, target, complaint)


class Masked(Loops):
    """An EAGLE-3 head that knows a mask: its laws by depth, over the true pairs and so many masks, row by row."""

    mask = 7

    def law(self, context, path):
        rows = self.features(context)
        read = [row.flatten() for row in self.w["mask_hidden"].double().flatten().split(HIDDEN)]
        if "fc_norm.0.weight" in self.w:
            read = [normed(one, self.w[f"fc_norm.{number}.weight"]) for number, one in enumerate(read)]
        masked = self.w["fc.weight"] @ torch.cat(read)
        embeddings = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach().float())
        tokens = [*context[1:], *[self.mask] * len(path)]
        out = self.layers([embeddings[one].double() for one in tokens], [*rows, *[masked] * len(path)])[-1]
        return (self.w["lm_head.weight"] @ normed(out, self.w.get("norm.weight"))).log_softmax(-1)


FORGED = {"num_hidden_layers": 2, "mask_token_id": Masked.mask, "num_depths": 3}
CASES = {
    "SpecForge": (FORGED, {}, {}),
    "vLLM's word for a mask": ({"num_hidden_layers": 1, "pard_token": Masked.mask, "num_depths": 3}, {"layers": 1}, {}),
    "speculators": (None, {"qk_norm": True}, {}),
    "EAGLE-3.1": (FORGED | {"fc_norm": True}, {"fc_norm": True}, {}),
    "normed before": (FORGED | {"norm_before_residual": True}, {}, {"norm_before_residual": True}),
}
"""By name: the config, None where it is that of `speculators`; which tensors; what the loops are told."""


class TestPEagle:
    def weights(self, layers=2, fc_norm=False, **more):
        weights = head_weights(layers=layers, **more)
        weights["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN).double()
        if fc_norm:
            weights |= {f"fc_norm.{number}.weight": (torch.rand(HIDDEN) + 0.5).double() for number in range(3)}
        return weights

    def speculators(self, **changes):
        layers = {"num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
        layers |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": SIZE, "model_type": "llama"}
        told = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
        config = {"speculators_model_type": "peagle", "transformer_layer_config": layers, "mask_token_id": Masked.mask}
        return config | {"draft_vocab_size": COLUMNS, "speculators_config": told, **changes}

    @pytest.mark.parametrize("name", CASES)
    def test_every_law_is_that_of_the_loops(self, tmp_path, name):
        config, made, settings = CASES[name]
        config = self.speculators() if config is None else {"architectures": ["PEagleDraftModel"], **config}
        weights, target = self.weights(**made), deep_target()
        folder = write_head(tmp_path / "head", weights, **config)
        if name == "speculators":
            (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        drafter = load_drafter(f"eagle:{folder}", target)
        assert "P-EAGLE head" in drafter.describe() and "3 layers a pass" in drafter.describe()
        witness = Witness(drafter)
        steps = list(Decoder(target, witness, OptTree(20, 0.0)).steps(prompt(6), 6))
        assert len(steps) > 2 and {step.draft_forwards for step in steps} <= {0, 1}
        loops, laws = Masked(weights, [2, 4, 5], **settings), witness.laws
        checked = {}
        for context, path, law in laws:
            if len(path) >= 3:
                assert law.isneginf().all()
            elif (len(context), len(path)) not in checked:
                checked[len(context), len(path)] = (law - loops.law(context, path)).abs().max()
        assert len(checked) > 5 and max(checked.values()) < 1e-10

    def test_one_depth_is_an_eagle_3_head_s_first_law(self, tmp_path):
        """And the text is the target's, in float32."""
        weights, target = self.weights(1), deep_target(torch.float32)
        folder = write_head(tmp_path / "masked", weights, mask_token_id=7, num_depths=1)
        plain = write_head(tmp_path / "plain", {n: w for n, w in weights.items() if n != "mask_hidden"})
        found = []
        for one in (folder, plain):
            witness = Witness(load_drafter(f"eagle:{one}", target))
            text = Decoder(target, witness, OptTree(9, 0.0, 1)).generate(prompt(6), 10).tokens
            assert text == Decoder(target, None, Static.empty()).generate(prompt(6), 10).tokens
            found.append({tuple(context): law for context, path, law in witness.laws if not path})
        assert found[0].keys() == found[1].keys() and len(found[0]) > 3
        assert all(torch.allclose(law, found[1][context], atol=1e-4) for context, law in found[0].items())

    def test_a_draft_vocabulary_out_of_order_is_put_in_order(self, tmp_path):
        weights, target = self.weights(), deep_target()
        config = {"num_hidden_layers": 2, "mask_token_id": 7, "num_depths": 2}
        order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
        mixed = weights | {"lm_head.weight": weights["lm_head.weight"][order]}
        folders = [
            write_head(tmp_path / "as", weights, **config),
            write_head(tmp_path / "mixed", mixed, KNOWN[order], **config),
        ]
        texts = [
            Decoder(target, load_drafter(f"eagle:{one}", target), POLICY).generate(prompt(6), 8) for one in folders
        ]
        assert [step.tree.tokens.tolist() for step in texts[0].steps] == [
            step.tree.tokens.tolist() for step in texts[1].steps
        ]

    @pytest.mark.parametrize(
        ("config", "complaint"),
        [
            ({}, "has a mask_hidden, and its config names no mask_token_id or pard_token"),
            ({"mask_token_id": VOCAB}, f"its mask is token {VOCAB} of {VOCAB}"),
            ({"mask_token_id": 7, "num_depths": 0}, "a P-EAGLE head of 0 depths drafts nothing"),
        ],
    )
    def test_what_is_none_is_one_line(self, tmp_path, config, complaint):
        folder = write_head(tmp_path / "head", self.weights(), num_hidden_layers=2, **config)
        refused(f"eagle:{folder}", deep_target(), complaint)
