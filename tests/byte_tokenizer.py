"""A tokenizer for tests: one token for each byte, one for each word given, and a special stop token."""

from collections.abc import Sequence

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STOP = "<|end|>"
BYTES = 256


def byte_tokenizer(words: Sequence[str] = (), chat_template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer: bytes come first, then `words` (which text never turns into: no merges), then STOP."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(word)[0][0] for word in words]
    vocab = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled])}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer, raw.decoder = byte_level, decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=STOP, chat_template=chat_template)
