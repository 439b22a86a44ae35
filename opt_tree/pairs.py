"""A target and a drafter that belong together, loaded in one call."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from opt_tree.checkpoints import CheckpointError, encode, load_causal_lm, load_tokenizer, resolve, stop_tokens
from opt_tree.drafters import Drafter
from opt_tree.drafters.registry import DrafterOptions, load_drafter
from opt_tree.lm import Buckets, CausalLM
from opt_tree.stopping import Stop


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and a drafter for it."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter

    @property
    def stop(self) -> Stop:
        """The stop tokens that the tokenizer and the target's generation config name."""
        return stop_tokens(self.target, self.tokenizer)

    def encode(self, message: str) -> list[int]:
        """Token ids of a user's message: by the tokenizer's chat template where it has one, else as bare text."""
        return encode(self.tokenizer, [{"role": "user", "content": message}])


def load_pair(
    target: str = "demo",
    drafter: str | None = None,
    eagle: str | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    draft_dtype: str | torch.dtype = "auto",
    device: str | None = None,
    bare: bool = False,
    buckets: Buckets | None = None,
    **model_options: Any,
) -> Pair:
    """Load the target at a path, a Hub id or "demo", and a drafter by its spec (`opt_tree.drafters.registry`).

    `drafter`: `lm:PATH`, `eagle:PATH`, ...; a bare path is a draft model's. `eagle=PATH` is short for
    `drafter="eagle:PATH"`. With "demo" as the target and nothing else named, the embedded draft model is taken. A
    temperature that calibration stored beside the drafter sharpens it at temperature 0, unless `bare`.
    dtype "auto": on a CPU that multiplies bfloat16 (avx512_bf16, amx) the target is bfloat16 and an independent drafter
    float32, as measured in RESULTS.md; on another CPU float32; on an accelerator the checkpoint's own. `model_options`
    go to transformers (`device_map=`, `quantization_config=`, ...).
    """
    if drafter and eagle:
        raise CheckpointError("name a drafter or an EAGLE head, not both")
    if not drafter and not eagle and target != "demo":
        raise CheckpointError(f"no drafter named for {target}")
    spec = f"eagle:{eagle}" if eagle else drafter or "demo"
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve(target, "target")
    lm = load_causal_lm(folder, dtype, device, buckets, **model_options)
    tokenizer = load_tokenizer(folder)
    return Pair(lm, tokenizer, load_drafter(spec, lm, DrafterOptions(tokenizer, draft_dtype, device, buckets, bare)))
