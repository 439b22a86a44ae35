"""Every causal LM of the installed transformers, tiny and random: does it decode trees exactly, and if not, why?

    python tests/models/sweep_architectures.py [type ...] [--seconds 60] [--log sweep.jsonl] [--write docs/models.md]
    python tests/models/sweep_architectures.py --canonical [type ...] [--log canonical.jsonl] [--write docs/models.md]

A script, not a test: it takes minutes. Exact means: the tokens of `model.generate` in float64, from a prompt shorter
and from one longer than every window. With --canonical: is it canonical in bfloat16, and if not, why? Each type runs in
a process of its own. What a log holds already is not run again: begun anew after an interruption, the sweep goes on.
"""

import argparse
import collections
import contextlib
import copy
import json
import multiprocessing
import os
import re
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opt_tree import (
    CausalLM,
    Decoder,
    NotCanonicalError,
    OptTree,
    UnsupportedModelError,
    custom_generate,
    make_canonical,
)
from opt_tree.backends.canonical import load_kernel
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.models.chain_lm import wrap

KINDS = ("exact", "path by path", "refused", "wrong", "not built")
VOCAB, NEW_TOKENS, WINDOW = 61, 16, 8
SMALL: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "dim"), 32)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "encoder_attention_heads"), 2)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 48)
    | dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk"), 2)
    | dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8)
    | dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1)
    | dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 256)
    | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB)
    | dict.fromkeys(("bos_token_id", "eos_token_id", "image_token_id"), None)
    | {"index_topk": 64}  # where a context ends
    | {"query_pre_attn_scalar": 8, "hidden_size_per_layer_input": 8, "experts_implementation": "eager"}
    | {"state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "chunk_size": 8, "rope_dim": 8}
    | {
        "pad_token_id": 0,
        "rotary_dim": 8,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 3,
        "is_decoder": True,
        "mlp_hidden_size": 48,
    }
)


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOTS = {"num_key_value_heads": 4, "head_dim": 16, "per_layer_config": {}, "mlp_layer_types": ["dense", "sparse"] * 2}
_HYBRID = ["linear_attention", "full_attention"] * 2
_KIMI = {"layer_types": _HYBRID, "mlp_layer_types": ["dense", "sparse"] * 2, "num_key_value_heads": 4, "head_dim": 8}
_KIMI |= {"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _KIMI,
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "max_seq_len": 256,
    },
    "dots3_note": _DOTS,
    "dots3_note_text": _DOTS,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": _HYBRID, "shared_intermediate_size": 48},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "kimi_linear": _KIMI,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "num_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "moshi": {"sliding_window": 256},  # as long as its context, as in the published config: behind it a context ends
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "xlm": {"emb_dim": 32, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes and layers that a type needs, beyond those above: both kinds of layers where it has two."""
NARROW = ("inkling2_text", "xglm", "xlnet")
"""Types whose code in transformers does not run in float64; float32 for them."""
NOT_BUILT = {
    "blt": "patches of bytes, made by a second model inside it",
    "dots3_note": "text is dots3_note_text's",
    "gemma3n": "needs the package timm; text is gemma3n_text's",
    "gemma4_assistant": "no model by itself: it reads another one's cache",
    "gemma4_unified_assistant": "no model by itself: it reads another one's cache",
    "musicgen": "writes audio: several codebooks a step",
    "musicgen_melody": "writes audio: several codebooks a step",
    "qwen4_exp": "its smallest sizes are not known",
    "qwen4_exp_text": "its smallest sizes are not known",
}
_TOKENS = ("bos_token_id", "eos_token_id", "image_token_id")
"""A config may insist on numbers for these."""


def shrunk(kind: Any, **changes: Any) -> Any:
    """Return a small config of this class: every size above that it has, the same for its text config."""
    with contextlib.suppress(Exception):
        default = kind()
        options = {key: value for key, value in SMALL.items() if key in default.to_dict()}
        for part, value in vars(default).items():
            if part.endswith("_config") and isinstance(value, transformers.PretrainedConfig):
                options[part] = shrunk(type(value), **changes)
        if len(layers := getattr(default, "layer_types", None) or ()) > 4:
            kinds = list(dict.fromkeys(layers))
            options["layer_types"] = (kinds * 4)[:4]
        for dropped in ((), ("layer_types",), ("head_dim",), ("layer_types", "head_dim"), _TOKENS):
            with contextlib.suppress(Exception):
                return kind(**{key: value for key, value in options.items() if key not in dropped} | changes)
    return kind()


def built(name: str) -> Any:
    """Return a small model that runs; multi-head latent attention wants as many key heads as others."""
    error = None
    for changes in ({}, {"num_key_value_heads": 4}):
        try:
            config = shrunk(transformers.CONFIG_MAPPING[name], **changes | SPECIAL.get(name, {}))
            model = _built(config, torch.float32 if name in NARROW else torch.float64)
            with torch.no_grad():
                model(input_ids=torch.arange(1, 6)[None], use_cache=False)
            return model
        except Exception as why:
            error = error or why
    assert error is not None
    raise error


def _built(config: Any, dtype: torch.dtype) -> Any:
    size = sum(weight.numel() for weight in _meta(config).parameters())
    if size > 20_000_000:
        raise MemoryError(f"still {size / 1e6:.0f} M parameters: the script does not know its sizes")
    for part in (config, *vars(config).values()):
        if isinstance(part, transformers.PretrainedConfig):
            part._experts_implementation = "eager"  # the others exist in narrower dtypes only
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


def _meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))


def noisy(model: Any) -> Any:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight += 0.02 * weight.std().nan_to_num() * torch.randn(weight.shape, dtype=weight.dtype)
    return copied


def verdict(name: str) -> tuple[str, str]:
    """Return one of KINDS, and why."""
    if name in NOT_BUILT:
        return "not built", NOT_BUILT[name]
    try:
        model = built(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    try:
        target = wrap(model)
    except UnsupportedModelError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"raw error: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    try:
        decoder = Decoder(target, model_drafter(wrap(noisy(model)), target.vocab), OptTree(12, 0.0, 4))
        for length in (5, 40):
            ids = torch.randint(1, min(VOCAB, target.vocab), (1, length), generator=torch.Generator().manual_seed(1))
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
            plain, ours = (
                model.generate(ids, attention_mask=torch.ones_like(ids), **options, **door)
                for door in ({}, {"custom_generate": custom_generate(decoder)})
            )
            if not torch.equal(plain, ours):
                return "wrong", f"{type(target).__name__}: other text than generate after a prompt of {length} tokens"
        return KINDS[not isinstance(target, CausalLM)], _why_path_by_path(model)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _why_path_by_path(model: Any) -> str:
    """Why a model cannot hold a tree; nothing where it can."""
    try:
        CausalLM(model)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def canonical_verdict(name: str) -> tuple[str, str]:
    """Whether a type is canonical in bfloat16, or why not; of types that hold a tree."""
    if name in NOT_BUILT:
        return "no tree", NOT_BUILT[name]
    wide = {key: 64 for key, size in SMALL.items() if size in (32, 48) or key == "hidden_size_per_layer_input"}
    SMALL.update(wide)  # GELU is asked for multiples of 64
    SPECIAL["gemma3n_text"]["intermediate_size"] = [64] * 4
    SMALL["mamba_d_head"] = SPECIAL["bamba"]["mamba_d_head"] = SPECIAL["mamba2"]["head_dim"] = 32  # twice as wide
    SPECIAL["falcon_h1"]["mamba_d_ssm"] = 128
    try:
        lm = CausalLM(built(name).to(torch.bfloat16))
    except Exception as error:
        return "no tree", " ".join(str(error).split())[:150]
    try:
        make_canonical(lm)
    except NotCanonicalError as why:
        return "refused", str(why).partition(" is not canonical: ")[2] or str(why)
    except Exception as error:
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return "canonical", ""


def _child(name: str, pipe: Any, seconds: int, judge: Callable[[str], tuple[str, str]]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    pipe.send(judge(name))


def alone(name: str, seconds: int, judge: Callable[[str], tuple[str, str]] = verdict) -> tuple[str, str]:
    """Judge a type in a process of its own, so that a crash or a hang is one row of the table."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, theirs, seconds, judge))
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    try:
        found = ours.recv()
    except EOFError:
        found = (KINDS[-1] if judge is verdict else "refused", f"nothing within {seconds} seconds")
    process.kill()
    process.join()
    return found


def table(rows: dict[str, tuple[str, str]]) -> str:
    """Markdown: how many of each, then every type that is not exact, with the reason."""
    counts = collections.Counter(kind for kind, _ in rows.values())
    lines = [f"transformers {transformers.__version__}, {len(rows)} causal-LM types, tiny and random, float64:", ""]
    lines += [f"- {kind}: {counts[kind]}" for kind in KINDS]
    lines += ["", "Exact: " + ", ".join(name for name, (kind, _) in rows.items() if kind == "exact") + ".", ""]
    lines += ["| type | result | why |", "|---|---|---|"]
    lines += [f"| {name} | {kind} | {why} |" for name, (kind, why) in rows.items() if kind != "exact"]
    return "\n".join(lines)


def canonical_table(rows: dict[str, tuple[str, str]]) -> str:
    """Markdown: which types are canonical, and why the others that hold a tree are not."""
    judged = {name: row for name, row in rows.items() if row[0] != "no tree"}
    passing = [name for name, (kind, _) in judged.items() if kind == "canonical"]
    lines = [f"Of {len(judged)} types that hold a tree, tiny and random, bfloat16, {len(passing)} are canonical:", ""]
    lines += [", ".join(passing) + ".", "", "| type | why it is refused |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, (kind, why) in judged.items() if kind == "refused"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("types", nargs="*", help="types of model; all where none is named")
    parser.add_argument("--canonical", action="store_true", help="say which types are canonical in bfloat16 instead")
    parser.add_argument("--seconds", type=int, default=60, help="of processor time for each type")
    parser.add_argument("--log", type=Path, help="a line for each type that is done; types in it are not run again")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this file, or into a new one")
    options = parser.parse_args()
    lines = options.log.read_text().splitlines() if options.log and options.log.exists() else []
    done, rows = {name: (kind, why) for name, kind, why in map(json.loads, lines)}, {}
    mark, judge = ("canonical", canonical_verdict) if options.canonical else ("sweep", verdict)
    if options.canonical:
        load_kernel()
    for name in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[name] = done.get(name) or alone(name, options.seconds, judge)
        print(f"{name:28} {rows[name][0]:10} {rows[name][1]}", flush=True)
        if options.log and name not in done:
            with options.log.open("a") as log:
                log.write(json.dumps([name, *rows[name]]) + "\n")
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    text = f"{begin}\n{canonical_table(rows) if options.canonical else table(rows)}\n{end}"
    if options.write is None:
        print("\n" + text)
    elif options.write.exists():
        old = options.write.read_text()
        old = old if begin in old else f"{old}\n{begin}{end}\n"
        options.write.write_text(re.sub(f"{begin}.*{end}", lambda _: text, old, flags=re.DOTALL))
    else:
        options.write.write_text(f"# Models\n\n{text}\n")


if __name__ == "__main__":
    main()
