"""Block drafters of every family and layout: the laws of their trees are those of a forward written with loops.

And those of transformers' own chain, where transformers has one.
"""

import numpy as np
import pytest
import torch
from asking import begin, below, recorded, root_of
from methods.drafters.published_block import (
    BLOCK,
    IDS,
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
from methods.drafters.published_head import DEPTH, target_of
from tiny_models import HIDDEN, VOCAB, drawn, prompt, tiny
from transformers import MuseGlimmerAssistantConfig
from transformers.generation import DFlashTokenCandidateGenerator

from opt_tree import Decoder, OptTree, Static, load_drafter
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.heads.block_files import read_block_file
from opt_tree.methods.drafters.heads.block_laws import DSparkHeads
from opt_tree.methods.drafters.heads.block_network import block_network
from opt_tree.methods.drafters.heads.blocks import Block, BlockDrafter
from opt_tree.methods.drafters.heads.eagle import LAST
from opt_tree.models.causal_lm import CausalLM
from opt_tree.pool import Frontier

KINDS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
WINDOW = KINDS | {"sliding_window": 3}
SELECTOR = {"selector_rank": RANK, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 8}
DOMINO = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": 5}
ENTERED = tuple(IDS)


def causal(number, query, key, anchor, own):
    return key <= query


def zlab_window(number, query, key, anchor, own):
    """dflash 0.1.0: sliding layers are causal."""
    return number == 1 or (key <= query and query - key < 3)


def two_sided(number, query, key, anchor, own):
    return number == 1 or abs(query - key) < 3


def speculators_window(number, query, key, anchor, own):
    return number == 1 or (key <= query if own else key >= anchor - 3)


def speculators_open(number, query, key, anchor, own):
    return number == 1 or own or key >= anchor - 3


CASES = {
    "DFlash": (nested(), "", Blocks({})),
    "DFlash, settings at the top": (
        {**nested(), "dflash_config": {}, "mask_token_id": MASK, "target_layer_ids": IDS},
        "",
        Blocks({}),
    ),
    "DFlash, biases": (nested(top={"attention_bias": True}), "+qkvo", Blocks({})),
    "DFlash, the last layer": (nested(target_layer_ids=[1, DEPTH - 1]), "2", Blocks({}, ids=(2, DEPTH))),
    "DFlash, layers by default": (nested(target_layer_ids=None), "2", Blocks({}, ids=(2, 6))),
    "DFlash, windows": (nested(top=WINDOW), "", Blocks({}, sees=zlab_window)),
    "DFlash, windows both ways": (nested(top=WINDOW | {"is_causal": False}), "", Blocks({}, sees=two_sided)),
    "DFlash, scaled": (
        nested(input_embedding_scale=2.0, output_multiplier=0.9, final_logit_softcapping=9.0),
        "",
        Blocks({}, embedded=2.0, multiplier=0.9, cap=9.0),
    ),
    "DFlash of speculators": (speculators("dflash"), "", Blocks({}, ids=ENTERED)),
    "DFlash of speculators, the last layer": (
        speculators("dflash", aux_hidden_state_layer_ids=[2, DEPTH]),
        "2",
        Blocks({}, ids=(2, DEPTH), normed_last=False),
    ),
    "DFlash of speculators, windows": (
        speculators("dflash", layers=WINDOW),
        "",
        Blocks({}, ids=ENTERED, sees=speculators_window),
    ),
    "DFlash of speculators, windows both ways": (
        speculators("dflash", layers=WINDOW, sliding_window_non_causal=True),
        "",
        Blocks({}, ids=ENTERED, sees=speculators_open),
    ),
    "DFlash of speculators, from the anchor": (
        speculators("dflash", sample_from_anchor=True),
        "",
        Blocks({}, ids=ENTERED, first=0),
    ),
    "DFlash 2": (nested("DFlash2DraftModel", **SELECTOR), "selector", Blocks({}, best=5)),
    "DFlash 2 of speculators": (speculators("dflash2", **SELECTOR), "selector", Blocks({}, ids=ENTERED, best=5)),
    "JetSpec": (nested(causal_head=True), "", Blocks({}, sees=causal)),
    "JetSpec, shifted": (nested(causal_head=True, draft_shift=True), "", Blocks({}, sees=causal, first=0)),
    "DSpark of DeepSpec": (flat(markov_head_type="vanilla"), "vanilla", Blocks({}, first=0)),
    "DSpark of DeepSpec, gated": (flat(markov_head_type="gated"), "gated", Blocks({}, first=0)),
    "DSpark of DeepSpec, RNN": (flat(markov_head_type="rnn"), "rnn", Blocks({}, first=0)),
    "DSpark of DeepSpec, no heads": (flat(markov_rank=0), "", Blocks({}, first=0)),
    "DSpark of SpecForge": (
        nested("DSparkDraftModel", projector_type="dspark", markov_rank=RANK),
        "vanilla",
        Blocks({}),
    ),
    "DSpark of SpecForge, RNN": (nested("DSparkDraftModel", projector_type="dspark"), "rnn", Blocks({})),
    "DSpark of ModelOpt": (nested(projector_type="dspark", shift_label=True), "gated", Blocks({}, first=0)),
    "DSpark of speculators": (speculators("dspark", markov_rank=RANK), "gated", Blocks({}, first=0, ids=ENTERED)),
    "DSpark of speculators, filling in": (
        speculators("dspark", markov_rank=RANK, sample_from_anchor=False),
        "rnn",
        Blocks({}, ids=ENTERED),
    ),
    "Domino": (nested("DominoDraftModel", **DOMINO, pure_draft_prefix_len=1), "domino", Blocks({}, plain=1)),
    "Domino, shifted": (nested("DominoDraftModel", **DOMINO, shift_label=True), "domino", Blocks({}, first=0)),
}
"""By name: the config, which tensors, and what the loops are told."""


def written(folder, name):
    """A case's folder, its tensors, and its loops."""
    config, made, loops = CASES[name]
    if made.isdigit():
        weights = block_weights(states=int(made))
    elif made.startswith("+"):
        weights = block_weights(bias=made[1:])
    else:
        weights = block_weights(made)
        loops.law = made
    loops.w = weights
    return write_block(folder / "block", weights, config), weights, loops


@pytest.mark.quick("DSpark of DeepSpec, RNN", "DFlash 2")
@pytest.mark.parametrize("name", CASES)
def test_every_law_is_that_of_the_loops(tmp_path, name):
    folder, _, loops = written(tmp_path, name)
    target = target_of()
    drafter = load_drafter(f"dflash:{folder}", target)
    assert drafter.describe().startswith(f"{name.partition(' of ')[0].partition(',')[0]} model {folder}: ")
    check_block_laws(drafter, target, loops)


@pytest.mark.quick("DFlash, windows")
@pytest.mark.parametrize("name", ["DFlash, windows", "DFlash 2", "DSpark of DeepSpec, RNN", "Domino"])
def test_the_text_is_the_target_s_in_float32(tmp_path, name):
    folder, _, _ = written(tmp_path, name)
    target = target_of(torch.float32)
    drafter = load_drafter(f"dflash:{folder}", target)
    assert drafter.model.dtype == torch.float32
    for text in (prompt(7), [5]):
        answer = Decoder(target, drafter, OptTree(12, 0.0)).generate(text, 12)
        assert answer.tokens == Decoder(target, None, Static.empty()).generate(text, 12).tokens
        assert max(step.tree.nodes for step in answer.steps) > 9
        assert {step.draft_forwards for step in answer.steps} <= {0, 1}


@pytest.mark.slow
def test_convolutions_that_leave_rows_as_they_are_make_a_dflash_model(tmp_path):
    """And a selector of zeros one whose laws are those of its best tokens alone."""
    weights = block_weights("selector")
    for name in weights:
        if name.endswith("base_kernel"):
            weights[name] = torch.zeros_like(weights[name])
            weights[name][:, 0] = 1
        elif "kernel_projection" in name or "hidden_projection" in name:
            weights[name] = torch.zeros_like(weights[name])
    target = target_of()
    folder = write_block(tmp_path / "block", weights, nested("DFlash2DraftModel", **SELECTOR))
    plain = {name: w for name, w in weights.items() if "conv" not in name and "selector" not in name}
    loops = Blocks(plain)

    class Best:
        first = 1

        @staticmethod
        def law_of(context, path):
            law = loops.law_of(context, path)
            kept = torch.full_like(law, -torch.inf)
            best = law.topk(5).indices
            kept[best] = law[best]
            return kept.log_softmax(-1)

    check_block_laws(load_drafter(f"dflash:{folder}", target), target, Best)


@pytest.mark.slow
def test_a_draft_vocabulary_out_of_order_is_put_in_order(tmp_path):
    """`d2t` names columns; of the output layer and of W2 each row goes where its token is."""
    known = torch.tensor([40, 3, 17, 22, 9, 58, 1])
    weights = block_weights("vanilla", columns=len(known))
    torch.manual_seed(4)
    weights["lm_head.weight"] = torch.randn(len(known), 32).double()
    config = speculators("dspark", markov_rank=RANK, draft_vocab_size=len(known))
    folder = write_block(tmp_path / "block", weights | {"d2t": known - torch.arange(len(known))}, config)
    target = target_of()
    drafter = load_drafter(f"dflash:{folder}", target)
    assert drafter.tokens.tolist() == sorted(known.tolist())
    order, loops = known.argsort(), Blocks(weights, "vanilla", 0, ENTERED)

    class Sorted:
        first = 0

        @staticmethod
        def law_of(context, path):
            return loops.law_of(context, path)[order]

    check_block_laws(drafter, target, Sorted)


@pytest.mark.slow
def test_an_embedding_and_an_output_layer_of_its_own_are_used_and_copies_are_not_kept(tmp_path):
    weights, target = block_weights("vanilla"), target_of()
    model = target.model
    model.float().double()  # numbers that a file of float32 holds
    copies = {"embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    copies["lm_head.weight"] = model.get_output_embeddings().weight.detach()
    folder = write_block(tmp_path / "copies", weights | copies, flat())
    drafter = load_drafter(f"dspark:{folder}", target)
    assert drafter.block.embed.layer is model.get_input_embeddings()
    assert drafter.block.scores.layer is model.get_output_embeddings()
    torch.manual_seed(5)
    own = {name: torch.randn(VOCAB, 32).double() for name in copies}
    folder = write_block(tmp_path / "own", weights | own, flat())
    check_block_laws(load_drafter(f"dspark:{folder}", target), target, Blocks(weights | own, "vanilla", 0, model=model))


def test_a_narrower_tree_never_runs_a_narrower_block(tmp_path):
    """Rows see one another: a block cut short has other laws, so that depths are cut and rows are not."""
    _, weights, loops = written(tmp_path, "DFlash")
    whole, short = loops.block(prompt(7)), loops.block(prompt(7), BLOCK - 1)
    assert not torch.allclose(whole[1], short[1], atol=1e-3)
    causal_loops = Blocks(weights, sees=causal)
    whole, short = causal_loops.block(prompt(7)), causal_loops.block(prompt(7), BLOCK - 1)
    assert torch.allclose(whole[1], short[1], atol=1e-12), "in JetSpec's nothing above sees what is cut"


TINY = (0, LAST)
"""The layers that `block_of` and `dspark_of` read of a target of two layers: the last one behind its norm."""


def muse_config(**changes):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "block_size": 5, "mask_token_id": VOCAB - 1}
    sizes |= {"target_layer_ids": [0, 1], "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    return MuseGlimmerAssistantConfig(**{**sizes, **changes})


def block_of(target, layers=TINY, **changes):
    """A drafter with a model of transformers' layout."""
    return BlockDrafter(Block(drawn(block_network(muse_config(**changes))), layers), target)


def dspark_config(vocab=VOCAB, **changes):
    sizes = flat(target_layer_ids=[0, 1], mask_token_id=0, vocab_size=vocab, num_target_layers=2)
    return sizes | {"markov_head_type": "gated", "enable_confidence_head": True, **changes}


def dspark_of(target, tokens=None, least=0.0, layers=TINY, **changes):
    config = dspark_config(target.vocab, **changes)
    heads = drawn(DSparkHeads(config, target.vocab if tokens is None else len(tokens), least))
    model = drawn(block_network(read_block_file(config, 4).config), 4)
    return BlockDrafter(Block(model, layers, 0, heads, tokens, family="DSpark"), target)


@pytest.mark.slow
def test_the_laws_are_those_of_transformers_own_chain(monkeypatch):
    """Same contexts, same logits: over accepted runs, a sliding window, and the last layer behind its norm."""
    theirs, own = {}, DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = own(self, input_ids, *args, **kwargs)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = logits[0]
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    text, target = prompt(9), CausalLM(tiny("llama"))
    drafter = block_of(target)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = tiny("llama").generate(
        torch.tensor([text]), assistant_model=block_of(target).model, speculation_type="dflash", **options
    )
    ours = recorded(drafter, monkeypatch)
    result = Decoder(target, drafter, OptTree(nodes=6, threshold=0.0)).generate(text, 30)
    assert result.tokens == generated[0, len(text) :].tolist()
    common = ours.keys() & theirs.keys()
    assert len(common) > 8 and max(map(len, common)) > len(text) + 12
    for context in common:
        assert ours[context].shape == (4, VOCAB)
        assert torch.allclose(ours[context], theirs[context].double(), atol=1e-9)


def test_steps_without_a_draft_are_caught_up_with(monkeypatch):
    """What the target computed while nothing was drafted is read by the next forward: the laws are as if never idle."""
    text, laws = prompt(8), []
    for idle in (False, True):
        target = CausalLM(tiny("llama"))
        drafter = block_of(target)
        found = recorded(drafter, monkeypatch)
        policies = [Static.empty() if idle else OptTree(4, 0.0), OptTree(4, 0.0)]
        Decoder(target, drafter, Scheduled([policies[0]] * 4 + [policies[1]] * 3)).generate(text, 16)
        laws.append(found)
    busy, idle = laws
    common = busy.keys() & idle.keys()
    assert min(map(len, idle)) == len(text) + 4 and len(common) > 3
    assert all(torch.allclose(busy[context], idle[context], atol=1e-9) for context in common)


def test_a_model_of_transformers_is_loaded_by_its_spec(tmp_path):
    target = CausalLM(tiny("llama"))
    own = block_of(target)
    own.model.save_pretrained(tmp_path)
    drafter = load_drafter(f"dflash:{tmp_path}", target)
    assert drafter.features == (0, -1) and "blocks of 5" in drafter.describe() and drafter.probed == ()
    assert all(torch.equal(w, drafter.model.state_dict()[name]) for name, w in own.model.state_dict().items())


def test_nothing_is_drafted_below_a_parent_of_little_confidence():
    target = CausalLM(tiny("llama"))
    drafter = dspark_of(target, least=0.3)
    target.watch(drafter.features)
    begin(drafter, prompt(8), target.append(prompt(8)[:-1]))
    root_of(drafter, prompt(8))
    law = drafter.block.law
    w, b = law.confidence_head.proj.weight[0], law.confidence_head.proj.bias
    h, parents = drafter._states[1].expand(VOCAB, -1), law.markov_head.markov_w1.weight
    b.copy_(torch.tensor(0.3).logit() - (torch.cat([h, parents], 1) @ w).median())
    nodes = Frontier(np.arange(VOCAB), np.zeros(VOCAB, int), np.ones(VOCAB, int), np.eye(VOCAB, dtype=bool))
    answer = below(drafter, nodes).values
    sure = torch.sigmoid(torch.cat([h, parents], 1) @ w + b) >= 0.3
    assert 5 < sure.sum() < VOCAB - 5
    assert torch.equal(answer.isneginf().all(1), ~sure) and not answer[sure].isinf().any()
