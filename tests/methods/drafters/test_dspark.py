"""DSpark drafts a tree: its laws know their parents, the text is the target's, the files are DeepSpec's."""

import json

import numpy as np
import pytest
import torch
from asking import begin, below, root_of
from safetensors.torch import load_file, save_file
from texts import refused
from tiny_models import ARCHITECTURES, HIDDEN, VOCAB, build, prompt, tiny

from opt_tree import Decoder, OptTree, load_drafter
from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads.dflash import DFlashDrafter
from opt_tree.methods.drafters.heads.dspark import DSparkDrafter, DSparkHeads, backbone
from opt_tree.models.causal_lm import CausalLM
from opt_tree.pool import Frontier

BLOCK, RANK = 4, 6
SOME = torch.arange(1, VOCAB, 2)


def config_of(vocab=VOCAB, **changes):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    sizes |= {"block_size": BLOCK, "mask_token_id": 0, "target_layer_ids": [0, 1], "vocab_size": vocab}
    sizes |= {"markov_rank": RANK, "markov_head_type": "gated", "enable_confidence_head": True}
    return {**sizes, "confidence_head_with_markov": True, "architectures": ["Qwen3DSparkModel"], **changes}


def parts_of(config, columns=None):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        block, heads = backbone(config), DSparkHeads(config, columns or config["vocab_size"])
        for module in (block, heads):
            for name, weight in module.named_parameters():
                if "norm" not in name:
                    torch.nn.init.normal_(weight, std=0.4)
    return [module.double().eval().requires_grad_(False) for module in (block, heads)]


def target_of(vocab=VOCAB):
    config = ARCHITECTURES["llama"]()
    config.vocab_size = vocab
    return CausalLM(build(config))


def drafter_of(target, tokens=None, least=0.0, **changes):
    block, heads = parts_of(config_of(target.vocab, **changes), None if tokens is None else len(tokens))
    return DSparkDrafter(DFlashDrafter(block, target), heads, tokens, least)


def expected(drafter, context):
    """The block's states behind a context, by one forward without a cache over the target's own hidden states."""
    model = tiny("llama")
    ids = torch.tensor([context])
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    # The target has two layers: the last one's output comes behind the norm.
    given = torch.cat([states[1], states[2]], -1)
    noise = model.get_input_embeddings()(torch.tensor([[context[-1], *[0] * (BLOCK - 1)]]))
    places = torch.arange(len(context) - 1 + BLOCK)[None]
    own = drafter.block.model(noise_embeds=noise, context_hidden_states=given, position_ids=places)
    return own.last_hidden_state[0]


def law(drafter, states, depth, parent):
    """Equations 4, 5 and the gate, a token at a time."""
    heads, h = drafter.heads.markov_head, states[depth]
    parents = heads.markov_w1.weight[parent]
    if heads.gate_proj is not None:
        gate = torch.sigmoid(heads.gate_proj.weight @ torch.cat([h, parents]) + heads.gate_proj.bias)
        parents = gate * parents
    rows = tiny("llama").get_output_embeddings().weight
    rows = rows if drafter.tokens is None else rows[drafter.tokens]
    return torch.stack([rows[v] @ h + heads.markov_w2.weight[v] @ parents for v in range(len(rows))])


def frontier(tokens, depth):
    rows = len(tokens)
    return Frontier(np.array(tokens), np.zeros(rows, int), np.full(rows, depth), np.eye(rows, dtype=bool))


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("tokens", [None, SOME])
def test_a_law_is_that_of_its_depth_and_its_parent(kind, tokens, monkeypatch):
    """In every step of a text, at the root and below three parents at each depth."""
    target = target_of()
    drafter = drafter_of(target, tokens, markov_head_type=kind)
    root, checked = drafter.root, 0

    def asked(context):
        nonlocal checked
        answer = root(context)
        with torch.no_grad():
            states = expected(drafter, context)
            assert torch.allclose(answer.values[0], law(drafter, states, 0, context[-1]).log_softmax(-1), atol=1e-8)
            for depth in range(1, BLOCK):
                rows = below(drafter, frontier([3, 9, 40], depth)).values
                for row, parent in zip(rows, (3, 9, 40), strict=True):
                    assert torch.allclose(row, law(drafter, states, depth, parent).log_softmax(-1), atol=1e-8)
                assert not torch.allclose(rows[0], rows[1], atol=1e-3)
        checked += 1
        return answer

    monkeypatch.setattr(drafter, "root", asked)
    Decoder(target, drafter, OptTree(9, 0.0)).generate(prompt(6), 10)
    assert checked > 3


def test_nothing_is_drafted_below_a_parent_of_little_confidence():
    target = target_of()
    drafter = drafter_of(target, least=0.3)
    target.watch(drafter.features)
    begin(drafter, prompt(8), target.append(prompt(8)[:-1]))
    root_of(drafter, prompt(8))
    drafter.heads.confidence_head.proj.bias.zero_()
    answer = below(drafter, frontier(list(range(VOCAB)), 1)).values
    w, b = drafter.heads.confidence_head.proj.weight[0], drafter.heads.confidence_head.proj.bias[0]
    h, parents = drafter._states[1].expand(VOCAB, -1), drafter.heads.markov_head.markov_w1.weight
    sure = torch.sigmoid(torch.cat([h, parents], 1) @ w + b) >= 0.3
    assert 5 < sure.sum() < VOCAB - 5
    assert torch.equal(answer.isneginf().all(1), ~sure) and not answer[sure].isinf().any()


class TestFiles:
    def write(self, folder, tensors=None, drop=(), **changes):
        config = config_of(**changes)
        block, heads = parts_of(config, None if tensors is None else len(SOME))
        names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
        own = dict(heads.state_dict())
        for name, weight in block.state_dict().items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            own[name] = weight
        own = {name: weight.float() for name, weight in own.items() if name not in drop}
        save_file(own | (tensors or {}), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return f"dspark:{folder}"

    def test_deep_spec_s_layout_is_read(self, tmp_path):
        copies = {name: torch.zeros(VOCAB, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
        target = target_of()
        spec = self.write(tmp_path)
        save_file(load_file(tmp_path / "model.safetensors") | copies, tmp_path / "model.safetensors")
        drafter = load_drafter(spec, target)
        assert f"a gated Markov head of rank {RANK}, blocks of {BLOCK}" in drafter.describe()
        own = drafter_of(target)
        for ours, theirs in ((own.heads, drafter.heads), (own.block.model, drafter.block.model)):
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(one, other, atol=1e-6)

    def test_a_draft_vocabulary_and_a_least_confidence(self, tmp_path):
        vocabulary = dict(vocabulary_tensors(SOME, VOCAB))
        drafter = load_drafter(self.write(tmp_path, vocabulary, confidence_threshold=0.2), target_of())
        assert drafter.tokens.tolist() == SOME.tolist() and drafter.least == 0.2

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"markov_head_type": "rnn"}, "has a Markov head rnn of rank 6"),
            ({"markov_rank": 0}, "of rank 0"),
            ({"attention_bias": True}, "biases in its attention"),
            ({"mask_token_id": None}, "it names no mask_token_id"),
            ({"mask_token_id": VOCAB}, f"its mask is token {VOCAB}"),
            ({"target_layer_ids": [0, 5]}, "it reads layer 5"),
            ({"target_layer_ids": []}, "does not say which layers of the target it reads"),
            ({"vocab_size": VOCAB + 1}, f"it is for {VOCAB + 1} tokens"),
            ({"transformer_layer_config": {}}, "in speculators' layout"),
            ({"markov_rank": RANK, "drop": ("fc.weight",)}, "missing encoder.fc.weight"),
            ({"drop": ("markov_head.markov_w2.weight",)}, "missing markov_head.markov_w2.weight"),
        ],
    )
    def test_what_is_none_is_one_line(self, tmp_path, changes, complaint):
        spec = self.write(tmp_path, **changes)
        refused(spec, target_of(), complaint)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle", "eagle3", "parallelspec"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_top_k": 16}}, "DFlash 2"),
        ({"speculators_model_type": "dflash2"}, "DFlash 2"),
        ({"architectures": ["DFlashDraftModel"], "causal_head": True}, "JetSpec"),
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "P-EAGLE"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
    ],
)
def test_families_that_look_alike_are_told_apart_by_their_config(tmp_path, kind, config, name):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "model_type": "llama"} | config))
    tensors = {"masks.weight": torch.zeros(2, HIDDEN)}
    tensors |= {"midlayer.fc.weight": torch.zeros(1)} if kind == "eagle3" else {}
    save_file(tensors, tmp_path / "model.safetensors")
    complaint = "is not that of a DSpark model" if (kind, name) == ("dspark", "DSpark") else f"is a {name} model by its"
    refused(f"{kind}:{tmp_path}", target_of(), complaint)
