"""EAGLE-3 heads as SpecForge, ModelOpt, SGLang and speculators write them: layers, names, tensors, what is refused."""

import pytest
import torch
from methods.drafters.published_head import CONFIG, DEPTH, Loops, check_laws, head_weights, target_of, write_head
from texts import refused
from tiny_models import prompt

from opt_tree import Decoder, OptTree
from opt_tree.methods.drafters.heads.eagle3 import load_eagle3
from opt_tree.methods.drafters.heads.eagle3_files import ENTERED, Reading, read_layers
from opt_tree.methods.drafters.registry import DrafterOptions

pytestmark = pytest.mark.slow

TREE = OptTree(7, 0.0, 4)
DEFAULT = [2, DEPTH // 2, DEPTH - 3]
"""The states that a head reads which names none, as hs[k]."""


def nested(*ids, **more):
    return {"eagle_config": {ENTERED: list(ids), "use_aux_hidden_state": True, **more}}


READ = [
    # SpecForge, ModelOpt: outputs where the first id is 1.
    (nested(1, 3, 4), [2, 4, 5], False),
    (nested(2, 4, 5), [2, 4, 5], False),
    (nested(4, 6, DEPTH), [4, 6, DEPTH], True),
    (nested(1, 6, DEPTH), [1, 6, DEPTH], True),
    (nested(1, 3, eagle_aux_layer_semantics="vllm"), [1, 3], True),
    (nested(4, 3, eagle_aux_layer_semantics="sglang"), [5, 4], True),
    (nested(3), [3], False),
    (nested(5, 1, 2, 2), [5, 1, 2, 2], False),
    (nested(1, 3, 4) | {ENTERED: [2, 4, 5]}, [2, 4, 5], True),
    ({ENTERED: [1, 3, 4]}, [1, 3, 4], True),
    ({"target_layer_ids": [1, 3, 7]}, [2, 4, 8], True),
    ({"speculators_model_type": "eagle3", "aux_hidden_state_layer_ids": [1, 3, 4]}, [1, 3, 4], True),
    ({}, None, True),
    (nested(), None, True),
    ({"eagle_config": {ENTERED: None}}, None, True),
]


@pytest.mark.parametrize(("settings", "states", "told"), READ, ids=str)
def test_layers_are_read_by_the_convention_of_who_wrote_them(settings, states, told):
    reading = read_layers(settings, DEPTH)
    assert reading.told is told
    assert reading.layers() == (None if states is None else tuple(one - 1 for one in states))


def test_the_other_reading_is_one_layer_off():
    reading = Reading((3, 1), True, False)
    assert (reading.layers(), reading.layers(False)) == ((2, 0), (3, 1))


@pytest.mark.parametrize("case", [0, 2, 5, 6, 7, 12], ids=lambda case: str(READ[case][0]))
def test_laws_are_those_of_the_layer_written_with_loops(tmp_path, case):
    settings, states, _ = READ[case]
    weights, target = head_weights(len(states or DEFAULT)), target_of()
    drafter = load_eagle3(write_head(tmp_path / "head", weights, **settings), target)
    check_laws(drafter, target, Loops(weights, states or DEFAULT), TREE)


def test_a_list_permuted_with_the_columns_of_fc_gives_the_same_laws(tmp_path):
    weights, orders = head_weights(4), [(0, 1, 2, 3), (2, 0, 3, 1)]
    ids, blocks, rows = [2, 4, 5, 7], weights["fc.weight"].chunk(4, 1), []
    for order in orders:
        weights["fc.weight"] = torch.cat([blocks[one] for one in order], 1)
        settings = nested(*(ids[one] for one in order))
        target = target_of()
        drafter = load_eagle3(write_head(tmp_path / str(order), weights, **settings), target)
        steps = Decoder(target, drafter, TREE).steps(prompt(6), 5)
        rows.append([(step.tree.tokens.tolist(), step.tree.path_log_probs) for step in steps])
    for (tokens, masses), (others, theirs) in zip(*rows, strict=True):
        assert tokens == others and abs(masses - theirs).max() < 1e-10


def test_layers_that_are_given_count_more_than_the_file(tmp_path):
    weights, target = head_weights(2), target_of()
    folder = write_head(tmp_path / "head", weights, **nested(2, 4))
    drafter = load_eagle3(folder, target, DrafterOptions(layers=(5, 0)))
    assert drafter.features == (5, 0)
    check_laws(drafter, target, Loops(weights, [6, 1]), TREE)


@pytest.mark.parametrize("left", ["input_layernorm", "norm"])
def test_a_norm_that_modelopt_leaves_out_is_the_identity(tmp_path, left):
    weights, target = head_weights(), target_of()
    name = {"input_layernorm": "midlayer.input_layernorm.weight", "norm": "norm.weight"}[left]
    setting = {"input_layernorm": "use_input_layernorm_in_first_layer", "norm": "use_last_layernorm"}[left]
    del weights[name]
    folder = write_head(tmp_path / "head", weights, eagle_config={setting: False, "next_layer_regular": True})
    check_laws(load_eagle3(folder, target), target, Loops(weights, DEFAULT), TREE)


def test_modelopt_s_other_settings_change_nothing(tmp_path):
    harmless = {"use_mtp_layernorm": False, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    folder = write_head(tmp_path / "head", head_weights(), **nested(1, 3, 4, **harmless, use_last_layernorm=True))
    assert load_eagle3(folder, target_of()).features == (1, 3, 4)


@pytest.mark.parametrize(
    ("states", "changes", "message"),
    [
        (3, nested(1, 3, 4, parallel_draft_step=4), "its config sets eagle_config.parallel_draft_step to 4, which no"),
        (3, nested(1, 3, 4, next_layer_regular=False), "eagle_config.next_layer_regular to False"),
        (3, nested(1, 3, 4, some_new_key=1), "its config sets eagle_config.some_new_key, which is not understood"),
        (3, {"eagle_config": [1]}, "its config's eagle_config is no group of settings"),
        (3, nested(1, 3), r"fc.weight reads 3 states, and these are 2 layers: \[1, 3\]"),
        (2, {}, "fc.weight reads 2 states, and its config does not name their layers"),
        (3, nested(1, 3, 4, num_aux_hidden_states=2), "names 3 layers, and num_aux_hidden_states is 2"),
        (3, nested(1, 3, DEPTH + 1), "no list of layers of a target of 8"),
        (3, nested(1, 3, "4"), "no list of layers"),
        (3, nested(0, 3, 4), r"it reads the target's embeddings \(layer ids \[0, 3, 4\]\)"),
        (3, {ENTERED: [0, 3, 4]}, "it reads the target's embeddings"),
        (3, nested(1, 3, DEPTH, eagle_aux_layer_semantics="sglang"), "the output of layer 8, the target has layers 0"),
        (3, nested(1, 3, 4, eagle_aux_layer_semantics="x"), "eagle_aux_layer_semantics to 'x'; there are"),
        (
            3,
            nested(1, 3, 4) | {ENTERED: [1, 3, 5]},
            r"names layers twice: \[1, 3, 4\] in eagle_config, and \[1",
        ),
        (3, {ENTERED: [1, 3, 4], "aux_hidden_state_layer_ids": [1, 3, 5]}, "names layers twice: eagle_aux"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_refused_in_one_line(tmp_path, states, changes, message):
    refused(f"eagle:{write_head(tmp_path / 'head', head_weights(states), **changes)}", target_of(), message)


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_behind_the_first_are_stock_ones(tmp_path, layers):
    weights, target = head_weights(layers=layers), target_of()
    folder = write_head(tmp_path / "head", weights, num_hidden_layers=layers)
    check_laws(load_eagle3(folder, target), target, Loops(weights, DEFAULT), TREE)


@pytest.mark.parametrize("more", [{}, {"fc.weight": torch.ones(4, 4)}], ids=["no fc", "an fc that is left out"])
def test_a_head_may_read_the_target_s_last_state_alone(tmp_path, more):
    weights, target = head_weights(0), target_of()
    folder = write_head(tmp_path / "head", weights | more, **nested(use_aux_hidden_state=False))
    drafter = load_eagle3(folder, target)
    assert drafter.features == (-1,)
    check_laws(drafter, target, Loops(weights, "final"), TREE)
    refused(
        f"eagle:{write_head(tmp_path / 'x', weights, fc_norm=True, **nested(use_aux_hidden_state=False))}",
        target,
        "norms states before fc, and sets use_aux_hidden_state to False",
    )
    with pytest.raises(ValueError, match="reads the target's last state alone"):
        load_eagle3(folder, target, DrafterOptions(layers=(1, 2, 3)))


@pytest.mark.parametrize("bias", ["qkv", "qkvo", "o"])
def test_biases_are_those_that_the_file_has(tmp_path, bias):
    weights, target = head_weights(layers=2, bias=bias), target_of()
    told = {"qkv": {}, "qkvo": {"attention_bias": False}, "o": {"attention_bias": True}}[bias]
    drafter = load_eagle3(write_head(tmp_path / "head", weights, num_hidden_layers=2, **told), target)
    check_laws(drafter, target, Loops(weights, DEFAULT), TREE)


def test_a_bias_of_queries_alone_is_refused(tmp_path):
    folder = write_head(tmp_path / "head", head_weights(bias="qk"))
    refused(f"eagle:{folder}", target_of(), "of midlayer.self_attn's queries, keys and values only q_proj and")


def test_a_qwen3_layer_of_speculators_norms_queries_and_keys(tmp_path):
    weights, target = head_weights(layers=2, qk_norm=True, bias="qkvo"), target_of()
    layer = {name: value for name, value in CONFIG.items() if name not in ("architectures", "draft_vocab_size")}
    layer |= {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    layer |= {"sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True}
    more = {"transformer_layer_config": layer, "speculators_model_type": "eagle3", ENTERED: [1, 2, 7]}
    folder = write_head(tmp_path / "head", weights, norm_before_residual=True, **more)
    check_laws(load_eagle3(folder, target), target, Loops(weights, [1, 2, 7], norm_before_residual=True), TREE)
    layer["layer_types"] = ["full_attention", "sliding_attention"]
    refused(f"eagle:{write_head(tmp_path / 'x', weights, **more)}", target, "its layers are of kind sliding_attention")


def test_a_window_that_a_config_copied_is_no_window(tmp_path):
    weights, target = head_weights(), target_of()
    folder = write_head(tmp_path / "head", weights, sliding_window=2, tie_word_embeddings=True)
    check_laws(load_eagle3(folder, target), target, Loops(weights, DEFAULT), TREE)
