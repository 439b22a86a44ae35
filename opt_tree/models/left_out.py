"""What a generation config changes logits by: settings that only `generate` of transformers applies, not the loop."""

from typing import Any

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
