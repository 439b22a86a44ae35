"""Whether a target and its draft model mean the same tokens by the same ids, and by which of them.

A family's models often differ behind a common vocabulary: one was trained on with tokens added to it, another has none
of them, or others. Such a pair is exact by any verifier as long as nothing is drafted but ids that mean the same.
"""

import warnings

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opt_tree.errors import counted
from opt_tree.models.checkpoints import CheckpointError

_FEW = 0.01
"""A draft model that lacks a larger share of the target's tokens than this is worth a warning."""


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
) -> None:
    """Raise CheckpointError unless both name the same tokens by the same ids."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours == theirs:
        return
    different = sum(theirs.get(token) != index for token, index in ours.items())
    extra = sorted(theirs.keys() - ours.keys(), key=lambda token: theirs[token])
    such = f" (such as {extra[0]!r})" if extra else ""
    raise CheckpointError(
        f"different tokenizers: {different} of the {len(ours)} tokens of {target_name} have another id or none in "
        f"{drafter_name}, which has {counted(len(extra), 'token')} of its own{such}"
    )


def shared_ids(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
) -> Int[Tensor, " ids"] | None:
    """Return the ids that both give to the same token, in rising order; None where all are.

    An id that only one of them names, or that each gives to an added token of its own, is shared by none. Raises
    CheckpointError where an id is another token of the vocabulary proper: then they are other tokenizers. A warning
    tells of a draft model that lacks much of what the target may write.
    """
    ours, theirs = (_names(tokenizer) for tokenizer in (target, drafter))
    if ours == theirs:
        return None
    added = {index for each in (target, drafter) for index in each.get_added_vocab().values()}
    both = sorted(ours.keys() & theirs.keys())
    shared = [index for index in both if ours[index] == theirs[index]]
    other = [index for index in both if ours[index] != theirs[index] and index not in added]
    if other or not shared:
        such = "".join(f" (such as {index}: {ours[index]!r} and {theirs[index]!r})" for index in other[:1])
        raise CheckpointError(
            f"different tokenizers: {len(other)} of the {counted(len(both), 'id')} that both have stand for one token "
            f"in {target_name} and for another one in {drafter_name}{such}; a drafter must share its target's tokenizer"
        )
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
