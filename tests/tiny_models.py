"""Tiny random models of every architecture the README names, shared by the tests: float64, seeded, built once.

The initialiser is wide enough for attention to matter and for the best two logits never to tie, so that two runs that
agree to rounding agree token for token.
"""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from opt_tree.backends.packed import Buckets
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.tree import Tree

T = TypeVar("T")
VOCAB = 61
HIDDEN = 32
CONTEXT = 256
WINDOW = 12

WIDTH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _config(kind: str, drop: tuple[str, ...] = (), **changes: Any) -> transformers.PretrainedConfig:
    options = {key: value for key, value in (WIDTH | changes).items() if key not in drop}
    return getattr(transformers, kind)(**options)


ARCHITECTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: _config("LlamaConfig"),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen2-window": lambda: _config(
        "Qwen2Config", num_hidden_layers=3, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "qwen3": lambda: _config("Qwen3Config", head_dim=8),
    "qwen3-window": lambda: _config(
        "Qwen3Config",
        num_hidden_layers=3,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    ),
    "mistral": lambda: _config("MistralConfig", sliding_window=WINDOW),
    # Gemma 2 caps its attention logits; transformers runs it with eager attention only.
    "gemma2": lambda: _config(
        "Gemma2Config",
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        final_logit_softcapping=20.0,
        layer_types=_MIXED,
    ),
    "phi3": lambda: _config("Phi3Config", sliding_window=WINDOW),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    ),
    "gpt-neox": lambda: _config("GPTNeoXConfig", drop=("num_key_value_heads",)),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        init_std=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    ),
    # Chunked attention: a row sees the rows of its own chunk only, in every layer but each fourth.
    "llama4": lambda: _config(
        "Llama4TextConfig",
        num_hidden_layers=3,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        experts_implementation="eager",
    ),
    # The grouped matrix products of the default experts exist in narrower dtypes only.
    "mixtral": lambda: _config(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
}

TOLERANCE = dict.fromkeys(ARCHITECTURES, 1e-9) | {"gemma2": 1e-5, "llama4": 1e-5}
"""How far logits of the same rows may differ in float64; eager attention takes its softmax in float32, and Llama 4
rotates in it."""


def build(config: transformers.PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a new random causal LM of a copy of this config; the caller's random state is left alone.

    A model keeps the config it is given and writes into it: one that is resized would resize every later one.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


@functools.cache
def tiny(architecture: str) -> PreTrainedModel:
    """Return the tiny model of an architecture. One object a process: never change it, copy it first."""
    return _shared(f"tiny {architecture}", build(ARCHITECTURES[architecture]()))


@functools.cache
def tiny_drafter(architecture: str) -> PreTrainedModel:
    """Return a noisy copy of the tiny model: it agrees with the original about as often as not; shared like `tiny`."""
    return _shared(f"tiny drafter {architecture}", perturbed(tiny(architecture), 0.1))


_SHARED: dict[str, tuple[PreTrainedModel, list[Tensor]]] = {}


def _shared(name: str, model: PreTrainedModel) -> PreTrainedModel:
    _SHARED[name] = model, [weight.clone() for weight in model.state_dict().values()]
    return model


def changed_models() -> list[str]:
    """Return the names of the shared models that are no longer as they were built."""
    return [
        name
        for name, (model, built) in _SHARED.items()
        if not all(
            now.dtype == then.dtype and torch.equal(now, then)
            for now, then in zip(model.state_dict().values(), built, strict=True)
        )
    ]


def perturbed(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """Return a copy whose weights are off by `noise` of their spread."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            # Norms start as constants: they have no spread and stay as they are.
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return copied


def padded_to(buckets: Buckets | None, made: T) -> T:
    """Have forwards of a model, or of all models of a drafter or a decoder, padded as captured ones are; return it."""
    for lm in getattr(made, "models", (made,)):
        lm.buckets = buckets
    return made


def drawn(module: torch.nn.Module, seed: int = 3) -> Any:
    """Give a module random weights, its norms as they are."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, weight in module.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.4)
    return module.double().eval().requires_grad_(False)


def tiny_head(target: PreTrainedModel, seed: int = 3, **changes: Any) -> EagleHead:
    """Return a random EAGLE head for a tiny target. `changes` go to its config."""
    config = _config("LlamaConfig", num_hidden_layers=1, **changes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = EagleHead(config).to(target.dtype).eval().requires_grad_(False)
        for weight in head.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight[: config.vocab_size])
    return head


def published_config(head: EagleHead, **changes: Any) -> dict[str, Any]:
    """A config.json as EAGLE repositories have it: a Llama config in the words of transformers 4."""
    c = head.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "rope_theta": 10000.0,
        "rms_norm_eps": c.rms_norm_eps,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "use_cache": True,
    } | changes


def publish(
    folder: Path,
    head: EagleHead,
    file: str = "pytorch_model.bin",
    tensors: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> str:
    """Write a head as published, weights in float32, and return the folder."""
    tensors = head.state_dict() if tensors is None else tensors
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in tensors.items()}
    if file.endswith("bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(published_config(head, **changes)))
    return str(folder)


@functools.cache
def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of VOCAB tokens of two letters each, aa to hc; the last two are <unk> and </s>."""
    words = [chr(97 + token // 8) + chr(97 + token % 8) for token in range(VOCAB - 2)] + ["<unk>", "</s>"]
    model = tokenizers.models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[a-h]{2}"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def save_pair(root: Path) -> Path:
    """Save a tiny target and its draft model, with tokenizer and chat template, as root/target and root/draft."""
    tokenizer = tiny_tokenizer()
    for name, model in (("target", tiny("llama")), ("draft", tiny_drafter("llama"))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        (root / name / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return root


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def random_tree(rows: int, seed: int, root: int, vocab: int = VOCAB) -> Tree:
    """Return a random tree below the token `root`; siblings may repeat a token."""
    random = np.random.default_rng(seed)
    parents = np.array([-1, *(random.integers(0, row) for row in range(1, rows))])
    tokens = np.array([root, *random.integers(0, vocab, rows - 1)])
    return Tree(tokens, parents, np.zeros(rows), np.full(rows, -1))


@torch.no_grad()
def causal_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits `[tokens, vocab]` of a plain causal forward: no cache, no mask, no positions given."""
    return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
