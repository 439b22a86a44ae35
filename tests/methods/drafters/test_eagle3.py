"""EAGLE-3 heads and reduced vocabularies: the law against a head without a cache, both layouts, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Witness, begin, draft, root_of
from methods.drafters.published_head import Loops
from methods.drafters.published_head import target_of as deep_target
from safetensors.torch import load_file, save_file
from texts import refused
from tiny_models import ARCHITECTURES, HIDDEN, VOCAB, build, prompt, publish, tiny, tiny_head
from torch import Tensor

from opt_tree import Decoder, OptTree, Sampling, load_drafter
from opt_tree.methods.drafters.draft_vocabulary import VOCABULARY, take_vocabulary, vocabulary_tensors
from opt_tree.methods.drafters.heads.eagle import EagleDrafter, load_eagle
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter, load_eagle3
from opt_tree.methods.drafters.heads.eagle3_head import NORMS, Eagle3Head
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.sampling import Random
from opt_tree.training.heads.eagle3 import save_eagle3

POLICY = OptTree(nodes=7, threshold=0.0, max_depth=4)
LAYERS = (0, 1, 2)
KNOWN = torch.arange(1, VOCAB, 2)
"""A draft vocabulary: every second token."""


def target_of() -> CausalLM:
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 4
    return CausalLM(build(config))


CASES = [
    (False, ()),
    (True, ()),
    (False, ("fc_norm",)),
    (True, ("norm_output",)),
    (True, ("fc_norm", "norm_output")),
    (False, ("norm_before_fc", "norm_output")),
]
"""Whether the residual is normed, and settings of EAGLE-3.1 that heads come with."""


def tiny_head3(target: CausalLM, columns: int = len(KNOWN), seed: int = 3, **changes: Any) -> Eagle3Head:
    norms = {name: changes.pop(name) for name in NORMS if name in changes}
    config = tiny_head(target.model, **changes).config
    config.update(norms)
    config.draft_vocab_size = columns
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = Eagle3Head(config)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
        head = head.float().to(target.dtype).eval().requires_grad_(False)  # what float32 holds, and so a file
        head.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight[: config.vocab_size])
    return head


@pytest.mark.quick("True-('fc_norm', 'norm_output')", "False-('norm_before_fc', 'norm_output')")
@pytest.mark.parametrize(("before", "norms"), CASES, ids=str)
def test_every_law_is_that_of_a_head_without_a_cache(before, norms):
    target = deep_target()
    head = tiny_head3(target, norm_before_residual=before, **dict.fromkeys(norms, True))
    told = {"norm_before_residual": before, "norm_output": "norm_output" in norms}
    loops = Loops(head.state_dict(), [layer + 1 for layer in LAYERS], **told)
    witness = Witness(Eagle3Drafter(head, target, tokens=KNOWN, layers=LAYERS))
    steps = list(Decoder(target, witness, OptTree(40, 0.0, 3)).steps(prompt(9), 16))
    assert any(step.accepted for step in steps), "features of accepted tokens should be seen again"
    for context, path, law in witness.laws[:2] + witness.laws[-5:]:
        assert (law - loops.law(context, path)).abs().max() < 1e-10


def test_sampled_children_come_from_the_draft_vocabulary_and_are_shown_as_whole_laws():
    """What a verifier is told of a node is a law over all tokens, 0 where the drafter has no column."""
    target = target_of()
    drafter = Eagle3Drafter(tiny_head3(target), target, tokens=KNOWN, layers=LAYERS)
    decoder = Decoder(target, drafter, Sampled.kary(2, 2), multi_round)
    result = decoder.generate(prompt(9), 12, Sampling(1.0), seed=5)
    assert len(result.tokens) == 12
    begin(drafter, [7], None)
    tree = draft(drafter, Sampled.kary(2, 2), [7], 2, Sampling(1.0), Random(3))
    laws = tree.draft_log_probs.double().exp()
    unknown = [token for token in range(VOCAB) if token % 2 == 0]
    width = int(KNOWN[-1]) + 1  # behind the last token that it names, verifiers know that there is nothing
    assert tree.nodes and laws.shape[-1] == width and not laws[:, [token for token in unknown if token < width]].any()
    assert torch.allclose(laws.sum(-1), torch.ones(()).double())


def test_sharpening_keeps_the_tokens():
    target = target_of()
    bare = Eagle3Drafter(tiny_head3(target), target, tokens=KNOWN, layers=LAYERS)
    begin(bare, [7])
    plain = root_of(bare, [7])
    begin(bare.calibrated(0.5), [7])
    sharp = root_of(bare, [7])
    assert torch.equal(sharp.tokens, KNOWN) and torch.equal(plain.tokens, KNOWN)
    assert torch.allclose(sharp.values, (2 * plain.values).log_softmax(-1))


def drafted(drafter: EagleDrafter, target: CausalLM) -> list[Any]:
    return [step.tree for step in Decoder(target, drafter, POLICY).steps(prompt(9), 8)]


@pytest.mark.quick("False-False-('fc_norm',)-speculators", "False-True-('fc_norm', 'norm_output')-speculators")
@pytest.mark.parametrize("layout", ["published", "speculators"])
@pytest.mark.parametrize(
    ("shared", "before", "norms"), [(True, False, ()), *((False, *case) for case in CASES)], ids=str
)
def test_a_head_drafts_as_the_one_that_was_saved(tmp_path, layout, shared, before, norms):
    target = target_of()
    head = tiny_head3(target, norm_before_residual=before, **dict.fromkeys(norms, True))
    if shared:
        head.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight[KNOWN])
    target.model.config.name_or_path, target.model.config.architectures = "some/target", ["LlamaForCausalLM"]
    save_eagle3(head, KNOWN, tmp_path, layout, shared, torch.float64, verifier=target.model.config, depth=4)
    told = json.loads((tmp_path / "config.json").read_text()).get("speculators_config")
    assert (told is None) == (layout == "published")
    if told is not None:  # what vLLM reads of it
        assert told["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
        assert told["proposal_methods"][0]["speculative_tokens"] == 4
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) != shared and "embed_tokens.weight" not in names
    assert any(name.startswith("midlayer." if layout == "published" else "layers.0.") for name in names)
    assert ("fc_norm.2.weight" in names, "input_norm.weight" in names) == (
        "fc_norm" in norms,
        "norm_before_fc" in norms,
    )
    loaded = load_drafter(f"eagle:{tmp_path}", target)
    assert isinstance(loaded, Eagle3Drafter) and loaded.features == (1, 1, 0)
    ours = Eagle3Drafter(head, target, tokens=KNOWN)
    for one, other in zip(drafted(ours, target), drafted(loaded, target), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert abs(one.path_log_probs - other.path_log_probs).max() < 1e-9


def test_the_residual_s_default_is_each_layout_s_own(tmp_path):
    target = target_of()
    for layout, before in (("published", False), ("speculators", True)):
        folder = tmp_path / layout
        save_eagle3(tiny_head3(target), KNOWN, folder, layout)
        config = json.loads((folder / "config.json").read_text())
        del config["norm_before_residual"]
        (folder / "config.json").write_text(json.dumps(config))
        assert load_eagle3(str(folder), target).lm.model.base_model.residual_normed is before


def test_norms_may_be_named_apart(tmp_path):
    target = target_of()
    save_eagle3(tiny_head3(target, norm_before_fc=True), KNOWN, tmp_path)
    folder = spoilt(tmp_path, {"norm_before_fc": None, "eagle_config": {"use_aux_hidden_state": True}})
    with pytest.raises(CheckpointError, match=r"unexpected input_norm\.weight"):
        load_eagle3(folder, target)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_fc"]
    config["eagle_config"]["norm_before_fc"] = True
    path.write_text(json.dumps(config))
    head = load_eagle3(folder, target).lm.model.base_model
    assert head.input_norm.weight.shape == (3 * HIDDEN,) and not head.output_normed


@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_layers_are_named_by_what_enters_them(tmp_path, layout):
    target = target_of()
    save_eagle3(tiny_head3(target), KNOWN, tmp_path, layout, layers=(0, 1, 3))
    assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert load_eagle3(str(tmp_path), target).features == (0, 1, 3)


def test_an_eagle_1_head_may_have_a_draft_vocabulary(tmp_path):
    target = target_of()
    head = tiny_head(target.model).float().double()
    tensors = {**head.state_dict(), **vocabulary_tensors(KNOWN, VOCAB)}
    folder = publish(tmp_path, head, "model.safetensors", {**tensors})
    save_file(
        {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    loaded = load_eagle(folder, target)
    for one, other in zip(
        drafted(EagleDrafter(head, target, tokens=KNOWN), target), drafted(loaded, target), strict=True
    ):
        assert one.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.zeros(3)}, "d2t is .* of torch.float32, expected a row of integers"),
        ({"d2t": KNOWN + VOCAB}, f"d2t leads to tokens .*, the target has {VOCAB}"),
        ({"d2t": -torch.arange(4)}, "d2t leads to some tokens twice"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d marks other tokens than d2t leads to"),
        ({"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "t2d marks no token: the draft vocabulary was never filled in"),
    ],
)
def test_a_vocabulary_that_is_none(change, message):
    whole = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    assert take_vocabulary(whole, VOCAB) is None and not whole, "never filled in, as no token was left out"
    tensors = {**vocabulary_tensors(KNOWN, VOCAB), **change}
    with pytest.raises(ValueError, match=message):
        take_vocabulary(tensors, VOCAB)


@pytest.mark.parametrize("marks", [None, True, False], ids=str)
def test_a_vocabulary_of_zeros_is_the_first_tokens_with_a_warning(tmp_path, marks):
    """As SpecForge begins: offsets of zeros, all tokens marked."""
    target = target_of()
    save_eagle3(tiny_head3(target), KNOWN, tmp_path)
    given = None if marks is None else torch.full((VOCAB,), marks)
    folder = spoilt(tmp_path, d2t=torch.zeros(len(KNOWN), dtype=torch.long), t2d=given)
    with pytest.warns(UserWarning, match=f"the first {len(KNOWN)} tokens of {VOCAB} are drafted"):
        drafter = load_eagle3(folder, target)
    assert torch.equal(drafter.tokens, torch.arange(len(KNOWN)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_in_the_file_counts_more_than_tied_embeddings(tmp_path, tied):
    target = target_of()
    save_eagle3(tiny_head3(target), KNOWN, tmp_path, dtype=torch.float32)
    drafter = load_eagle3(spoilt(tmp_path, {"tie_word_embeddings": tied}), target)
    own = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(drafter.lm.model.get_output_embeddings().weight, own.double())


def spoilt(folder: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> str:
    """Change settings and tensors of a saved head; None removes a tensor."""
    old = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in old.items() if tensor is not None}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"norm_before_fc": True}, {}, "missing input_norm.weight"),
        ({"fc_norm": True}, {}, "missing fc_norm.0.weight; missing fc_norm.1.weight; missing fc"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, "its config sets both fc_norm and norm_before_fc"),
        ({"use_mtp_layernorm": True}, {}, "its config sets use_mtp_layernorm to True, which nothing"),
        ({"num_hidden_layers": 2}, {}, "missing layers.1.self_attn.q_proj.weight; missing layers.1"),
        ({"num_hidden_layers": 0}, {}, "has a layer, this config has 0"),
        ({"draft_vocab_size": 9}, {}, f"draft_vocab_size is 9, d2t has {len(KNOWN)}"),
        ({}, {"d2t": None, "t2d": None}, f"draft_vocab_size is {len(KNOWN)}, d2t has none"),
        ({}, {"norm.weight": None, "x": torch.zeros(1)}, "missing norm.weight; unexpected x"),
        ({}, {"fc.weight": torch.zeros(HIDDEN, 2)}, "fc.weight has 2 columns: no whole number of states that"),
        ({}, {"midlayer.hidden_norm.weight": torch.zeros(2)}, "midlayer.hidden_norm.weight is"),
        ({"target_hidden_size": 8}, {"fc.weight": torch.zeros(HIDDEN, 24)}, "the head reads features 8 wide"),
        ({"hidden_size": "wide"}, {}, "its config is not one of a Llama layer"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, config, tensors, message):
    target = target_of()
    save_eagle3(tiny_head3(target), KNOWN, tmp_path)
    refused(f"eagle:{spoilt(tmp_path, config, **tensors)}", target, message)


def test_the_two_kinds_are_told_apart(tmp_path):
    target = target_of()
    save_eagle3(tiny_head3(target), KNOWN, tmp_path)
    with pytest.raises(CheckpointError, match="is an EAGLE-3 head, not one of EAGLE-1"):
        load_eagle(str(tmp_path), target)
    other = tmp_path / "one"
    other.mkdir()
    publish(other, tiny_head(target.model), "model.safetensors")
    with pytest.raises(CheckpointError, match="is no EAGLE-3 head"):
        load_eagle3(str(other), target)


def test_three_layers_of_the_target_are_read():
    target = CausalLM(tiny("llama"))  # of two layers: there is nothing that enters the last but two
    with pytest.raises(ValueError, match="reads three of the target's 2 layers"):
        Eagle3Drafter(tiny_head3(target), target, tokens=KNOWN)


@pytest.mark.parametrize("shared", [True, False], ids=["target's rows", "rows of its own"])
def test_a_file_beside_the_weights_is_its_draft_vocabulary(tmp_path, shared):
    target = target_of()
    save_eagle3(tiny_head3(target, VOCAB), None, tmp_path, shared=shared, dtype=torch.float32)
    whole = load_eagle3(str(tmp_path), target)
    save_file(dict(vocabulary_tensors(KNOWN, VOCAB)), tmp_path / VOCABULARY)
    trimmed = load_eagle3(str(tmp_path), target)
    assert f"{len(KNOWN)} tokens of {VOCAB}" in trimmed.describe()
    rows = [each.lm.model.get_output_embeddings().weight for each in (whole, trimmed)]
    assert torch.equal(rows[0][KNOWN], rows[1])
    save_eagle3(tiny_head3(target), KNOWN, tmp_path / "both", dtype=torch.float32)
    save_file(dict(vocabulary_tensors(KNOWN, VOCAB)), tmp_path / "both" / VOCABULARY)
    with pytest.raises(CheckpointError, match=f"a draft vocabulary of {len(KNOWN)} tokens, and {VOCABULARY} names"):
        load_eagle3(str(tmp_path / "both"), target)
