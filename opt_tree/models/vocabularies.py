"""Whether a target and its draft model mean the same tokens by the same ids, and by which of them.

A family's models often differ behind a common vocabulary: one was trained on with tokens added to it, another has none
of them, or others. Such a pair is exact by any verifier as long as nothing is drafted but ids that mean the same.
Vocabularies of two families are compared by bytes (`token_bytes.py`).
"""

import filecmp
import warnings
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "added_tokens.json", "special_tokens_map.json")
_FEW = 0.01
"""A draft model that lacks a larger share of the target's tokens than this is worth a warning."""


def same_files(tokenizer: PreTrainedTokenizerBase, folder: str) -> bool:
    """Whether a folder has the tokenizer that this was loaded from, byte for byte: it need not be loaded again."""
    own, other = Path(tokenizer.name_or_path), Path(folder)
    names = {file.name for form in _FILES for place in (own, other) for file in place.glob(form)}
    return bool(names) and len(filecmp.cmpfiles(own, other, names, shallow=False)[0]) == len(names)


def same_tokens(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> bool:
    """Whether ids that both have are the same tokens, but for added ones: one vocabulary, or a family's."""
    ours, theirs = (_names(tokenizer) for tokenizer in (target, drafter))
    added = {index for each in (target, drafter) for index in each.get_added_vocab().values()}
    both = ours.keys() & theirs.keys()
    same = sum(ours[index] == theirs[index] for index in both)
    return bool(same) and all(ours[index] == theirs[index] for index in both - added)


def shared_ids(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
) -> Int[Tensor, " ids"] | None:
    """Return the ids that both give to the same token, in rising order; None where all are.

    An id that only one of them names, or that each gives to an added token of its own, is shared by none. A warning
    tells of a draft model that lacks much of what the target may write. For tokenizers of one family: see
    `same_tokens`.
    """
    ours, theirs = (_names(tokenizer) for tokenizer in (target, drafter))
    if ours == theirs:
        return None
    shared = [index for index in sorted(ours.keys() & theirs.keys()) if ours[index] == theirs[index]]
    if (missing := len(ours) - len(shared)) > _FEW * len(ours):
        warnings.warn(
            f"{drafter_name} lacks {missing} of the {len(ours)} tokens of {target_name}: they are never drafted, and "
            "it does not know them where it reads them",
            stacklevel=4,
        )
    return torch.tensor(shared)


def _names(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the token of each id. Spelled as the vocabulary spells its bytes, so that equal names are equal bytes."""
    return {index: token for token, index in tokenizer.get_vocab().items()}
