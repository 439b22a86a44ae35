"""What a generation config changes logits by: settings that only `generate` of transformers applies, not the loop."""

import warnings
from typing import Any

import torch

from opt_tree.models.capabilities import end_tokens, size_of
from opt_tree.sampling import Temperature
from opt_tree.target import Target

_PROCESSING: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": [],
    "sequence_bias": {},
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "watermarking_config": None,
}
"""Settings of a generation config that change logits, also those of a greedy text; and at what they do not."""


def processing(config: Any) -> tuple[str, ...]:
    """Return what a generation config changes logits by, such as "repetition_penalty=1.1"."""
    named = {name: (getattr(config, name, None), neutral) for name, neutral in _PROCESSING.items()}
    return tuple(f"{name}={value}" for name, (value, neutral) in named.items() if value not in (None, neutral))


class TellsLeftOut(Target):
    """A target of a transformers model (`model`), which says what only `generate` of transformers would apply."""

    model: Any
    dtype: torch.dtype
    tokenizer_ends: frozenset[int] = frozenset()
    """End tokens that the tokenizer of its `Pair` names."""
    told: bool = False
    """Whether the warning was given."""

    @property
    def ends(self) -> frozenset[int]:  # type: ignore[override]
        """The end tokens that the model's generation config names now, and those of the pair's tokenizer."""
        return end_tokens(getattr(self.model, "generation_config", None)) | self.tokenizer_ends

    @property
    def size(self) -> str:
        """Parameters and dtype, for a reader."""
        return size_of(self.model, self.dtype)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the model's generation config asks for now, beyond temperature, top-k and top-p."""
        return processing(getattr(self.model, "generation_config", None))

    def about_to_decode(self, sampling: Temperature) -> None:
        """Warn once of what is left out; whoever gives processors of their own knows."""
        if self.told or getattr(sampling, "processors", None) or not self.left_out:
            return
        self.told = True
        warnings.warn(
            f"{self.name}: its generation_config has {', '.join(self.left_out)}, which only model.generate applies "
            "(with custom_generate, too); here give it as Sampling(processors=...)",
            stacklevel=3,
        )
