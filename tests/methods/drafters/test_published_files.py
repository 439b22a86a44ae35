"""Files of published heads: names, parts, what is left out, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from methods.drafters.published_head import head_weights, target_of, write_head
from safetensors.torch import load_file, save_file
from texts import refused
from tiny_models import HIDDEN, publish, tiny_head

from opt_tree import load_drafter
from opt_tree.models.checkpoints import CheckpointError, load_tensors


def renamed(folder: str, *changes: tuple[str, str]) -> str:
    """Give the tensors of a folder other names."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    for old, new in changes:
        tensors = {new + n[len(old) :] if n.startswith(old) else n: one for n, one in tensors.items()}
    save_file(tensors, file)
    return folder


def in_parts(folder: str) -> Path:
    """Write a folder's tensors into two files and an index; return the index."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == part}, file.parent / part)
    file.unlink()
    index = file.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


SCHEMES = {
    "vLLM": [("midlayer.", "layers.0.")],
    "NeMo": [("", "model.")],
    "both": [("midlayer.", "layers.0."), ("", "model.")],
    "SGLang": [("layers.1.input_layernorm", "additional_layers.0.hidden_norm"), ("layers.1.", "additional_layers.0.")],
    "ModelOpt": [("midlayer.", "midlayer.0."), ("layers.1.", "midlayer.1.")],
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_every_scheme_of_names_gives_the_same_tensors(tmp_path, scheme):
    layers = 2 if len(scheme) == 2 and "layers.1." in scheme[1][0] else 1
    target, weights = target_of(), head_weights(layers=layers)
    folders = [write_head(tmp_path / one, weights, num_hidden_layers=layers) for one in ("as it is", "renamed")]
    renamed(folders[1], *scheme)
    ours, theirs = (load_drafter(f"eagle:{one}", target).lm.model.base_model.state_dict() for one in folders)
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_weights_may_lie_in_parts(tmp_path, kind):
    target = target_of()
    if kind == "eagle":
        folder = publish(tmp_path, tiny_head(target.model), "model.safetensors")
    else:
        folder = write_head(tmp_path / "head", head_weights())
    whole = load_tensors(folder)
    in_parts(folder)
    parts = load_tensors(folder)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert load_drafter(f"eagle:{folder}", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.write_text("[]"), "does not say where tensors lie"),
        (
            lambda index: index.write_text('{"weight_map": {"x": "../x.safetensors"}}'),
            "no file of safetensors beside",
        ),
        (
            lambda index: (index.parent / "model-00002-of-00002.safetensors").unlink(),
            "lacks a part of its weights",
        ),
        (
            lambda index: save_file({"x": torch.zeros(1)}, index.parent / "model-00001-of-00002.safetensors"),
            "lacks d2t, which should be in model-00001-of-00002",
        ),
    ],
)
def test_parts_that_are_not_whole_are_refused(tmp_path, change, message):
    index = in_parts(write_head(tmp_path / "head", head_weights()))
    change(index)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(str(index.parent))


def test_what_a_head_computes_or_borrows_is_left_out(tmp_path):
    target, weights = target_of(), head_weights()
    more = {"verifier_norm.weight": torch.ones(HIDDEN), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write_head(tmp_path / "head", weights | more)
    assert load_drafter(f"eagle:{folder}", target)
    refused(f"eagle:{write_head(tmp_path / 'x', weights | {'x.y': torch.ones(1)})}", target, "unexpected x.y")


def test_weights_full_of_nan_are_the_target_s(tmp_path):
    target, weights = target_of(), head_weights()
    nan = torch.full((64, HIDDEN), torch.nan)
    folder = write_head(tmp_path / "head", weights | {"embed_tokens.weight": nan, "lm_head.weight": nan[:32]})
    head = load_drafter(f"eagle:{folder}", target).lm.model
    assert torch.equal(head.base_model.embed_tokens.weight, target.model.get_input_embeddings().weight.float().double())
    assert torch.equal(head.get_output_embeddings().weight, target.model.get_output_embeddings().weight[1::2])
    nan = torch.cat([nan[1:], torch.zeros(1, HIDDEN)])
    half = write_head(tmp_path / "half", weights | {"embed_tokens.weight": nan})
    refused(f"eagle:{half}", target, "numbers that are not finite, in embed_tokens.weight")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, r"\(quantization_config: fp8\)"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, r"\(hf_quant_config.json: NVFP4\)"),
    ],
)
def test_quantised_exports_are_refused(tmp_path, kind, file, settings, message):
    target = target_of()
    if kind == "eagle":
        folder = Path(publish(tmp_path, tiny_head(target.model), "model.safetensors"))
    else:
        folder = Path(write_head(tmp_path / "head", head_weights()))
    old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(old | settings))
    refused(f"eagle:{folder}", target, f"is a quantised export {message}: take the head's plain weights")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.int8), r"fc.weight is packed \(torch.int8\)"),
        ("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN).to(torch.float8_e4m3fn), "quantised weights .*, in fc.weight"),
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(4, 4), r"has latent attention \(MLA\)"),
        ("parallel_draft_heads.0.medusa_layers.0.linear.weight", torch.zeros(4, 4), "Medusa heads beside its layer"),
        ("layers.1.self_attn.q_proj.weight", torch.zeros(32, 2 * HIDDEN), "is an Osprey head: each of its layers"),
        (
            "model.fc.weight",
            torch.zeros(HIDDEN, 3 * HIDDEN),
            "one tensor twice, as .*fc.weight and as .*fc.weight",
        ),
    ],
)
def test_tensors_of_other_heads_are_refused_by_name(tmp_path, name, tensor, message):
    folder = Path(write_head(tmp_path / "head", head_weights()))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor}, folder / "model.safetensors")
    refused(f"eagle:{folder}", target_of(), message)
