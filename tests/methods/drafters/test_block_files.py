"""Files of block drafters: whose they are, names of tensors, conventions that are tried out, what is refused."""

import json
import warnings

import pytest
import torch
from methods.drafters.published_block import (
    LAYERS,
    MASK,
    RANK,
    Blocks,
    block_weights,
    check_block_laws,
    flat,
    nested,
    speculators,
    write_block,
)
from methods.drafters.published_head import DEPTH, GROUPS, HEADS, SIZE, target_of
from methods.drafters.test_blocks import DOMINO, SELECTOR, WINDOW
from safetensors.torch import save_file
from texts import refused
from tiny_models import HIDDEN, VOCAB, prompt

from opt_tree import CheckpointError, Decoder, OptTree, Static, load_drafter
from opt_tree.methods.drafters.heads import layer_probe
from opt_tree.methods.drafters.registry import DrafterOptions

pytestmark = pytest.mark.slow

MODELOPT = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "markov_head.joint_proj.weight": "joint_proj.weight",
    "markov_head.joint_proj.bias": "joint_proj.bias",
}
SPARE = {"verifier_norm.weight": torch.ones(HIDDEN), "rotary_emb.inv_freq": torch.ones(4)}


@pytest.mark.parametrize(
    ("law", "config", "names"),
    [
        ("rnn", nested(projector_type="dspark", shift_label=True), MODELOPT.get),
        (
            "domino",
            nested("DominoDraftModel", **DOMINO),
            lambda name: f"logit_head.{name}" if "proj." in name else None,
        ),
        ("vanilla", flat(), lambda name: f"model.{name}"),
        (
            "selector",
            speculators("dflash2", **SELECTOR),
            lambda name: f"{name}.weight" if name.endswith("codebook") else None,
        ),
    ],
)
def test_names_of_every_layout_are_the_same_tensors(tmp_path, law, config, names):
    weights, target = block_weights(law), target_of()
    found = {}
    for place, named in (("as", lambda name: None), ("otherwise", names)):
        own = {(None if name.startswith("layers.") else named(name)) or name: w for name, w in weights.items()}
        if place == "otherwise":
            assert own.keys() != weights.keys()
            own |= SPARE
        drafter = load_drafter(f"dflash:{write_block(tmp_path / place, own, config)}", target)
        found[place] = {**drafter.model.state_dict(), **drafter.block.law.state_dict()}
    assert found["as"].keys() == found["otherwise"].keys()
    assert all(torch.equal(w, found["otherwise"][name]) for name, w in found["as"].items())
    assert sum(w.numel() for w in found["as"].values()) == sum(w.numel() for w in weights.values())


def test_a_confidence_head_of_modelopt_cuts_where_it_says_so(tmp_path):
    sure = {"confidence_proj.weight": torch.randn(1, RANK + HIDDEN), "confidence_proj.bias": torch.zeros(1)}
    config = nested(projector_type="dspark", shift_label=True, markov_rank=RANK, confidence_threshold=0.5)
    folder, target = write_block(tmp_path / "block", block_weights("vanilla") | sure, config), target_of()
    drafter = load_drafter(f"dspark:{folder}", target)
    assert drafter.block.law.least == 0.5 and drafter.block.law.reads_parent
    answer = Decoder(target, drafter, OptTree(9, 0.0)).generate(prompt(6), 12)
    assert answer.tokens == Decoder(target, None, Static.empty()).generate(prompt(6), 12).tokens


def test_a_context_beyond_its_positions_warns_once_and_drafts_on(tmp_path):
    config, weights = nested(top={"max_position_embeddings": 8}), block_weights()
    target = target_of()
    drafter = load_drafter(f"dflash:{write_block(tmp_path / 'block', weights, config)}", target)
    with pytest.warns(UserWarning, match="was trained on 8 tokens of context") as caught:
        steps = list(Decoder(target, drafter, OptTree(4, 0.0)).steps(prompt(7), 8))
    assert len([one for one in caught if "was trained on" in str(one.message)]) == 1
    assert all(step.tree.nodes for step in steps[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_block_laws(drafter, target, Blocks(weights))


REFUSED = [
    (
        nested(),
        {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, HIDDEN)},
        r"unexpected layers\.0\.attention_conv",
    ),
    (
        nested(),
        {"candidate_selector.hidden_projection.weight": torch.zeros(2, HIDDEN)},
        "has tensors of a DFlash 2 model",
    ),
    (nested(), {"markov_head.markov_w1.weight": torch.zeros(VOCAB, 2)}, "has tensors of a DSpark model"),
    (nested(), {"prefix_gru.weight_hh_l0": torch.zeros(6, 2)}, "has tensors of a Domino model"),
    (nested(), {"refiner_head.mix_l": torch.zeros(2)}, r"unexpected refiner_head\.mix_l"),
    (nested(), {"layers.0.self_attn.g_proj.weight": torch.zeros(2, 2)}, r"unexpected layers\.0\.self_attn\.g_proj"),
    (nested(), {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "encoder.fc.weight is .32, 64., expected .32, 96."),
    (nested(mask_token_id=VOCAB), {}, f"its mask is token {VOCAB} of {VOCAB}"),
    (nested(mask_token_id=None), {}, "names no mask_token_id"),
    (nested(top={"block_size": 1}), {}, "blocks of 1 drafts nothing"),
    (nested(top={"vocab_size": VOCAB + 1}), {}, f"it is for {VOCAB + 1} tokens"),
    (nested(target_layer_ids=[0, DEPTH]), {}, f"its config's target_layer_ids|reads the output of layer {DEPTH}"),
    (flat(target_layer_ids=[-1, 3]), {}, "it reads the target's embeddings"),
    (nested(top={"layer_types": ["chunked_attention", "full_attention"]}), {}, "chunked_attention"),
    (nested(top={**WINDOW, "sliding_window": None}), {}, "has sliding layers, and no sliding_window"),
    (nested(use_swa=True), {}, "sets use_swa to True, which nothing here drafts with"),
    (nested(top={"dflash_config": [1]}), {}, "dflash_config is no group of settings"),
    (
        nested(top={"quantization_config": {"quant_method": "fp8"}}),
        {},
        "is a quantised export .quantization_config: fp8",
    ),
    (flat(markov_head_type="rnn"), {}, "it has no markov_head.markov_w1.weight"),
    (nested("DFlash2DraftModel", **SELECTOR), {}, "it has no candidate_selector.predecessor_codebook.weight"),
    (nested("DominoDraftModel", **DOMINO), {}, "it has no prefix_gru.weight_hh_l0"),
    (speculators("xpress", xpress_rank=8), {}, "is an XPress model by its config, which nothing here drafts with"),
    (speculators("peagle"), {}, "is a P-EAGLE model by its config: name it eagle:"),
    ({"model_type": "llama"}, {}, "is not that of a block drafter"),
]


@pytest.mark.parametrize(
    ("config", "tensors", "complaint"), REFUSED, ids=lambda one: one if isinstance(one, str) else ""
)
def test_what_is_none_is_one_line(tmp_path, config, tensors, complaint):
    refused(f"dflash:{write_block(tmp_path / 'block', block_weights() | tensors, config)}", target_of(), complaint)


def test_a_markov_head_is_the_one_that_its_tensors_are(tmp_path):
    spec = f"dspark:{write_block(tmp_path / 'block', block_weights('gated'), flat(markov_head_type='rnn'))}"
    refused(spec, target_of(), "names a Markov head rnn, its tensors are of one that is gated")
    both = block_weights("vanilla") | {"markov_w1.weight": torch.zeros(VOCAB, RANK)}
    refused(f"dspark:{write_block(tmp_path / 'both', both, flat())}", target_of(), "holds one tensor twice")


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle", "eagle3", "parallelspec"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (nested(), "DFlash"),
        (nested("DFlash2DraftModel", **SELECTOR), "DFlash 2"),
        (speculators("dflash2"), "DFlash 2"),
        (nested(causal_head=True), "JetSpec"),
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "P-EAGLE"),
        (flat(), "DSpark"),
        (nested("DominoDraftModel", **DOMINO), "Domino"),
        (speculators("xpress"), "XPress"),
    ],
)
def test_families_that_look_alike_are_told_apart_by_their_config(tmp_path, kind, config, name):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS | {"num_hidden_layers": 1, "model_type": "llama"} | config))
    tensors = {"masks.weight": torch.zeros(2, HIDDEN)}
    tensors |= {"midlayer.fc.weight": torch.zeros(1)} if kind == "eagle3" else {}
    save_file(tensors, tmp_path / "model.safetensors")
    own = {
        "dflash": ("DFlash", "DFlash 2", "JetSpec", "DSpark", "Domino"),
        "dspark": ("DSpark",),
        "eagle3": ("P-EAGLE",),
    }
    taken = name in own.get(kind, ())
    refused(
        f"{kind}:{tmp_path}", target_of(), "missing|it has no|cannot use" if taken else f"is an? {name} model by its"
    )


class TestProbe:
    """A target whose next token is a function of the last one alone, and blocks that know it in one row only."""

    def target(self):
        target = target_of()
        with torch.no_grad():
            for name, weight in target.model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
        return target

    def knows(self, row):
        """Weights of DeepSpec's layout whose row 0, or 1, is right behind every token, and the other one is not."""
        target = self.target()
        wanted = target.model(torch.arange(VOCAB)[:, None], use_cache=False).logits[:, 0].argmax(-1)
        weights = block_weights("vanilla") | {"norm.weight": torch.ones(HIDDEN).double()}
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name] = torch.zeros_like(weights[name])
        weights["markov_head.markov_w1.weight"] = torch.eye(VOCAB).double()
        weights["markov_head.markov_w2.weight"] = torch.zeros(VOCAB, VOCAB).double()
        torch.manual_seed(3)
        embedding = (
            target.model.get_input_embeddings().weight.detach().clone() if row == 0 else torch.randn(VOCAB, HIDDEN)
        )
        embedding[MASK] = 0  # its row speaks of nothing but the parent
        if row == 1:
            weights["markov_head.markov_w2.weight"][wanted, torch.arange(VOCAB)] = 0.1
        return weights | {"embed_tokens.weight": embedding}

    @pytest.mark.parametrize("row", [0, 1])
    @pytest.mark.parametrize("said", [0, 1])
    def test_the_row_that_speaks_of_the_first_token_is_found(self, tmp_path, row, said):
        config = flat() if said == 0 else nested("DSparkDraftModel", projector_type="dspark")
        target = self.target()
        folder = write_block(tmp_path / "block", self.knows(row), config)
        drafter = load_drafter(f"dspark:{folder}", target)
        assert drafter.block.first == row
        probed = drafter.probed[0]
        own, other = probed.agreed
        assert probed.clear and own > 0.9 * probed.rows and other < 0.3 * probed.rows
        assert f"laws from row {row} ({own / probed.rows:.0%} of first tokens agree" in drafter.describe()

    def reads(self, states):
        """Weights of one layer whose first law is the target's next token but one, if it reads these of hs[0], ....

        The row sees the last token before the root, through values that keep the best directions of the output layer.
        """
        target = target_of()
        text = layer_probe._ids(target, None)
        with torch.no_grad():
            out = target.model(text, output_hidden_states=True, use_cache=False)
        given = torch.cat([out.hidden_states[one][0] for one in states], -1)[:-1]
        rows = target.model.get_output_embeddings().weight.detach()
        basis = torch.linalg.svd(rows, full_matrices=False).Vh[: GROUPS * SIZE]
        wanted = torch.nn.functional.normalize(rows[out.logits[0].argmax(-1)[1:]] @ basis.T @ basis, dim=1)
        weights = block_weights(layers=1)
        weights["fc.weight"] = torch.linalg.lstsq(given, wanted).solution.T
        weights |= {name: torch.ones(HIDDEN).double() for name in ("hidden_norm.weight", "norm.weight")}
        at = "layers.0.self_attn"
        weights["layers.0.mlp.down_proj.weight"] = torch.zeros_like(weights["layers.0.mlp.down_proj.weight"])
        weights[f"{at}.k_proj.weight"] = torch.zeros_like(weights[f"{at}.k_proj.weight"])
        weights[f"{at}.v_proj.weight"] = basis
        out_rows = torch.zeros(HIDDEN, HEADS * SIZE).double()
        for group in range(GROUPS):
            first = group * (HEADS // GROUPS) * SIZE
            out_rows[:, first : first + SIZE] = 9 * basis[group * SIZE : (group + 1) * SIZE].T
        weights[f"{at}.o_proj.weight"] = out_rows
        return weights

    @pytest.mark.parametrize(
        ("states", "says"), [([2, 4, 7], "named by what leaves them"), ([1, 3, 6], "named by what enters them")]
    )
    def test_the_states_that_it_drafts_well_with_are_found(self, tmp_path, states, says):
        config = nested(input_embedding_scale=1e-6)
        config |= {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 3}
        config |= {"num_hidden_layers": 1}
        folder, target = write_block(tmp_path / "block", self.reads(states), config), target_of()
        drafter = load_drafter(f"dflash:{folder}", target)
        assert drafter.features == tuple(one - 1 for one in states)
        own, other = drafter.probed[0].agreed
        assert drafter.probed[0].clear and own > 2 * other
        assert says in drafter.describe() and "laws from row" not in drafter.describe()

    def test_its_numbers_are_those_of_the_loops(self, tmp_path, monkeypatch):
        monkeypatch.setattr(layer_probe, "_MOST", 12)
        weights, target = block_weights("rnn"), target_of()
        config = nested("DSparkDraftModel", projector_type="dspark", markov_rank=RANK)
        probed = load_drafter(f"dflash:{write_block(tmp_path / 'block', weights, config)}", target).probed
        text = layer_probe._ids(target, None)[0].tolist()
        best = target.model(torch.tensor([text]), use_cache=False).logits[0].argmax(-1).tolist()

        def count(first, ids):
            loops = Blocks(weights, "rnn", first, ids)
            laws = [loops.law_of(text[: anchor + 1], []) for anchor in range(1, len(text), 2)]
            return sum(int(law.argmax()) == one for law, one in zip(laws, best[1::2], strict=True))

        rows, layers = probed
        assert rows.taken == layers.taken == 0 and not rows.clear and "too near to tell: its layout's rule" in str(rows)
        assert rows.agreed == (count(1, (2, 4, 7)), count(0, (2, 4, 7))) and rows.rows == 6
        assert layers.agreed == (rows.agreed[0], count(1, (1, 3, 6)))

    def test_what_its_file_says_is_not_probed(self, tmp_path):
        weights = block_weights()
        for number, config in enumerate(
            (speculators("dflash"), {**nested(), **flat(architectures=["DFlashDraftModel"])})
        ):
            config.pop("dflash_config", None)
            config["markov_rank"] = 0
            folder = write_block(tmp_path / str(number), weights, config)
            assert load_drafter(f"dflash:{folder}", target_of()).probed == ()


def test_layers_that_are_asked_for_are_read(tmp_path):
    weights, target = block_weights(), target_of()
    folder = write_block(tmp_path / "block", weights, nested())
    drafter = load_drafter(f"dflash:{folder}", target, DrafterOptions(layers=(0, 2, 5)))
    assert drafter.features == (0, 2, 5)
    check_block_laws(drafter, target, Blocks(weights, ids=(1, 3, 6)))
    for layers, complaint in (
        ((0, 2), "reads 3 states, and these are 2 layers"),
        ((0, 2, DEPTH), f"layer {DEPTH}, the"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            load_drafter(f"dflash:{folder}", target, DrafterOptions(layers=layers))
